"""Paths that a user names: `~` is the home folder, as in a shell."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def expanded(path: str) -> str:
    """Replace a leading `~` or `~USER` of a path by a home folder, as a shell does.

    A name that belongs to no user, such as `~tilde`, stays a name, and so does `./~`. Both become
    absolute paths, so that expanding the result again changes nothing.

    >>> expanded("runs/my")
    'runs/my'
    >>> expanded("./~").endswith("/~")
    True
    """
    with suppress(ValueError):  # a NUL or half of a surrogate pair
        path = os.path.expanduser(path)  # noqa: PTH111 - Path.expanduser raises for ~tilde
    is_name = os.path.normpath(path).startswith("~")
    return os.path.abspath(path) if is_name else path  # noqa: PTH100 - resolve follows links


def named_path(path: str | Path) -> Path:
    """Return the path that a user names, with `~` expanded."""
    return Path(expanded(str(path)))
