"""Workflows: one module a verb; only these read a configuration and compose all levels."""
