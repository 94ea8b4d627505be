"""Command line of Toque."""

from toque.cli.app import main

__all__ = ["main"]
