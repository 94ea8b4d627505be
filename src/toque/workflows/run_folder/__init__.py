"""Run folder: its lock, its log, and the checkpoint that a session starts from."""
