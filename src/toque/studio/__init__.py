"""Studio: a page that starts, watches and uses runs of one folder."""
