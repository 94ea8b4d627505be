"""Files of a run's folder that are written for people: the log and the model card."""
