"""Toque trains language models that write recipes, and any other text.

Importing this package does nothing; `toque.config`, `toque.build` and the command line are where
work begins.
"""

__version__ = "0.1.0"
