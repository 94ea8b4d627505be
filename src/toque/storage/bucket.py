"""Buckets (gs:// and s3://): listings, reads and writes with retries.

Both services create an object completely or not at all. After each write, the object's size and, if
available, its MD5 are compared with the local data. Messages never contain keys or secrets.

The retries of gcsfs and s3fs are not enough. s3fs gives up after five attempts in about a second.
Neither library retries a damaged upload or an incomplete range.
"""

from __future__ import annotations

import base64
import hashlib
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Final, TypeVar, final

from toque.errors import CheckpointError, DataError, ToqueError
from toque.storage.atomic import md5_of
from toque.storage.bucket_services import LOGIN_ADVICE, open_file_system
from toque.storage.no_follow import open_plain

SCHEMES: Final = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
"""Canonical scheme by scheme."""
_PART_BYTES: Final = 16 << 20
"""Size of an upload's parts, in bytes. After a broken connection, only one part is sent again."""
_MAX_READ_BYTES: Final = 1 << 24
"""Maximum size of an object that `Bucket.read` loads, in bytes. Locks and manifests are smaller."""
_EXISTS: Final = ("412", "PreconditionFailed", "conditionNotMet")
"""Words in a service's error if an object already exists."""
_ENDPOINT: Final = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
"""Environment variable with the address of the service."""
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
"""Environment variables with secrets, which are removed from messages."""
DEADLINE: Final = 120.0
"""Seconds after which a failing request is not retried."""
FIRST_WAIT = 0.5
"""Maximum seconds before the first retry. The maximum doubles with each retry."""
LONGEST_WAIT: Final = 30.0
"""Maximum seconds before any retry."""
_DENIED: Final = (
    "401",
    "403",
    "Forbidden",
    "AccessDenied",
    "Unauthorized",
    "InvalidAccessKeyId",
)
"""Words in a service's error if the credentials are wrong."""

Result = TypeVar("Result")


class BucketError(ToqueError):
    """A bucket refuses a request, does not respond, or does not have an object."""


class SourceBucketError(BucketError, DataError):
    """BucketError for a data source."""


class RunBucketError(BucketError, CheckpointError):
    """BucketError for a run's bucket."""


class MismatchError(OSError):
    """The received bytes differ from the sent bytes. The request is retried."""


@dataclass(frozen=True)
class BucketUse:
    """Purpose of an open bucket, for messages."""

    setting: str
    """Setting with the bucket's address."""
    rights: str
    """Access rights that the operation needs."""
    kept: str
    """Message about the files that are still intact after a failure."""
    error: type[BucketError]
    """Class of the error to raise."""


SOURCES: Final = BucketUse(
    "data.sources", "list and read", "The downloaded files are kept.", SourceBucketError
)
RUNS: Final = BucketUse(
    "checkpoint.upload or run_dir",
    "list, read, write and delete",
    "The files on this machine are intact.",
    RunBucketError,
)


_WORD = re.compile(r"\w+")


def _mentions(error: Exception, words: Iterable[str]) -> bool:
    """Check whether one of the words or status codes is in an error's text, code or cause."""
    text = f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}"
    # Compare entire words: an MD5 may contain "403".
    return not set(words).isdisjoint(_WORD.findall(text))


def _is_denied(error: Exception) -> bool:
    if isinstance(error, MismatchError):
        return False  # its text has sizes, which may look like a status code
    return isinstance(error, PermissionError) or _mentions(error, _DENIED)


@final
@dataclass
class Retry:
    """Retry policy: failed requests are retried until the deadline, or until `stop` is set."""

    deadline: float = DEADLINE
    """Seconds after which a request is not retried."""
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[float] = field(default_factory=list)
    """Seconds waited before each retry, from all threads."""

    def __call__(
        self, send: Callable[[], Result], failures: tuple[type[Exception], ...]
    ) -> Result:
        """Call `send` until it succeeds, and return its result.

        Args:
            send: The request.
            failures: Errors after which the request is retried. The last error is raised.
        """
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return send()
            except failures as error:
                is_final = isinstance(error, FileNotFoundError) or _is_denied(error)
                is_late = time.monotonic() - started > self.deadline
                if is_final or is_late or self.stop.is_set():
                    raise
            longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
            # The wait is random, so that threads and machines do not retry at the same moment.
            wait = random.uniform(longest / 2, longest)
            self.waits.append(wait)
            self.stop.wait(wait)
            attempt += 1


@dataclass(frozen=True)
class RemoteFile:
    """Object in a bucket."""

    scheme: str
    key: str
    """Bucket and name, e.g. "bucket/dumps/a.json.gz"."""
    bytes: int
    tag: str
    """Version of the content: an MD5 or generation for gs, an ETag for s3."""
    md5: str | None
    """MD5 of the content in hexadecimal, if the service reports it."""

    @property
    def address(self) -> str:
        """Address with its scheme."""
        return f"{self.scheme}://{self.key}"


def is_remote(path: str) -> bool:
    """Check whether a path is a bucket's address, such as s3://bucket/a.json.

    Raises:
        SourceBucketError: The path is an address with an unsupported scheme.
    """
    scheme, sign, _ = path.partition("://")
    if not sign or not scheme.isalnum():
        return False
    if scheme not in SCHEMES:
        raise SourceBucketError(
            f"Sources with {scheme}:// addresses are not supported, only gs://, s3:// and hf:NAME. "
            "Download the file first and give its path."
        )
    return True


@final
@dataclass(frozen=True)
class Bucket:
    """Bucket, or a folder in a bucket, with credentials.

    Methods that send requests raise BucketError if the service refuses or does not respond.
    """

    scheme: str
    path: str
    """Address or pattern without its scheme, e.g. "bucket/runs/a" or "bucket/dumps/*.json"."""
    files: Any
    """fsspec file system."""
    anonymous: bool
    """True if no credentials are set."""
    failures: tuple[type[Exception], ...]
    """Errors that the library raises for a failed request."""
    use: BucketUse
    retry: Retry = field(default_factory=Retry)

    @property
    def name(self) -> str:
        """Name of the bucket."""
        return self.path.split("/")[0]

    @property
    def address(self) -> str:
        """Address with its scheme."""
        return f"{self.scheme}://{self.path}"

    def request(
        self, purpose: str, send: Callable[[], Result], *, once: bool = False
    ) -> Result:
        """Send a request, with retries unless `once` is set, and return its result.

        Args:
            purpose: The purpose of the request, for the message, e.g. "read s3://bucket/a.json".
            send: The request.
            once: Whether to send the request only once.

        Raises:
            BucketError: The request failed.
        """
        try:
            return send() if once else self.retry(send, self.failures)
        except self.failures as error:
            reason = self._failure_reason(error)
            message = f"Could not {purpose}: {reason} {self.use.kept}"
            raise self.use.error(message) from error

    def _failure_reason(self, error: Exception) -> str:
        """Describe the cause of a failure and its remedy, without secrets."""
        rights = self.use.rights
        advice = LOGIN_ADVICE[self.scheme]
        answer = _redacted_line(error)
        if isinstance(error, FileNotFoundError):
            return (
                f"the bucket {self.name!r} or the object does not exist. Correct "
                f"{self.use.setting}. (For a service of your own, set "
                f"{_ENDPOINT[self.scheme]}.)"
            )
        if not _is_denied(error):
            return (
                f"the service did not respond correctly: {answer}. Check the network, the proxy "
                "settings and the endpoint, and run the same command again."
            )
        if self.anonymous:
            return (
                f"it needs the right to {rights}, but no credentials are set. {advice}"
            )
        return (
            f"the credentials are wrong, expired, or lack the right to {rights}: "
            f"{answer}. {advice}"
        )

    def objects(self) -> list[RemoteFile]:
        """List the objects at the address (a name, a folder or a pattern), sorted by name."""
        # Without retries, a wrong address or key is reported before any download.
        entries = self.request(f"read {self.address}", self._find_entries, once=True)
        if not entries:
            raise self.use.error(
                f"{self.address} matches nothing: the bucket exists, but it has no such object, "
                f"folder or pattern. Names are case-sensitive. Correct {self.use.setting}."
            )
        return [self._remote_file(key, entries[key]) for key in sorted(entries)]

    def _find_entries(self) -> dict[str, dict[str, Any]]:
        """Find the address's objects. Return their fsspec entries by key."""
        path = self.path.rstrip("/")
        if not self.path.endswith("/") and path != self.name:
            with suppress(FileNotFoundError):
                entry = self.files.info(path)
                if entry["type"] == "file":
                    return {path: entry}

        matches: dict[str, dict[str, Any]] = self.files.find(path, detail=True)
        if not matches and has_wildcard(self.path):
            matches = self.files.glob(self.path, detail=True)
        if not matches and "[" in self.path:
            # The brackets may be part of a folder's name.
            matches = self.files.glob(self.path.replace("[", "[[]"), detail=True)
        # For an empty folder, web consoles create an object with a final slash.
        entries = {
            key: entry
            for key, entry in matches.items()
            if entry["type"] == "file" and not key.endswith("/")
        }
        if not entries:
            self._refuse_missing_bucket()
        return entries

    def _refuse_missing_bucket(self) -> None:
        """Raise the service's error if the bucket does not exist."""
        self.files.ls(self.name, refresh=True)

    def info(self, key: str) -> RemoteFile:
        """Look up the current state of an object. Call it inside `request`."""
        self.files.invalidate_cache()
        return self._remote_file(key, self.files.info(key))

    def read_range(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Read the bytes [start, end) of an object. Call it inside `request`."""
        data: bytes = self.files.cat_file(file.key, start=start, end=end)
        return data

    def names(self, below: str = "") -> list[str]:
        """List the names of the objects below `below`, relative to this address and sorted."""

        def list_keys() -> list[str]:
            self.files.invalidate_cache()
            keys: list[str] = self.files.find(self._key(below).rstrip("/"))
            if not keys:
                self._refuse_missing_bucket()
            return keys

        start = len(self._key(""))
        keys = self.request(f"list {self.address}/{below}", list_keys)
        return sorted(key[start:] for key in keys if len(key) > start)

    def read(self, name: str) -> bytes | None:
        """Read a small object. Return None if it does not exist.

        Raises:
            CheckpointError: The object has more than `_MAX_READ_BYTES`.
        """

        def read_object(key: str) -> bytes:
            self._refuse_larger(name, _MAX_READ_BYTES)
            data: bytes = self.files.cat_file(key)
            return data

        purpose = f"read {self.address}/{name}"
        return self.request(
            purpose, lambda: _unless_missing(read_object, self._key(name))
        )

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Write an object. Return False if `new` is set and a different object exists.

        An existing object with the same content counts as success, because the response to an
        earlier attempt may have been lost.
        """
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        mode = "create" if new else "overwrite"

        def write_object() -> bool:
            try:
                self.files.pipe_file(self._key(name), data, mode=mode)
            except self.failures as error:
                if isinstance(error, FileExistsError) or _mentions(error, _EXISTS):
                    return self.read(name) == data
                raise
            self._verify(name, len(data), md5)
            return True

        return self.request(f"write {self.address}/{name}", write_object)

    def put_file(self, path: Path, name: str, *, grows: bool = False) -> None:
        """Upload a plain file unless the bucket already has the same content.

        Args:
            path: The file on this machine.
            name: The name of the object.
            grows: Whether another thread appends to the file. Its current content is then copied
                first.

        Raises:
            OSError: The path is a link or cannot be read.
        """
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(open_plain(path))
            if grows:
                copy = stack.enter_context(TemporaryFile(dir=path.parent))
                shutil.copyfileobj(file, copy)
                copy.flush()
                file = copy

            # The path of the open file, which no one can replace during the upload.
            open_path = Path(f"/dev/fd/{file.fileno()}")
            size = os.fstat(file.fileno()).st_size
            file.seek(0)
            md5 = md5_of(open_path)
            key = self._key(name)

            def upload() -> None:
                try:
                    self._verify(name, size, md5)
                except OSError:
                    file.seek(0)  # on macOS, files opened by /dev/fd share the offset
                    self.files.put_file(str(open_path), key, chunksize=_PART_BYTES)
                    self._verify(name, size, md5)

            self.request(f"write {self.address}/{name}", upload)

    def get_file(self, name: str, path: Path, *, max_bytes: int) -> None:
        """Download an object into a file.

        Raises:
            CheckpointError: The object has more than `max_bytes`.
        """

        def download() -> None:
            self._refuse_larger(name, max_bytes)
            self.files.get_file(self._key(name), str(path))

        self.request(f"read {self.address}/{name}", download)

    def copy(self, name: str, to: str) -> None:
        """Copy an object to another name within the service."""

        def copy_object() -> None:
            self.files.cp_file(self._key(name), self._key(to))
            source = self.info(self._key(name))
            target = self.info(self._key(to))
            if source.bytes != target.bytes:
                raise MismatchError(
                    f"{to} has {target.bytes} bytes in the bucket, not {source.bytes}"
                )

        self.request(f"copy {self.address}/{name} to {to}", copy_object)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects one by one. Ignore missing objects."""
        for name in names:
            remove = partial(_unless_missing, self.files.rm_file, self._key(name))
            self.request(f"remove {self.address}/{name}", remove)

    def _key(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _refuse_larger(self, name: str, max_bytes: int) -> None:
        size = self.info(self._key(name)).bytes
        if size > max_bytes:
            raise CheckpointError(
                f"{self.address}/{name} has {size:,} bytes, but at most {max_bytes:,} are allowed "
                "for this file. Replace it with the right file, or choose another address."
            )

    def _verify(self, name: str, size: int, md5: str) -> None:
        """Raise MismatchError if the stored object does not have this size and MD5."""
        stored = self.info(self._key(name))
        if stored.bytes != size or stored.md5 not in (None, md5):
            raise MismatchError(
                f"{name} has {stored.bytes} bytes with MD5 {stored.md5} in the bucket, but "
                f"{size} bytes with MD5 {md5} were sent"
            )

    def _remote_file(self, key: str, entry: dict[str, Any]) -> RemoteFile:
        """Convert a fsspec entry to an object's description."""
        size = int(entry["size"])
        if self.scheme == "s3":
            tag = str(entry.get("ETag", "")).strip('"')
            # An MD5 has 32 digits. The tag of an upload in parts is "hash-n", which is not an MD5.
            return RemoteFile("s3", key, size, tag, tag if len(tag) == 32 else None)

        # gs has no MD5 for objects that were composed of parts.
        md5 = entry.get("md5Hash")
        version = md5 or entry.get("crc32c") or entry.get("generation")
        tag = str(version or entry.get("etag"))
        md5_hex = base64.b64decode(md5).hex() if md5 else None
        return RemoteFile("gs", key, size, tag, md5_hex)


def _unless_missing(send: Callable[[str], Result], key: str) -> Result | None:
    """Call `send` with a key. Return None if the object does not exist."""
    try:
        return send(key)
    except FileNotFoundError:
        return None


def _redacted_line(error: Exception) -> str:
    """Return the first line of an error's text without secrets, at most 300 characters."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    for variable in _SECRETS:
        if secret := os.environ.get(variable):
            line = line.replace(secret, f"({variable})")
    return line[:300]


def has_wildcard(path: str) -> bool:
    """Check whether a path is a pattern."""
    return any(sign in path for sign in "*?[")


def open_bucket(address: str, use: BucketUse, *, deadline: float = DEADLINE) -> Bucket:
    """Open a bucket with the credentials for its service. No request is sent.

    Raises:
        BucketError: The address has no valid bucket name, the credentials are invalid, or the
            library of the service is not installed.
    """
    alias, _, path = address.partition("://")
    scheme = SCHEMES[alias]
    name = path.split("/")[0]
    if not name or "@" in name or has_wildcard(name):
        # The message does not show the name, because some tools accept KEY:SECRET@ before it.
        raise use.error(
            f"{use.setting} has no valid bucket name. An address is {scheme}://BUCKET/FOLDER/ or "
            f"{scheme}://BUCKET/NAME. Patterns are allowed after the bucket name. Credentials "
            "are not allowed."
        )
    files, anonymous, failures = open_file_system(scheme, use.error)
    return Bucket(scheme, path, files, anonymous, failures, use, Retry(deadline))
