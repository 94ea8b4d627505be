"""Buckets (gs:// and s3://): credentials, listings, reads and writes with retries.

The module uses fsspec: gcsfs for `gs://`, s3fs for `s3://`. Both services create an object
completely or not at all. After each write the size and, if available, the MD5 of the object are
compared with the local data. Messages never contain keys or secrets.

The retries of the libraries are not enough. s3fs gives up after five tries in about a second.
Neither library repeats a damaged upload or an incomplete range.
"""

from __future__ import annotations

import base64
import hashlib
import logging
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
from toque.storage.no_follow import open_plain

SCHEMES: Final = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
_PART_BYTES: Final = 16 << 20
"""Bytes per part of an upload. A broken connection repeats one part."""
_MAX_READ_BYTES: Final = 1 << 24
"""Largest object that `Bucket.read` loads. Locks and manifests are smaller."""
_EXISTS: Final = ("412", "PreconditionFailed", "conditionNotMet")
_ENDPOINT: Final = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_LOGIN_ADVICE: Final = {
    "gs": (
        "Set GOOGLE_APPLICATION_CREDENTIALS to the JSON file of a service account with these "
        "rights, or run `gcloud auth application-default login`. For an emulator, set "
        "STORAGE_EMULATOR_HOST."
    ),
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN if you have one) "
        "of a user with these rights, or AWS_PROFILE with ~/.aws/credentials. For another S3 "
        "service, such as MinIO, set AWS_ENDPOINT_URL."
    ),
}
DEADLINE: Final = 120.0  # seconds until a failing request is given up
FIRST_WAIT = 0.5
LONGEST_WAIT: Final = 30.0
_DENIED: Final = (
    "401",
    "403",
    "Forbidden",
    "AccessDenied",
    "Unauthorized",
    "InvalidAccessKeyId",
)

Result = TypeVar("Result")


class BucketError(ToqueError):
    """A bucket refuses a request, does not answer, or lacks an object."""


class SourceBucketError(BucketError, DataError):
    """BucketError of a source."""


class RunBucketError(BucketError, CheckpointError):
    """BucketError of a run's bucket."""


class MismatchError(OSError):
    """The received bytes differ from the sent bytes. The request is repeated."""


@dataclass(frozen=True)
class BucketUse:
    """The purpose a bucket is opened for."""

    setting: str
    rights: str
    kept: str
    """Message about the files that a failure leaves intact."""
    error: type[BucketError]


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


def _mentions(error: Exception, *signs: str) -> bool:
    """Check whether an error has one of the words or status codes in its text, code or cause."""
    # Compare entire words: an MD5 may contain "403".
    words = _WORD.findall(
        f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}"
    )
    return any(sign in words for sign in signs)


def _is_denied(error: Exception) -> bool:
    if isinstance(error, MismatchError):
        return False
    return isinstance(error, PermissionError) or _mentions(error, *_DENIED)


@final
@dataclass
class Retry:
    """Repetition of failed requests for at most `deadline` seconds, or until `stop` is set."""

    deadline: float = DEADLINE
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[float] = field(default_factory=list)
    """Seconds of each wait before a repetition, from all threads."""

    def __call__(
        self, send: Callable[[], Result], failures: tuple[type[Exception], ...]
    ) -> Result:
        """Call `send` until it succeeds, and return its result.

        Args:
            send: The request.
            failures: Errors that another try may avoid. The last one is raised.
        """
        started = time.monotonic()
        attempt = 0
        while True:
            try:
                return send()
            except failures as error:
                is_over = (
                    time.monotonic() - started > self.deadline or self.stop.is_set()
                )
                if is_over or isinstance(error, FileNotFoundError) or _is_denied(error):
                    raise
            longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
            # The wait is random, so that threads and machines do not retry at the same moment.
            self.waits.append(random.uniform(longest / 2, longest))
            self.stop.wait(self.waits[-1])
            attempt += 1


@dataclass(frozen=True)
class RemoteFile:
    """Object of a bucket."""

    scheme: str
    key: str
    """Bucket and name: "bucket/dumps/a.json.gz"."""
    bytes: int
    tag: str
    """Version of the content: MD5 or generation of gs, ETag of s3."""
    md5: str | None
    """MD5 of the content in hexadecimal, if the service reports it."""

    @property
    def address(self) -> str:
        """Address with its scheme."""
        return f"{self.scheme}://{self.key}"


def is_remote(path: str) -> bool:
    """Check whether a path is an address such as s3://bucket/a.json.

    Raises:
        SourceBucketError: It is an address with another scheme.
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
    """Bucket, or a folder of it, with credentials.

    Methods that send requests raise BucketError if the service refuses or does not answer.
    """

    scheme: str
    path: str
    """The address without its scheme: "bucket/runs/a", or with a pattern "bucket/dumps/*.json"."""
    files: Any
    """File system of fsspec."""
    anonymous: bool
    failures: tuple[type[Exception], ...]
    """Errors of the library for a failed request."""
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
            purpose: The purpose of the request, for the message: "read s3://bucket/a.json".
            send: The request.
            once: Do not retry.

        Raises:
            BucketError: The request failed.
        """
        try:
            return send() if once else self.retry(send, self.failures)
        except self.failures as error:
            reason = self._failure_reason(error)
            raise self.use.error(
                f"Could not {purpose}: {reason} {self.use.kept}"
            ) from error

    def _failure_reason(self, error: Exception) -> str:
        """Describe the cause of a failure and the remedy, without secrets."""
        rights = self.use.rights
        advice = _LOGIN_ADVICE[self.scheme]
        answer = next(iter(str(error).strip().splitlines()), type(error).__name__)
        for variable in _SECRETS:
            if secret := os.environ.get(variable):
                answer = answer.replace(secret, f"({variable})")
        answer = answer[:300]
        if isinstance(error, FileNotFoundError):
            return (
                f"the bucket {self.name!r} or the object does not exist. Correct "
                f"{self.use.setting}. (For a service of your own, set "
                f"{_ENDPOINT[self.scheme]}.)"
            )
        if not _is_denied(error):
            return (
                f"the service did not answer correctly: {answer}. Check the network, the proxy "
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
        """List the objects of the address (a name, a folder or a pattern), sorted by name."""
        # No retries: a wrong address or key is reported immediately, before any download.
        entries = self.request(f"read {self.address}", self._find_entries, once=True)
        if not entries:
            raise self.use.error(
                f"{self.address} matches nothing: the bucket exists, but it has no such object, "
                f"folder or pattern. Names are case-sensitive. Correct {self.use.setting}."
            )
        return [self._file(key, entries[key]) for key in sorted(entries)]

    def _find_entries(self) -> dict[str, dict[str, Any]]:
        """Entries of fsspec by key, for the address."""
        path = self.path.rstrip("/")
        if not self.path.endswith("/") and path != self.name:
            with suppress(FileNotFoundError):
                entry = self.files.info(path)
                if entry["type"] == "file":
                    return {path: entry}

        entries: dict[str, dict[str, Any]] = self.files.find(path, detail=True)
        if not entries and any(sign in self.path for sign in "*?["):
            entries = self.files.glob(self.path, detail=True)
            if not entries:  # the brackets may be part of a folder's name
                entries = self.files.glob(self.path.replace("[", "[[]"), detail=True)
        # Web consoles create an object with a final slash for an empty folder.
        entries = {
            key: entry
            for key, entry in entries.items()
            if entry["type"] == "file" and not key.endswith("/")
        }
        if not entries:
            # Raises if the bucket does not exist.
            self.files.ls(self.name, refresh=True)
        return entries

    def info(self, key: str) -> RemoteFile:
        """Look up the current state of an object. Call it inside `request`."""
        self.files.invalidate_cache()
        return self._file(key, self.files.info(key))

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
                # Raises if the bucket does not exist.
                self.files.ls(self.name, refresh=True)
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

        An existing object with the same content counts as success, because the answer to an earlier
        try may have been lost.
        """

        def write_object() -> bool:
            try:
                mode = "create" if new else "overwrite"
                self.files.pipe_file(self._key(name), data, mode=mode)
            except self.failures as error:
                if not (
                    isinstance(error, FileExistsError) or _mentions(error, *_EXISTS)
                ):
                    raise
                return self.read(name) == data
            self._verify(
                name, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest()
            )
            return True

        return self.request(f"write {self.address}/{name}", write_object)

    def put_file(self, path: Path, name: str, *, grows: bool = False) -> None:
        """Upload a plain file unless the bucket has the same content already.

        Args:
            path: The file on this machine.
            name: The name of the object.
            grows: Another thread appends to the file, so its present content is copied first.

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

            # Refer to the open file, so that no one can replace it during the upload.
            open_path = Path(f"/dev/fd/{file.fileno()}")
            size = os.fstat(file.fileno()).st_size
            file.seek(0)
            md5 = md5_of(open_path)

            def upload() -> None:
                try:
                    self._verify(name, size, md5)
                except OSError:
                    file.seek(0)  # on macOS, files opened by /dev/fd share the offset
                    self.files.put_file(
                        str(open_path), self._key(name), chunksize=_PART_BYTES
                    )
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
        """Remove objects one by one. Missing objects are ignored."""
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
        stored = self.info(self._key(name))
        if stored.bytes != size or stored.md5 not in (None, md5):
            raise MismatchError(
                f"{name} has {stored.bytes} bytes with MD5 {stored.md5} in the bucket, but "
                f"{size} bytes with MD5 {md5} were sent"
            )

    def _file(self, key: str, entry: dict[str, Any]) -> RemoteFile:
        size = int(entry["size"])
        if self.scheme == "s3":
            tag = str(entry.get("ETag", "")).strip('"')
            # The tag of an upload in parts is "hash-n", which is not the MD5 of the content.
            return RemoteFile("s3", key, size, tag, tag if len(tag) == 32 else None)
        md5 = entry.get("md5Hash")
        tag = str(
            md5 or entry.get("crc32c") or entry.get("generation") or entry.get("etag")
        )
        return RemoteFile(
            "gs", key, size, tag, base64.b64decode(md5).hex() if md5 else None
        )


def _unless_missing(act: Callable[[str], Result], key: str) -> Result | None:
    try:
        return act(key)
    except FileNotFoundError:
        return None


def open_bucket(address: str, use: BucketUse, *, deadline: float = DEADLINE) -> Bucket:
    """Find the credentials for an address. No request is sent.

    Raises:
        BucketError: The address has no valid bucket name, the credentials are invalid, or the
            library of the service is not installed.
    """
    alias, _, path = address.partition("://")
    scheme = SCHEMES[alias]
    name = path.split("/")[0]
    if not name or "@" in name or any(sign in name for sign in "*?["):
        # The message does not show the name: some tools accept KEY:SECRET@ before it.
        raise use.error(
            f"{use.setting} has no valid bucket name. An address is {scheme}://BUCKET/FOLDER/ or "
            f"{scheme}://BUCKET/NAME. Patterns are allowed after the bucket, keys nowhere."
        )
    return Bucket(scheme, path, *_open_file_system(scheme, use), use, Retry(deadline))


_UNCACHED: Final = {"use_listings_cache": False, "skip_instance_cache": True}
FileSystem = tuple[Any, bool, tuple[type[Exception], ...]]
"""The fields `files`, `anonymous` and `failures` of a `Bucket`."""


def _open_file_system(scheme: str, use: BucketUse) -> FileSystem:
    """Open the file system of a service with the credentials of its own tools."""
    try:
        import aiohttp

        files, anonymous, failures = _google(use) if scheme == "gs" else _amazon(use)
    except ImportError as error:
        library, extra = ("gcsfs", "gcs") if scheme == "gs" else ("s3fs", "s3")
        raise use.error(
            f"{scheme}:// addresses need {library}, which is not installed. Run: pip install "
            f"'toque[{extra}]' (or download the files and give their paths)."
        ) from error
    return files, anonymous, (OSError, ValueError, aiohttp.ClientError, *failures)


def _google(use: BucketUse) -> FileSystem:
    # gcsfs would print a traceback for each retry. Our message is enough.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    is_emulated = "STORAGE_EMULATOR_HOST" in os.environ
    if is_emulated:
        # With HNS support, gcsfs waits 90 seconds for an endpoint that emulators lack.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs
    import google.auth.exceptions
    import requests

    credentials = None if is_emulated else _google_credentials(use)
    files = gcsfs.GCSFileSystem(token=credentials or "anon", **_UNCACHED)
    auth_error = google.auth.exceptions.GoogleAuthError
    failures = (requests.RequestException, auth_error, gcsfs.retry.HttpError)
    return files, credentials is None, failures


def _google_credentials(use: BucketUse) -> Any:
    """Find the default credentials of Google's tools. None if there are none."""
    import google.auth.exceptions

    key_file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if key_file is not None and not Path(key_file).is_file():
        raise use.error(
            f"GOOGLE_APPLICATION_CREDENTIALS is {key_file}, which does not exist. "
            f"{_LOGIN_ADVICE['gs']}"
        )
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    try:
        credentials, _ = google.auth.default(scopes=scopes)
    except google.auth.exceptions.DefaultCredentialsError as error:
        if key_file is None:
            return None
        raise use.error(
            "The file of GOOGLE_APPLICATION_CREDENTIALS has no valid credentials: "
            f"{str(error).splitlines()[0][:200]}. {_LOGIN_ADVICE['gs']}"
        ) from error
    return credentials


def _amazon(use: BucketUse) -> FileSystem:
    import botocore.exceptions
    import botocore.session
    import s3fs

    try:
        credentials = botocore.session.Session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        advice = _LOGIN_ADVICE["s3"]
        raise use.error(
            f"The AWS credentials are invalid: {error}. {advice}"
        ) from error
    files = s3fs.S3FileSystem(anon=credentials is None, **_UNCACHED)
    failures = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
    return files, credentials is None, failures
