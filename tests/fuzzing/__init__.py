"""Damaged files of every kind, and the commands that read them."""
