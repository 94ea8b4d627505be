"""Workflows, one module per command. They read the configuration and combine the other packages."""
