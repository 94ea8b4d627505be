"""Folders that are whole or absent, whatever kills the process or the machine.

A folder is written under a temporary name beside its place: every file is written, hashed and
fsynced, then the folder is fsynced, then renamed, then the parent is fsynced. A crash at any point
leaves either the old state or the new one, and at worst a leftover that `sweep` removes.

Each system call is followed by `after(stage)`, through which the tests kill the process there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec

from toque.errors import CheckpointError
from toque.storage.atomic import sync_folder

AfterStage = Callable[[str], None]
Buffer = bytes | memoryview

TEMP_PREFIX: Final = "temp-"
"""Begins the name of everything unfinished; safe to delete when its writer is gone."""
ASIDE_PREFIX: Final = "aside-"
"""Begins the name of a folder that is being replaced by one of the same name."""
_PIECE_BYTES: Final = 1 << 24
_NO_LOCKS_HERE: Final = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder, as its manifest lists it."""

    file: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


def no_hook(_stage: str) -> None:
    """What `after` is outside the tests."""


@dataclass(frozen=True)
class FolderWriter:
    """Writes the files of one unfinished folder."""

    folder: Path
    after: AfterStage = no_hook

    def write(self, name: str, content: Iterable[Buffer]) -> FileEntry:
        """Write `content` as the file `name`, durably, and return its size and hash.

        Raises:
            OSError: the file system refused, most often because it is full.
        """
        digest, size = hashlib.sha256(), 0
        with (self.folder / name).open("xb") as file:
            self.after(f"open {name}")
            for buffer in content:
                for start in range(0, len(buffer), _PIECE_BYTES):
                    piece = buffer[start : start + _PIECE_BYTES]
                    file.write(piece)
                    digest.update(piece)
                    size += len(piece)
            file.flush()
            self.after(f"write {name}")
            os.fsync(file.fileno())  # a full disk may show only here
            self.after(f"fsync {name}")
        return FileEntry(name, size, digest.hexdigest())


@contextmanager
def whole_folder(target: Path, *, after: AfterStage = no_hook) -> Iterator[FolderWriter]:
    """A writer whose files appear at `target` together when the block ends without an error.

    A folder already at `target` is replaced; it is never absent and unrecoverable (see `sweep`).

    Raises:
        OSError: the file system refused; nothing unfinished is left and `target` is as before.
    """
    temp = target.with_name(f"{TEMP_PREFIX}{target.name}-{os.getpid()}")
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir()
        after("mkdir")
        yield FolderWriter(temp, after)
        sync_folder(temp)
        after("fsync folder")
        _put_in_place(temp, target, after)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _put_in_place(temp: Path, target: Path, after: AfterStage) -> None:
    aside = target.with_name(ASIDE_PREFIX + target.name)
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        after("set aside")
    try:
        temp.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    after("rename")
    sync_folder(target.parent)
    after("fsync parent")
    shutil.rmtree(aside, ignore_errors=True)


def remove_folder(folder: Path, *, after: AfterStage = no_hook) -> None:
    """Delete a folder so that a crash half-way leaves no part of it under its name."""
    doomed = folder.with_name(f"{TEMP_PREFIX}removed-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    after(f"rename {folder.name} away")
    shutil.rmtree(doomed, ignore_errors=True)
    after(f"remove {folder.name}")


def sweep(folder: Path) -> list[str]:
    """Remove what killed writers left in `folder`; call only while holding its lock.

    Returns:
        The names removed.
    """
    removed = []
    for path in sorted(folder.glob(f"{TEMP_PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)
    for path in sorted(folder.glob(f"{ASIDE_PREFIX}*")):
        original = path.with_name(path.name.removeprefix(ASIDE_PREFIX))
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        else:
            path.rename(original)  # killed between the two renames: the old one still counts
    return removed


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process; the system releases it however the process ends.

    Raises:
        CheckpointError: another process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be written: {error.strerror}. Checkpoints are kept there; choose "
            "another run_dir, or give yourself the right to write."
        ) from error
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
        raise CheckpointError(
            f"{folder} is in use by another training process (id {holder or 'unknown'}). Two "
            "runs in one folder would overwrite each other: wait for it, stop it, or choose "
            "another run_dir."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:  # some network file systems have none
            raise
    with contextlib.suppress(OSError):  # the name is a courtesy; a full disk may refuse it
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
