"""Places of runs: read access to a run's files in a local folder or a bucket.

Nothing is written or locked, because the run may be in use. Links are not followed, because the run
may be untrusted.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, final

from toque.errors import ConfigError
from toque.runs.history import METRICS
from toque.storage.bucket import Bucket, BucketError, is_remote
from toque.storage.no_follow import open_plain

MAX_READ_BYTES: Final = 8 << 20
"""Maximum number of bytes per read. A longer file takes several reads."""
_DEPTH: Final = 3
"""Number of folder levels to search for runs."""
_MAX_RUNS: Final = 200
_RUN_FOLDERS: Final = frozenset(
    {"checkpoints", "best", "model", "outbox", "tensorboard", "wandb"}
)
"""Folders inside a run. The search skips them, because they contain no other runs."""


@dataclass(frozen=True)
class FileState:
    """Size and version of a file."""

    bytes: int
    tag: str
    """Identity of the file. It changes if the file is replaced, but not if the file grows."""
    changed: float | None
    """Time of the last write in seconds since 1970. None if it is unknown."""


def is_in_a_bucket(address: str) -> bool:
    """Check whether a run's address is in a bucket, not a folder.

    Raises:
        ConfigError: The scheme is not supported.
    """
    try:
        return is_remote(address)
    except BucketError as error:
        scheme = address.partition("://")[0]
        raise ConfigError(
            f"Runs at {scheme}:// addresses are not supported. Give a local folder, "
            "gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."
        ) from error


@final
@dataclass(frozen=True)
class FolderPlace:
    """Run in a local folder."""

    folder: Path

    @property
    def address(self) -> str:
        """Path of the folder."""
        return str(self.folder)

    def look(self, name: str) -> FileState | None:
        """Look up the state of a plain file. Return None if it is missing, a link or a device.

        Raises:
            OSError: The folder cannot be read.
        """
        try:
            status = (self.folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return FileState(
            status.st_size, f"{status.st_dev}:{status.st_ino}", status.st_mtime
        )

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of a file, or fewer at its end.

        Raises:
            OSError: The file cannot be read.
        """
        with open_plain(self.folder / name) as file:
            return os.pread(file.fileno(), end - start, start)


@final
@dataclass(frozen=True)
class BucketPlace:
    """Run in a bucket."""

    bucket: Bucket
    below: str = ""
    """Folder of the run below the bucket's address, with a slash at its end. Empty if the address
    is the run."""

    folder: None = None
    """A run in a bucket has no local folder."""

    @property
    def address(self) -> str:
        """Address of the run: gs://BUCKET/FOLDER."""
        return f"{self.bucket.address}/{self.below}".rstrip("/")

    def look(self, name: str) -> FileState | None:
        """Look up the current state of a file. Return None if it does not exist.

        Raises:
            BucketError: The bucket cannot be read.
        """

        def send() -> FileState | None:
            try:
                file = self.bucket.info(self._key(name))
            except FileNotFoundError:
                return None
            # The tag never changes: a run only appends to the objects that are read in parts.
            return FileState(file.bytes, "object", None)

        return self.bucket.request(f"look at {self.address}/{name}", send)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of a file, or fewer at its end.

        Raises:
            BucketError: The bucket cannot be read.
        """

        def send() -> bytes:
            file = self.bucket.info(self._key(name))
            stop = min(end, file.bytes)
            return self.bucket.read_range(file, start, stop) if stop > start else b""

        return self.bucket.request(f"read {self.address}/{name}", send)

    def _key(self, name: str) -> str:
        return f"{self.bucket.path}/{self.below}{name}"


Place = FolderPlace | BucketPlace
"""Folder or bucket with the files of one run."""


def read_small_file(place: Place, name: str) -> bytes | None:
    """Read a small file. Return None if it does not exist.

    Raises:
        OSError: The file cannot be read.
        BucketError: The bucket cannot be read.
    """
    file = place.look(name)
    if file is None:
        return None
    return place.read(name, 0, min(file.bytes, MAX_READ_BYTES))


@final
@dataclass(frozen=True)
class RunFinder:
    """Finder of runs at an address: the address itself, or folders below it."""

    where: Path | Bucket
    """Local folder or bucket to search. Links in a folder are not followed."""

    @property
    def address(self) -> str:
        """Address of the folder or bucket."""
        return str(self.where) if isinstance(self.where, Path) else self.where.address

    def places(self) -> Mapping[str, Place]:
        """Find the current runs, at most `_MAX_RUNS`. Return them by short name.

        Raises:
            OSError: The folder cannot be read.
            BucketError: The bucket cannot be read.
        """
        if isinstance(self.where, Bucket):
            return _runs_in_bucket(self.where)
        return _runs_in_folder(self.where)


def _runs_in_bucket(bucket: Bucket) -> dict[str, Place]:
    """Find the runs in a bucket, by the path of their folder."""
    names = bucket.names()
    if METRICS in names or "config.yaml" in names:
        name = bucket.path.rstrip("/").rpartition("/")[2]
        return {name: BucketPlace(bucket)}
    folders = [n.removesuffix(METRICS) for n in names if n.endswith(f"/{METRICS}")]
    return {
        folder.rstrip("/"): BucketPlace(bucket, folder)
        for folder in sorted(folders)[:_MAX_RUNS]
    }


def _runs_in_folder(folder: Path) -> dict[str, Place]:
    """Find the runs in a local folder, by the path of their folder."""
    if is_run(folder):
        return {folder.resolve().name: FolderPlace(folder)}
    run_folders = islice(_runs_below(folder, _DEPTH), _MAX_RUNS)
    return {
        run_folder.relative_to(folder).as_posix(): FolderPlace(run_folder)
        for run_folder in run_folders
    }


def is_run(folder: Path) -> bool:
    """Check whether a folder is a run."""
    return (folder / METRICS).exists() or (folder / "checkpoints").is_dir()


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of runs, sorted. Unreadable folders are skipped."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name in _RUN_FOLDERS or entry.name.startswith("."):
            continue
        path = Path(entry.path)
        with suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                continue
            if is_run(path):
                yield path
            elif depth > 1:
                yield from _runs_below(path, depth - 1)
