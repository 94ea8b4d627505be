"""Held folder: nothing is written into another folder that was put where a held one was.

A path is a name, which somebody may give to another folder while a run goes on. A descriptor stays
with the folder; the two are compared before whatever is written or removed (`atomic`, `no_follow`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from toque.errors import CheckpointError

_HELD: Final[dict[Path, int]] = {}
"""Descriptors of the folders that this process holds, by their absolute paths."""


@contextmanager
def held_folder(folder: Path) -> Iterator[None]:
    """Hold an existing folder until the context ends."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _HELD[folder.absolute()] = descriptor
    try:
        yield
    finally:
        _HELD.pop(folder.absolute(), None)
        os.close(descriptor)


def place_of(folder: Path) -> Path:
    """Where a held folder is now: `folder` itself unless it was moved, one beside it if removed."""
    descriptor = _HELD.get(folder.absolute())
    if descriptor is None or _is(folder, descriptor):
        return folder
    with suppress(OSError):  # a system without /proc
        if _is(moved := Path(f"/proc/self/fd/{descriptor}").readlink(), descriptor):
            return moved
    return folder.with_name(f"{folder.name}.aside-{os.getpid()}")


def refuse_moved(path: Path) -> None:
    """Refuse a path in a held folder that is not where it was any more.

    Raises:
        CheckpointError: saying where it is.
    """
    for folder in list(_HELD):
        if path.absolute().is_relative_to(folder) and (now := place_of(folder)) != folder:
            raise CheckpointError(
                f"{folder} is not the folder that this run began in: that one was moved or removed "
                "while the run went on, and whatever is there now is left as it is. What the run "
                f"has saved is in {now}. To continue, move it back or set run_dir={now}, and start "
                "the same command."
            )


def _is(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a file system that does not answer has not said so
        return True
