"""Atomic writes: a file or folder is whole under its name or absent, whatever kills the process.

Everything is written under a temporary name beside its place and fsynced, then renamed, then the
parent folder is fsynced. A crash leaves the old state or the new one, and at worst a leftover that
`sweep` removes, or the next write of the same folder. Nothing is ever written through a link: a
temporary file has a name that nobody can foresee, and a temporary folder is made anew.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError, ToqueError
from toque.storage.no_follow import open_new, refuse_moved, write_new

AfterStage = Callable[[str], None]
"""Function called after each system call of a folder's write, where tests kill the process."""
TEMP_PREFIX: Final = "temp-"  # of an unfinished folder; safe to delete when its writer is gone
ASIDE_PREFIX: Final = "aside-"  # of a folder that is being replaced by one of the same name
PARTIAL: Final = ".partial"  # ends the name of a file that is being written
_LEFTOVER: Final = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def atomic_path(path: Path, *, new: bool = False) -> Iterator[Path]:
    """A name at which a file is written; it appears at `path` when the block ends without an error.

    The temporary name is hidden from readers of the folder, and drawn, so that nobody can put a
    link in its way. A link at `path` itself is replaced, and what it leads to is untouched. With
    `new` whatever is at `path` stays, by a FileExistsError.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}{PARTIAL}")
    try:
        yield partial
        sync_file(partial)  # a full disk may show only here
        if new:
            link_or_rename(partial, path)
        else:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def atomic_file(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """A file to write; it appears at `path` when the block ends without an error."""
    with atomic_path(path, new=new) as partial, os.fdopen(open_new(partial), "wb") as file:
        yield file


def atomic_write(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file so that a kill leaves the old one, or none, or the new one.

    With `new` there may be no old one: FileExistsError.
    """
    with atomic_file(path, new=new) as file:
        file.write(data)


def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write a `.npy` file that did not exist, on the disk when this returns."""
    with os.fdopen(open_new(path), "wb") as file:
        write_array(file, array)
        file.flush()
        os.fsync(file.fileno())


def write_array(file: BinaryIO, array: NDArray[np.generic]) -> None:
    """Write an array in the format of `.npy` files."""
    # Not np.save, nor its write_array: on a full disk they raise an OSError that does not say so
    # ("1220862 requested and 1089472 written", no errno).
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(array.tobytes())


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def md5_of(path: Path) -> str:
    """MD5 of a file's bytes, in hexadecimal: what buckets compare by, no proof against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """One file of a folder, as its manifest lists it."""

    file: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


def no_hook(_stage: str) -> None:
    """The `after` of every write outside the tests."""


@dataclass(frozen=True)
class FolderWriter:
    """Writes the files of one unfinished folder; OSError when the file system refuses."""

    folder: Path
    after: AfterStage = no_hook

    def put(self, name: str, data: bytes) -> FileEntry:
        """Write `data` as the file `name`, and return its size and SHA-256."""
        return self.write(name, lambda path: write_new(path, data))

    def write(self, name: str, save: Callable[[Path], object]) -> FileEntry:
        """Have `save` write the file `name`, and return its size and SHA-256."""
        path = self.folder / name
        save(path)
        self.after(f"write {name}")
        return FileEntry(name, path.stat().st_size, sha256_of(path))


@contextmanager
def atomic_folder(target: Path, *, after: AfterStage = no_hook) -> Iterator[FolderWriter]:
    """A folder to fill; it appears at `target` when the block ends without an error.

    A folder already at `target` is replaced; it is never absent and unrecoverable (see `sweep`).
    After an OSError nothing unfinished is left and `target` is as before.
    """
    refuse_moved(target)
    temp, aside = (target.with_name(start + target.name) for start in (TEMP_PREFIX, ASIDE_PREFIX))
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        after("mkdir")
        yield FolderWriter(temp, after)
        for path in sorted(temp.rglob("*")):
            if path.is_file():
                sync_file(path)
                after(f"fsync {path.name}")
        sync_folder(temp)
        after("fsync folder")
        refuse_moved(target)
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
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def link_or_rename(source: Path, target: Path) -> None:
    """Give a file a second name, or on a file system without hard links another; never replace."""
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        if os.path.lexists(target):  # one that comes after this look would be replaced
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        source.rename(target)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file, or a link itself, a second name; a copy on a file system without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def move_into(path: Path, folder: Path, name: str) -> None:
    """Rename a file or folder to `name` in `folder`, which is made when missing, durably."""
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / name)
    sync_folder(folder)
    sync_folder(path.parent)


def remove_folder(folder: Path, *, after: AfterStage = no_hook) -> None:
    """Delete a folder so that a crash half-way leaves no part of it under its name."""
    refuse_moved(folder)
    doomed = folder.with_name(f"{TEMP_PREFIX}removed-{folder.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    after(f"rename {folder.name} away")
    shutil.rmtree(doomed, ignore_errors=True)
    after(f"remove {folder.name}")


def sweep(folder: Path) -> list[str]:
    """Remove what killed writers left in `folder`, whose lock the caller holds; the names."""
    removed = sweep_files(folder)
    aside = sorted(folder.glob(f"{ASIDE_PREFIX}*"))
    for path in [*sorted(folder.glob(f"{TEMP_PREFIX}*")), *aside]:
        original = path.with_name(path.name.removeprefix(ASIDE_PREFIX))
        if original.exists():  # a temporary folder is its own
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        else:
            path.rename(original)  # killed between the two renames: the old one still counts
    return removed


def sweep_files(folder: Path) -> list[str]:
    """Remove the unfinished files of killed writers in `folder`; the names removed."""
    removed = []
    for path in sorted(folder.glob(f".*{PARTIAL}")):
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def sync_file(path: Path) -> None:
    """Make the content of a file last through a power cut; a full disk may show only here."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_faults(
    folder: Path,
    what: str,
    *,
    setting: str = "data.store",
    error: type[ToqueError] = DataError,
) -> Iterator[None]:
    """Turn a full disk or missing right under `folder`, that `setting` names, into an `error`."""
    try:
        yield
    except OSError as fault:
        if fault.errno in _FULL:
            raise error(
                f"The disk of {folder} is full ({fault.strerror}) while {what}. Make space, or "
                f"point {setting} elsewhere, and run the same command again; it continues."
            ) from fault
        if fault.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}:
            raise error(
                f"{fault.filename or folder} cannot be written ({fault.strerror}) while {what}. "
                f"Change the permissions, or point {setting} at a folder of yours."
            ) from fault
        raise
