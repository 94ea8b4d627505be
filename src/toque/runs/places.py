"""Places of runs: the files of a run in a folder of this machine or in a bucket.

Nothing is written, locked or followed by a link: a run may be in use, and come from anyone.
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

MOST_BYTES: Final = 8 << 20  # read at a time: a long file is taken in over several looks
_DEPTH: Final = 3
_MOST_RUNS: Final = 200
_OF_A_RUN: Final = frozenset({"checkpoints", "best", "model", "outbox", "tensorboard", "wandb"})


@dataclass(frozen=True)
class FoundFile:
    """State of a file at a look."""

    bytes: int
    tag: str  # identity of the file: another one once it was replaced, the same when it only grew
    changed: float | None  # last write, seconds since 1970; None where the place does not say


def is_in_a_bucket(address: str) -> bool:
    """True if a run's address is a bucket's, and no folder; a ConfigError if it holds no runs."""
    try:
        return is_remote(address)
    except BucketError as error:
        scheme = address.partition("://")[0]
        raise ConfigError(
            f"{scheme}://... is a kind of address that cannot hold a run. Name a folder of this "
            "machine, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."
        ) from error


@final
@dataclass(frozen=True)
class FolderPlace:
    """A run in a folder of this machine."""

    folder: Path

    @property
    def address(self) -> str:
        """Path of the folder."""
        return str(self.folder)

    def look(self, name: str) -> FoundFile | None:
        """State of a plain file, None for none, a link or a device; OSError if it fails."""
        try:
            found = (self.folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return FoundFile(found.st_size, f"{found.st_dev}:{found.st_ino}", found.st_mtime)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file, fewer where it ends before; OSError if it fails."""
        with open_plain(self.folder / name) as file:
            return os.pread(file.fileno(), end - start, start)


@final
@dataclass(frozen=True)
class BucketPlace:
    """A run in a bucket, or one of several below the bucket's address."""

    bucket: Bucket
    below: str = ""  # folder below the address, with a slash at its end; "" for the address itself

    folder: None = None

    @property
    def address(self) -> str:
        """Address as gs://BUCKET/FOLDER."""
        return f"{self.bucket.address}/{self.below}".rstrip("/")

    def look(self, name: str) -> FoundFile | None:
        """State of a file as the service has it now, None for none; BucketError if it fails."""

        def ask() -> FoundFile | None:
            try:
                found = self.bucket.info(self._key(name))
            except FileNotFoundError:
                return None
            # An object is replaced whole, and one that a run appends to keeps its beginning.
            return FoundFile(found.bytes, "object", None)

        return self.bucket.request(f"look at {self.address}/{name}", ask)

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of a file, fewer where it ends before; BucketError if it fails."""

        def ask() -> bytes:
            file = self.bucket.info(self._key(name))
            last = min(end, file.bytes)
            return self.bucket.read_range(file, start, last) if last > start else b""

        return self.bucket.request(f"read {self.address}/{name}", ask)

    def _key(self, name: str) -> str:
        return f"{self.bucket.path}/{self.below}{name}"


Place = FolderPlace | BucketPlace  # home of the files of one run


def content(place: Place, name: str) -> bytes | None:
    """A small file whole, None when there is none; OSError or BucketError if it fails."""
    found = place.look(name)
    return None if found is None else place.read(name, 0, min(found.bytes, MOST_BYTES))


@final
@dataclass(frozen=True)
class RunFinder:
    """Finds the runs at an address: one run, or those in it and in its folders."""

    where: Path | Bucket
    """Folder of this machine, in which no link is followed, or a bucket's address."""

    @property
    def address(self) -> str:
        """Address as the user wrote it."""
        return str(self.where) if isinstance(self.where, Path) else self.where.address

    def places(self) -> Mapping[str, Place]:
        """The runs at this moment, by a short name; OSError or BucketError if it cannot list."""
        where = self.where
        if isinstance(where, Bucket):
            names = where.names()
            if any(name in names for name in (METRICS, "config.yaml")):
                return {where.path.rstrip("/").rpartition("/")[2]: BucketPlace(where)}
            below = sorted(n.removesuffix(METRICS) for n in names if n.endswith(f"/{METRICS}"))
            return {path.rstrip("/"): BucketPlace(where, path) for path in below[:_MOST_RUNS]}
        if _is_run(where):
            return {where.resolve().name: FolderPlace(where)}
        found = islice(_runs_below(where, _DEPTH), _MOST_RUNS)
        return {folder.relative_to(where).as_posix(): FolderPlace(folder) for folder in found}


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).exists() or (folder / "checkpoints").is_dir()


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return  # not ours to read
    for entry in entries:
        if entry.name in _OF_A_RUN or entry.name.startswith("."):
            continue
        path = Path(entry.path)
        with suppress(OSError):  # not ours to read
            if not entry.is_dir(follow_symlinks=False):
                continue
            if _is_run(path):
                yield path
            elif depth > 1:
                yield from _runs_below(path, depth - 1)
