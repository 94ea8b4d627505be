"""Settings of a run as they are resolved, and the batch of an update as text."""
