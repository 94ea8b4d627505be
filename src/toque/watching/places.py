"""Places of runs: the bytes of their files, in a folder of this machine or in a bucket.

Nothing is written, no lock is taken, and no link is followed: a run may be in use, and a folder may
come from anyone.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from toque.errors import ConfigError
from toque.storage.bucket import Bucket, is_remote
from toque.storage.bucket_errors import BucketError
from toque.storage.no_follow import open_plain

MOST_BYTES: Final = 8 << 20
"""Read at a time, so that a long file is taken in over several looks."""


@dataclass(frozen=True)
class Found:
    """A file as it is now."""

    bytes: int
    tag: str
    """Another one when the file was replaced; of a file that only grew, the same."""
    changed: float | None
    """When it was last written, in seconds since 1970; None where that is not told."""


class Place(Protocol):
    """Where the files of one run are."""

    @property
    def address(self) -> str:
        """As a user would write it."""

    @property
    def folder(self) -> Path | None:
        """On this machine; None in a bucket."""

    def look(self, name: str) -> Found | None:
        """A file of the run; None when there is none.

        Raises:
            OSError, BucketError: it cannot be looked at.
        """

    def read(self, name: str, start: int, end: int) -> bytes:
        """Bytes [start, end) of it, fewer where it ends before.

        Raises:
            OSError, BucketError: it cannot be read.
        """


def is_in_a_bucket(address: str) -> bool:
    """Whether a run's address is a bucket's, rather than a folder.

    Raises:
        ConfigError: it is of a kind that holds no runs.
    """
    try:
        return is_remote(address)
    except BucketError as error:
        scheme = address.partition("://")[0]
        raise ConfigError(
            f"{scheme}://... is a kind of address that cannot hold a run. Name a folder of this "
            "machine, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."
        ) from error


def content(place: Place, name: str) -> bytes | None:
    """A small file whole; None when there is none.

    Raises:
        OSError, BucketError: it cannot be read.
    """
    found = place.look(name)
    return None if found is None else place.read(name, 0, found.bytes)


@final
@dataclass(frozen=True)
class FolderPlace:
    """A run in a folder of this machine."""

    folder: Path

    @property
    def address(self) -> str:
        """The folder."""
        return str(self.folder)

    def look(self, name: str) -> Found | None:
        """Of a plain file; a link or a device counts as absent."""
        try:
            found = (self.folder / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        return Found(found.st_size, f"{found.st_dev}:{found.st_ino}", found.st_mtime)

    def read(self, name: str, start: int, end: int) -> bytes:
        """As `Place.read`."""
        with open_plain(self.folder / name) as file:
            return os.pread(file.fileno(), end - start, start)


@final
@dataclass(frozen=True)
class BucketPlace:
    """A run in a bucket, or one of several below the bucket's address."""

    bucket: Bucket
    below: str = ""
    """Its folder there, with a slash at its end; "" for the address itself."""

    folder: None = None

    @property
    def address(self) -> str:
        """As gs://BUCKET/FOLDER."""
        return f"{self.bucket.address}/{self.below}".rstrip("/")

    def look(self, name: str) -> Found | None:
        """As the service has it now."""

        def ask() -> Found | None:
            try:
                found = self.bucket.info(self._key(name))
            except FileNotFoundError:
                return None
            # An object is replaced whole, and what a run appends to keeps its beginning.
            return Found(found.bytes, "object", None)

        return self.bucket.request(f"look at {self.address}/{name}", ask)

    def read(self, name: str, start: int, end: int) -> bytes:
        """As `Place.read`."""

        def ask() -> bytes:
            file = self.bucket.info(self._key(name))
            last = min(end, file.bytes)
            return self.bucket.read_range(file, start, last) if last > start else b""

        return self.bucket.request(f"read {self.address}/{name}", ask)

    def _key(self, name: str) -> str:
        return f"{self.bucket.path}/{self.below}{name}"
