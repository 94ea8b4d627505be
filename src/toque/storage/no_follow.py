"""No-follow opening: files of run and store folders, never written or sent through a link.

Such a folder may come from a stranger. A symbolic link in it that is named as a file Toque writes
(metrics.jsonl, .lock, report.html) would otherwise make any file of the user its target.

Nor is anything written into another folder that was put where a held one was: before whatever is
written or removed, the path is compared with a descriptor, which stays with the folder.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from toque.errors import CheckpointError

LINK: Final = "it is a symbolic link, and none is followed here"
_NOT_PLAIN: Final = "it is not a plain file"
_LEFT_ALONE: Final = "wandb"  # links inside itself, and Toque writes nothing there
_TEXTS: Final = (".json", ".jinja", ".md", ".txt", ".model")  # suffixes in a model's folder
_MOST_TEXT: Final = 1 << 28  # bytes; the largest vocabularies have a tenth
_HELD: Final[dict[Path, int]] = {}
"""Descriptors of the folders that this process holds, by their absolute paths."""


def open_no_follow(path: Path, flags: int) -> int:
    """A descriptor by `os.open`, closed on exec; a symbolic link is an OSError that says so."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from error
        raise


def open_new(path: Path) -> int:
    """A descriptor to write a file that did not exist; FileExistsError for a file or any link."""
    refuse_moved(path)
    return open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def open_plain(path: Path) -> BinaryIO:
    """A plain file to read; a link, or whatever else is no plain file, is an OSError."""
    # Not blocked by a pipe that somebody put there meanwhile.
    descriptor = open_no_follow(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))


def open_append(path: Path) -> int:
    """A descriptor to append to `path` and to read it; the file is made when missing.

    One that has a second name elsewhere (a hard link) is copied first, so that the other stays as
    it is. A link, or whatever else is no plain file, is an OSError.
    """
    refuse_moved(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    descriptor = open_no_follow(path, flags)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
        return descriptor
    try:
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))
        copy = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
        write_new(copy, os.pread(descriptor, found.st_size, 0))
        copy.replace(path)
    finally:
        os.close(descriptor)
    return open_no_follow(path, flags)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that did not exist, in a folder that is not in use yet."""
    with os.fdopen(open_new(path), "wb") as file:
        file.write(data)


def refuse_endless_files(folder: Path) -> None:
    """Raise a CheckpointError where a pipe, a device or a text of gigabytes is in a model's folder.

    For what other libraries read whole there; weights are mapped.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        what = ""
        if path.exists() and not (path.is_file() or path.is_dir()):
            what = "is a pipe or a device, and no file"
        elif path.suffix in _TEXTS and path.is_file() and path.stat().st_size > _MOST_TEXT:
            what = f"is longer than {_MOST_TEXT:,} bytes, which no such file of a model is"
        if what:
            raise CheckpointError(
                f"{path} {what}. The folder is damaged or made to harm: copy it from its source "
                "again."
            )


def refuse_links_elsewhere(folder: Path) -> None:
    """Raise a CheckpointError where a text in a model's folder is a link out of it.

    A copy of the folder would hold, and perhaps publish, the file of the user's that it leads to.
    Those of a snapshot in the hub's cache lead to the blobs beside it.
    """
    real = folder.resolve()
    within = (real, real.parent.parent / "blobs")
    for path in folder.iterdir():
        target = path.resolve()
        if path.suffix in _TEXTS and not any(target.is_relative_to(place) for place in within):
            raise CheckpointError(
                f"{path} is a symbolic link to {path.readlink()}, outside its folder, and would be "
                "copied with the model. Put the file itself in its place, or remove the link."
            )


def refuse_links(folder: Path, refuse: Callable[[str], Exception]) -> None:
    """Refuse links and devices inside the folder of a run or store, which may itself be a link."""
    waiting = [folder]
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        except OSError:
            continue  # absent, or not ours to read: whoever opens it says so
        for entry in entries:
            place = Path(entry.path)
            if entry.is_dir(follow_symlinks=False):
                waiting += [place] if entry.name != _LEFT_ALONE else []
            elif not entry.is_file(follow_symlinks=False):
                link = f"a symbolic link to {place.readlink()}" if place.is_symlink() else ""
                raise refuse(
                    f"{place} is {link or 'no plain file'}, and writing through one inside a run "
                    "or a store, which may come from anyone, would overwrite what it leads to. "
                    "Remove it, or put what it leads to in its place."
                )


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
    """The place of a held folder: `folder` unless it was moved, one beside it if removed."""
    descriptor = _HELD.get(folder.absolute())
    if descriptor is None or _is(folder, descriptor):
        return folder
    with suppress(OSError):  # a system without /proc
        if _is(moved := Path(f"/proc/self/fd/{descriptor}").readlink(), descriptor):
            return moved
    return folder.with_name(f"{folder.name}.aside-{os.getpid()}")


def refuse_moved(path: Path) -> None:
    """Refuse a path in a held folder that is not where it was: a CheckpointError says where."""
    for folder in list(_HELD):
        if path.absolute().is_relative_to(folder) and (now := place_of(folder)) != folder:
            raise CheckpointError(
                f"{folder} is not the folder that this run began in: that one was moved or removed "
                f"meanwhile. What the run has saved is in {now}. To continue, move it back or set "
                f"run_dir={now}, and start the same command."
            )


def _is(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a file system that does not answer has not said so
        return True
