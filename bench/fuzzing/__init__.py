"""Damaged files and the commands that are given them, for bench/robustness/fuzz.py."""
