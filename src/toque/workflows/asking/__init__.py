"""Asking of models: what each was trained to be asked, and how its folder says so."""
