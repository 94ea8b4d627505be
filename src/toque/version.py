"""Version of the package, in a module that imports nothing."""

__version__ = "0.2.0"
