"""RunConfig -> objects: the only package that reads a configuration and composes all levels.

Import its modules, not this one: `build.data` needs no torch, the others do.
"""
