"""Atomic writes: after a kill, a file or folder is either complete or absent.

Data is written and fsynced under a temporary name in the same folder, then renamed. Finally, the
parent folder is fsynced. A crash leaves the old state or the new state. It may also leave a
temporary file or folder, which `sweep` or the next write of the same folder removes. Nothing is
written through a link: a temporary file has a random name, and a temporary folder is always new.
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
"""Function called after each system call of a folder write. Tests use it to kill the process."""
TEMP_PREFIX: Final = "temp-"
"""Prefix of an unfinished folder. Such a folder is safe to delete once its writer has ended."""
ASIDE_PREFIX: Final = "aside-"
"""Prefix of an old folder while a new folder replaces it."""
PARTIAL: Final = ".partial"
"""Suffix of an unfinished file."""
_LEFTOVER: Final = re.compile(r"\..+\.[0-9a-f]{16}\.partial")
"""Names of temporary files of `atomic_path`."""
_DISK_FULL: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NOT_WRITABLE: Final = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}


@contextmanager
def atomic_path(path: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` if the block ends without an error.

    The temporary name is hidden and random, so no one can place a link there first. A link at
    `path` is replaced, and its target is not changed.

    Args:
        path: The file to write.
        new: Whether `path` must not exist yet.

    Raises:
        FileExistsError: `new` is set and `path` exists.
    """
    partial = path.with_name(f".{path.name}.{os.urandom(8).hex()}{PARTIAL}")
    try:
        yield partial
        sync_file(partial)  # some file systems report a full disk only at fsync
        if new:
            link_or_rename(partial, path)
        else:
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def atomic_file(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Yield a file to write, which appears at `path` if the block ends without an error."""
    with (
        atomic_path(path, new=new) as partial,
        os.fdopen(open_new(partial), "wb") as file,
    ):
        yield file


def atomic_write(path: Path, data: bytes, *, new: bool = False) -> None:
    """Write a file so that a kill leaves the old content, no file, or the new content.

    Raises:
        FileExistsError: `new` is set and `path` exists.
    """
    with atomic_file(path, new=new) as file:
        file.write(data)


def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write a new `.npy` file and fsync it."""
    with os.fdopen(open_new(path), "wb") as file:
        write_array(file, array)
        file.flush()
        os.fsync(file.fileno())


def write_array(file: BinaryIO, array: NDArray[np.generic]) -> None:
    """Write an array in the format of `.npy` files."""
    # np.save and np.lib.format.write_array do not identify a full disk: their OSError has no errno
    # ("1220862 requested and 1089472 written").
    array = np.ascontiguousarray(array)
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(array.tobytes())


def sha256_of(path: Path) -> str:
    """Compute the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, hashlib.sha256).hexdigest()


def md5_of(path: Path) -> str:
    """Compute the MD5 of a file's bytes, in hexadecimal, to compare with a bucket's MD5.

    MD5 detects damage, not forgery.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest()


@dataclass(frozen=True)
class FileEntry:
    """Entry of a file in its folder's manifest."""

    file: str
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


def no_hook(_stage: str) -> None:
    """Do nothing. This is the default of `after`."""


@dataclass(frozen=True)
class FolderWriter:
    """Writer of files into an unfinished folder. Its methods raise OSError if a write fails."""

    folder: Path
    after: AfterStage = no_hook

    def put(self, name: str, data: bytes) -> FileEntry:
        """Write `data` as the file `name`, and return its size and SHA-256."""
        return self.write(name, lambda path: write_new(path, data))

    def write(self, name: str, save: Callable[[Path], object]) -> FileEntry:
        """Call `save` to write the file `name`, and return its size and SHA-256."""
        path = self.folder / name
        save(path)
        self.after(f"write {name}")
        return FileEntry(name, path.stat().st_size, sha256_of(path))


@contextmanager
def atomic_folder(
    target: Path, *, after: AfterStage = no_hook, has_many_files: bool = False
) -> Iterator[FolderWriter]:
    """Yield a writer of a new folder, which appears at `target` if the block ends without an error.

    An existing folder at `target` is replaced. After a crash, `sweep` restores the old folder if
    the new one is not in place. After an OSError, `target` is unchanged and no temporary folder
    remains.

    Args:
        target: The new folder.
        after: Function called after each system call.
        has_many_files: Write all file systems to disk once, instead of one fsync per file.
    """
    refuse_moved(target)
    temp = target.with_name(TEMP_PREFIX + target.name)
    shutil.rmtree(temp, ignore_errors=True)
    try:
        temp.mkdir(parents=True)
        after("mkdir")
        yield FolderWriter(temp, after)

        if has_many_files:
            os.sync()
        else:
            _sync_files(temp, after)
        sync_folder(temp)
        after("fsync folder")

        refuse_moved(target)
        _replace_folder(temp, target, after)
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _sync_files(folder: Path, after: AfterStage) -> None:
    """Fsync every file in a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sync_file(path)
            after(f"fsync {path.name}")


def _replace_folder(temp: Path, target: Path, after: AfterStage) -> None:
    """Rename `temp` to `target`, and remove an old folder at `target`."""
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


def link_or_rename(source: Path, target: Path) -> None:
    """Hard-link a file to a new name, or rename it if the file system has no hard links.

    Raises:
        FileExistsError: `target` exists.
    """
    try:
        os.link(source, target)
    except FileExistsError:
        raise
    except OSError:
        # Without hard links, a file that is created after this check is replaced.
        if os.path.lexists(target):
            reason = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, reason, str(target)) from None
        source.rename(target)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file or symbolic link to a new name, or copy it if that is not possible."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def move_into(path: Path, folder: Path, name: str) -> None:
    """Move a file or folder to `folder / name`, and fsync. Create `folder` if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / name)
    sync_folder(folder)
    sync_folder(path.parent)


def remove_folder(folder: Path, *, after: AfterStage = no_hook) -> None:
    """Delete a folder. A crash never leaves a partial folder under its name."""
    refuse_moved(folder)
    temp = folder.with_name(f"{TEMP_PREFIX}removed-{folder.name}")
    shutil.rmtree(temp, ignore_errors=True)
    folder.rename(temp)
    after(f"rename {folder.name} away")
    shutil.rmtree(temp, ignore_errors=True)
    after(f"remove {folder.name}")


def sweep(folder: Path) -> list[str]:
    """Remove the files and folders that killed writers left in `folder`, and return their names.

    A replaced folder is restored if its writer was killed between its two renames. The caller must
    have locked `folder`.
    """
    removed = sweep_files(folder)
    for path in sorted(folder.glob(f"{TEMP_PREFIX}*")):
        shutil.rmtree(path, ignore_errors=True)
        removed.append(path.name)

    for path in sorted(folder.glob(f"{ASIDE_PREFIX}*")):
        original = path.with_name(path.name.removeprefix(ASIDE_PREFIX))
        if original.exists():
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
        else:
            path.rename(original)
    return removed


def sweep_files(folder: Path) -> list[str]:
    """Remove the unfinished files that killed writers left in `folder`, and return their names."""
    removed = []
    for path in sorted(folder.glob(f".*{PARTIAL}")):
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


def sync_file(path: Path) -> None:
    """Fsync a file, so that its content survives a power cut. Only fsync may report a full disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that renames in it survive a power cut."""
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
    """Convert the OSError for a full disk or a missing permission into an `error` with advice.

    Args:
        folder: The folder to write.
        what: The activity, for the message, e.g. "writing the store".
        setting: The setting with the folder's path, for the message.
        error: Class of the error.
    """
    try:
        yield
    except OSError as fault:
        if fault.errno in _DISK_FULL:
            raise error(
                f"The disk of {folder} is full ({fault.strerror}) while {what}. Free some space or "
                f"point {setting} to another disk, then run the same command again to continue."
            ) from fault
        if fault.errno in _NOT_WRITABLE:
            raise error(
                f"Cannot write {fault.filename or folder} ({fault.strerror}) while {what}. Change "
                f"the permissions, or point {setting} to a folder that you may write."
            ) from fault
        raise
