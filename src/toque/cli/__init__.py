"""The commands."""

from toque.cli.app import main

__all__ = ["main"]
