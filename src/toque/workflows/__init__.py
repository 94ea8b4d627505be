"""Workflows: one module a verb; only these read a configuration and compose all levels.

Import its modules, not this one: `build.data` needs no torch, the others do.
"""
