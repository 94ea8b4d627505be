"""Files that are whole or absent, their hashes, and what a full disk is called."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toque.errors import DataError

_CHUNK = 1 << 22
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PARTIAL = ".partial"
"""Ending of a file or folder that is being written; a leftover one is worth nothing."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a kill leaves the old one, or none, or the new one."""
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def save_array(path: Path, array: NDArray[np.generic]) -> None:
    """Write a `.npy` file, on the disk when this returns."""
    with path.open("wb") as file:
        # Not np.save, nor its write_array: on a full disk they raise an OSError that does not say
        # so ("1220862 requested and 1089472 written", no errno).
        array = np.ascontiguousarray(array)
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill; it appears under its own name when the block ends well.

    An older folder of that name is replaced.
    """
    partial = folder.with_name(folder.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(partial)
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_faults(folder: Path, what: str, *, setting: str = "data.store") -> Iterator[None]:
    """Turn a full disk or a missing permission under `folder`, that `setting` names, into words.

    Raises:
        DataError: naming the folder, what is missing and that a new start continues.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DataError(
                f"The disk of {folder} is full ({error.strerror}) while {what}. Nothing already "
                f"finished is lost: make space, or point {setting} elsewhere, and run the same "
                "command again; it continues where it stopped."
            ) from error
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise DataError(
                f"{error.filename or folder} cannot be written ({error.strerror}) while {what}. "
                f"Change the permissions, or point {setting} at a folder of yours."
            ) from error
        raise
