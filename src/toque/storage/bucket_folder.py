"""A folder in a bucket: written, verified, and asked again with growing waits.

An object appears whole or not at all, which is what both services promise. What is written here is
compared with what the service says it holds (size, and MD5 where it tells it) before it counts.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, final

from toque.errors import CheckpointError, DataError
from toque.storage.bucket import Bucket, RemoteFile, bucket_of
from toque.storage.download import FIRST_WAIT, wait_before

DEADLINE: Final = 120.0
"""Seconds after which an operation that keeps failing is given up."""
_PART_BYTES: Final = 16 << 20
"""Of an upload in parts; the service repeats one part, not the file, after a broken line."""
_DENIED: Final = ("401", "403", "Forbidden", "AccessDenied", "Unauthorized", "InvalidAccessKeyId")
_EXISTS: Final = ("412", "PreconditionFailed", "conditionNotMet")

Result = TypeVar("Result")


class StoreError(CheckpointError):
    """The bucket did not do what was asked; what is on this machine is intact."""


@final
@dataclass(frozen=True)
class RemoteFolder:
    """What lies below an address such as gs://bucket/runs/cookbook.

    Args:
        address: as the user wrote it.
        bucket: its bucket, with the credentials that were found.
        root: "bucket/runs/cookbook".
        deadline: seconds for one operation, repeats included.
        stop: set by whoever does not want to wait any longer.
    """

    address: str
    bucket: Bucket
    root: str
    deadline: float = DEADLINE
    stop: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def at(cls, address: str, *, deadline: float = DEADLINE) -> RemoteFolder:
        """Open it; nothing is asked of the service yet.

        Raises:
            CheckpointError: no bucket is named, the library is missing, or credentials are broken.
        """
        try:
            bucket, root = bucket_of(address.rstrip("/"))
        except DataError as error:
            raise CheckpointError(_in_our_words(error)) from error
        return cls(address.rstrip("/"), bucket, root, deadline)

    def names(self, below: str = "") -> list[str]:
        """Names of the objects below `below`, relative to this folder, sorted.

        Raises:
            StoreError: the service refused or stayed away.
        """
        place = f"{self.root}/{below}".rstrip("/")

        def ask() -> list[str]:
            self.bucket.files.invalidate_cache()
            found: list[str] = self.bucket.files.find(place)
            if not found:
                self.bucket.files.ls(self.bucket.name, refresh=True)  # is there such a bucket?
            return found

        found = self._patiently(f"list {self.address}/{below}", ask)
        start = len(self.root) + 1
        return sorted(key[start:] for key in found if len(key) > start)

    def read(self, name: str) -> bytes | None:
        """The content of an object; None when there is none.

        Raises:
            StoreError: the service refused or stayed away.
        """

        def ask() -> bytes | None:
            try:
                data: bytes = self.bucket.files.cat_file(self._key(name))
            except FileNotFoundError:
                return None
            return data

        return self._patiently(f"read {self.address}/{name}", ask)

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Write an object.

        Args:
            name: relative to this folder.
            data: the whole content.
            new: only when there is none. A store without preconditions does not hold to it.

        Returns:
            False when `new` and there is another one. One of the same content counts as ours: the
            reply to an earlier try was lost.

        Raises:
            StoreError: the service refused, stayed away, or holds something else afterwards.
        """
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()

        def ask() -> bool:
            try:
                mode = "create" if new else "overwrite"
                self.bucket.files.pipe_file(self._key(name), data, mode=mode)
            except self._failures as error:
                if not (isinstance(error, FileExistsError) or _says(error, _EXISTS)):
                    raise
                return self.read(name) == data
            self._verify(name, len(data), md5)
            return True

        return self._patiently(f"write {self.address}/{name}", ask)

    def put_file(self, path: Path, name: str) -> None:
        """Write a file of this machine; one that is there already with this content is left.

        Raises:
            StoreError: as for `put`.
        """
        size = path.stat().st_size
        with path.open("rb") as file:
            md5 = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        key = self._key(name)

        def ask() -> None:
            try:
                self._verify(name, size, md5)
            except OSError:
                self.bucket.files.put_file(str(path), key, chunksize=_PART_BYTES)
                self._verify(name, size, md5)

        self._patiently(f"write {self.address}/{name}", ask)

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object into a file.

        Raises:
            StoreError: there is none, or the service refused or stayed away.
        """
        self._patiently(
            f"read {self.address}/{name}",
            lambda: self.bucket.files.get_file(self._key(name), str(path)),
        )

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after another; absent ones are no error.

        Raises:
            StoreError: the service refused or stayed away.
        """
        for name in names:
            key = self._key(name)

            def ask(key: str = key) -> None:
                try:
                    self.bucket.files.rm_file(key)
                except FileNotFoundError:
                    return

            self._patiently(f"remove {self.address}/{name}", ask)

    def _key(self, name: str) -> str:
        return f"{self.root}/{name}"

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return self.bucket.failures

    def _verify(self, name: str, size: int, md5: str) -> None:
        """Compare what the service holds with what was sent.

        Raises:
            OSError: it differs; the write is repeated.
        """
        self.bucket.files.invalidate_cache()
        entry: dict[str, Any] = self.bucket.files.info(self._key(name))
        found: RemoteFile = self.bucket._file(self._key(name), entry)  # noqa: SLF001  # one reader of entries
        if found.bytes != size or found.md5 not in (None, md5):
            raise OSError(
                f"{name} has {found.bytes} bytes with MD5 {found.md5} in the bucket; "
                f"{size} with {md5} were sent"
            )

    def _patiently(self, what: str, ask: Callable[[], Result]) -> Result:
        """What `ask` returns, repeated with waits that double and vary, until the deadline.

        Raises:
            StoreError: no right, no bucket, or the deadline passed.
        """
        began, attempt = time.monotonic(), 0
        while True:
            try:
                return ask()
            except self._failures as error:
                said = str(error).strip().splitlines()
                first = said[0][:200] if said else type(error).__name__
                denied = isinstance(error, PermissionError) or _says(error, _DENIED)
                missing = isinstance(error, FileNotFoundError)
                late = time.monotonic() - began > self.deadline or self.stop.is_set()
                if denied or missing or late:
                    raise StoreError(_refusal(what, first, denied=denied, missing=missing)) from (
                        error
                    )
            self.stop.wait(wait_before(attempt, first=FIRST_WAIT))
            attempt += 1


def _says(error: Exception, signs: tuple[str, ...]) -> bool:
    words = f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}"
    return any(sign in words for sign in signs)


def _refusal(what: str, said: str, *, denied: bool, missing: bool) -> str:
    if denied:
        why = (
            "the credentials are missing, wrong, expired, or lack the right to list, read, write "
            "and delete. Renew them (GOOGLE_APPLICATION_CREDENTIALS, or AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY)"
        )
    elif missing:
        why = "there is no such bucket, or the object is gone. Correct checkpoint.upload or run_dir"
    else:
        why = "the service does not answer as it should. Check the network and the endpoint"
    return f"Could not {what}: {why}. ({said}) What is on this machine is intact."


def _in_our_words(error: DataError) -> str:
    return (
        str(error)
        .replace("A source begins", "An address begins")
        .replace("data.sources", "checkpoint.upload or run_dir")
    )
