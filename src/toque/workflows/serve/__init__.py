"""Serving: models opened by name, an address to listen on, and the server."""
