"""Workflows, one module per command. They read the configuration and connect all packages."""
