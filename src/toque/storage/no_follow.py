"""Functions that open files in run and store folders without following links.

Such a folder may be untrusted. If a file that Toque writes (metrics.jsonl, .lock, report.html) were
a symbolic link, Toque would overwrite its target, which may be any of the user's files.

A folder may also be replaced while it is in use. Therefore Toque compares its path with an open
descriptor of the folder before it writes or removes a file.
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

LINK: Final = "it is a symbolic link, and links are not followed here"
"""Reason in the error for a symbolic link."""
_NOT_PLAIN: Final = "it is not a regular file"
_UNCHECKED_FOLDER: Final = "wandb"
"""Folder that may contain links, because wandb creates them and Toque writes nothing there."""
_TEXT_SUFFIXES: Final = (".json", ".jinja", ".md", ".txt", ".model")
_MAX_TEXT_BYTES: Final = 1 << 28
"""Maximum size of a model's text file, in bytes: ten times the largest vocabularies."""
_PINNED: Final[dict[Path, int]] = {}
"""Open descriptors of the folders that this process uses, by the folder's absolute path."""


def open_no_follow(path: Path, flags: int) -> int:
    """Open a file with `os.open` and return its descriptor, which child programs do not inherit.

    Raises:
        OSError: The path is a symbolic link or cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, LINK, str(path)) from error
        raise


def open_new(path: Path) -> int:
    """Create a file and return its descriptor, open for writing.

    Raises:
        FileExistsError: A file or a link exists at the path.
    """
    refuse_moved(path)
    return open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def new_file(path: Path) -> BinaryIO:
    """Create a file, open for writing.

    Raises:
        FileExistsError: A file or a link exists at the path.
    """
    return os.fdopen(open_new(path), "wb")


def open_plain(path: Path) -> BinaryIO:
    """Open a plain file for reading.

    Raises:
        OSError: The path is a link or not a plain file.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = open_no_follow(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))


def open_append(path: Path) -> int:
    """Open a file for appending and reading, and return its descriptor. Create a missing file.

    A file with a second hard link is copied first, so that writing does not change the file of the
    other name.

    Raises:
        OSError: The path is a symbolic link or not a plain file.
    """
    refuse_moved(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    descriptor = open_no_follow(path, flags)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
        return descriptor

    try:
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, _NOT_PLAIN, str(path))
        copy = path.with_name(f".{path.name}.{os.urandom(8).hex()}.partial")
        write_new(copy, os.pread(descriptor, status.st_size, 0))
        copy.replace(path)
    finally:
        os.close(descriptor)
    return open_no_follow(path, flags)


def write_new(path: Path, data: bytes) -> None:
    """Write a new file."""
    with os.fdopen(open_new(path), "wb") as file:
        file.write(data)


def refuse_endless_files(folder: Path) -> None:
    """Refuse pipes, devices and huge texts in a model's folder, which libraries read to the end.

    Raises:
        CheckpointError: The folder has such a file.
    """
    for path in folder.iterdir() if folder.is_dir() else ():
        problem = ""
        is_text = path.suffix in _TEXT_SUFFIXES and path.is_file()
        if path.exists() and not (path.is_file() or path.is_dir()):
            problem = "is a pipe or a device, not a file"
        elif is_text and path.stat().st_size > _MAX_TEXT_BYTES:
            problem = f"is longer than {_MAX_TEXT_BYTES:,} bytes, too long for its kind"
        if problem:
            raise CheckpointError(
                f"{path} {problem}. The folder is damaged or malicious. Copy it again from its "
                "source."
            )


def refuse_links_elsewhere(folder: Path) -> None:
    """Refuse text files in a model's folder that are links to files outside the folder.

    A copy of the folder would contain, and perhaps publish, the user's file. In the hub's cache, a
    snapshot's links to the cache's blobs are allowed.

    Raises:
        CheckpointError: The folder has such a link.
    """
    real_folder = folder.resolve()
    allowed_folders = (real_folder, real_folder.parent.parent / "blobs")
    for path in folder.iterdir():
        if path.suffix not in _TEXT_SUFFIXES:
            continue
        target = path.resolve()
        if not any(target.is_relative_to(allowed) for allowed in allowed_folders):
            raise CheckpointError(
                f"{path} is a symbolic link to {path.readlink()}, outside its folder. The target "
                "would be copied with the model. Replace the link with the file, or remove it."
            )


def refuse_links(folder: Path, refuse: Callable[[str], Exception]) -> None:
    """Refuse links and devices inside a run or store folder. The folder itself may be a link.

    Args:
        folder: The folder. Its subfolders are also checked.
        refuse: Function that builds the error to raise from a message.
    """
    for entry in _entries_below(folder):
        if entry.is_file(follow_symlinks=False):
            continue
        path = Path(entry.path)
        kind = "not a regular file"
        if path.is_symlink():
            kind = f"a symbolic link to {path.readlink()}"
        raise refuse(
            f"{path} is {kind}. Run and store folders may be untrusted, and writing through a link "
            "would overwrite its target. Remove it, or replace it with the file."
        )


def _entries_below(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the files, links and devices in a folder and its subfolders, sorted per folder."""
    # A recursion would fail in an untrusted folder with too many levels.
    folders: list[Path | str] = [folder]
    while folders:
        try:
            entries = sorted(os.scandir(folders.pop()), key=lambda entry: entry.name)
        except OSError:
            continue  # missing or unreadable: opening it reports the error
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                yield entry
            elif entry.name != _UNCHECKED_FOLDER:
                folders.append(entry.path)


@contextmanager
def pinned_folder(folder: Path) -> Iterator[None]:
    """Keep an existing folder open, so that `refuse_moved` detects if it is moved or replaced."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _PINNED[folder.absolute()] = descriptor
    try:
        yield
    finally:
        _PINNED.pop(folder.absolute(), None)
        os.close(descriptor)


def current_path(folder: Path) -> Path:
    """Return the current path of a pinned folder, which may have been moved.

    For a removed folder, return a new name next to it. A folder that is not pinned has its own
    path.
    """
    descriptor = _PINNED.get(folder.absolute())
    if descriptor is None or _is_same_folder(folder, descriptor):
        return folder
    with suppress(OSError):  # the system has no /proc
        moved = Path(f"/proc/self/fd/{descriptor}").readlink()
        if _is_same_folder(moved, descriptor):
            return moved
    return folder.with_name(f"{folder.name}.aside-{os.getpid()}")


def refuse_moved(path: Path) -> None:
    """Refuse a path if its pinned folder was moved or removed.

    Raises:
        CheckpointError: The folder was moved or removed.
    """
    for folder in list(_PINNED):
        if not path.absolute().is_relative_to(folder):
            continue
        current = current_path(folder)
        if current != folder:
            raise CheckpointError(
                f"{folder} is not the folder that this run started in. The original folder was "
                f"moved or removed. The run has saved its files in {current}. To continue, move "
                f"it back or set run_dir={current}, and run the same command again."
            )


def _is_same_folder(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # the file system does not respond: assume the same folder
