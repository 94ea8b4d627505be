"""Buckets (gs:// and s3://): credentials, listings, verified reads and writes, retried.

Through fsspec: gcsfs for `gs://`, s3fs for `s3://`. An object appears whole or not at all, which is
what both services promise. What is written is compared with what the service says it holds (size,
and MD5 where it tells it) before it counts. Keys and secrets are never in a message.

The libraries' own retries are not enough: s3fs gives up after about a second of waiting (five
tries), and neither repeats an upload that arrived damaged or a range that came short.
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
_PART_BYTES: Final = 16 << 20  # of an upload: one part is repeated when a connection breaks
_MOST_READ: Final = 1 << 24  # a lock or a manifest has fewer bytes
_EXISTS: Final = ("412", "PreconditionFailed", "conditionNotMet")
_ENDPOINT: Final = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_HOW: Final = {
    "gs": (
        "Set GOOGLE_APPLICATION_CREDENTIALS to the JSON file of a service account that has these "
        "rights, or run `gcloud auth application-default login`. For an emulator set "
        "STORAGE_EMULATOR_HOST."
    ),
    "s3": (
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN where there is "
        "one), or AWS_PROFILE with ~/.aws/credentials, of a user with these rights. For another "
        "S3 service such as MinIO set AWS_ENDPOINT_URL."
    ),
}
DEADLINE: Final = 120.0  # seconds after which a request that keeps failing is given up
FIRST_WAIT = 0.5
LONGEST_WAIT: Final = 30.0
_DENIED: Final = ("401", "403", "Forbidden", "AccessDenied", "Unauthorized", "InvalidAccessKeyId")

Result = TypeVar("Result")


class BucketError(ToqueError):
    """A bucket refused, stayed away, or does not hold what it should."""


class SourceBucketError(BucketError, DataError):
    """A BucketError of one of the sources."""


class RunBucketError(BucketError, CheckpointError):
    """A BucketError of a run's bucket."""


class MismatchError(OSError):
    """The bytes that arrived are not those that were sent: always worth another try."""


@dataclass(frozen=True)
class BucketUse:
    """The purpose a bucket is opened for."""

    setting: str
    rights: str
    kept: str  # a sentence on what a failure leaves intact
    error: type[BucketError]


SOURCES: Final = BucketUse(
    "data.sources", "list and read", "What is fetched already is kept.", SourceBucketError
)
RUNS: Final = BucketUse(
    "checkpoint.upload or run_dir",
    "list, read, write and delete",
    "What is on this machine is intact.",
    RunBucketError,
)


_WORD = re.compile(r"\w+")


def _mentions(error: Exception, *signs: str) -> bool:
    """True if an error has one of the words or status codes in its text, code or cause."""
    # Whole words: an MD5 with "403" in it is no refusal.
    words = _WORD.findall(f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}")
    return any(sign in words for sign in signs)


def _is_denied(error: Exception) -> bool:
    if isinstance(error, MismatchError):
        return False
    return isinstance(error, PermissionError) or _mentions(error, *_DENIED)


@final
@dataclass
class Retry:
    """Repeats requests, each for `deadline` seconds at most, until somebody sets `stop`."""

    deadline: float = DEADLINE
    stop: threading.Event = field(default_factory=threading.Event)
    waits: list[float] = field(default_factory=list)
    """Seconds waited, one for every repeat; from all threads."""

    def __call__(self, ask: Callable[[], Result], failures: tuple[type[Exception], ...]) -> Result:
        """The result of `ask`; what it raises of `failures` is raised when nothing helps."""
        began, attempt = time.monotonic(), 0
        while True:
            try:
                return ask()
            except failures as error:
                late = time.monotonic() - began > self.deadline or self.stop.is_set()
                if late or isinstance(error, FileNotFoundError) or _is_denied(error):
                    raise
            longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
            # Drawn, so that many threads or machines do not all come back at the same instant.
            self.waits.append(random.uniform(longest / 2, longest))
            self.stop.wait(self.waits[-1])
            attempt += 1


@dataclass(frozen=True)
class RemoteFile:
    """One object of a bucket; `key` is bucket and name, as "bucket/dumps/a.json.gz"."""

    scheme: str
    key: str
    bytes: int
    tag: str  # changes with the content: MD5 or generation of gs, ETag of s3
    md5: str | None  # MD5 of the content in hexadecimal, where the service tells it

    @property
    def address(self) -> str:
        """The address a user would write."""
        return f"{self.scheme}://{self.key}"


def is_remote(path: str) -> bool:
    """True if a path is an address such as s3://bucket/a.json; other kinds are refused."""
    scheme, sign, _ = path.partition("://")
    if not sign or not scheme.isalnum():
        return False
    if scheme not in SCHEMES:
        raise SourceBucketError(
            f"The source {scheme}://... is at a kind of address that is not read: gs://, s3:// and "
            "hf:NAME are. Fetch it first, and name the file."
        )
    return True


@final
@dataclass(frozen=True)
class Bucket:
    """A place in a bucket, with the credentials that were found.

    Every method that asks the service raises BucketError when it refuses or stays away.
    """

    scheme: str
    path: str
    """The address without its scheme: "bucket/runs/a", or with a pattern "bucket/dumps/*.json"."""
    files: Any  # fsspec's file system
    anonymous: bool
    failures: tuple[type[Exception], ...]  # what the library raises when a request fails
    use: BucketUse
    retry: Retry = field(default_factory=Retry)

    @property
    def name(self) -> str:
        """The bucket's name."""
        return self.path.split("/")[0]

    @property
    def address(self) -> str:
        """The address, as the user writes it."""
        return f"{self.scheme}://{self.path}"

    def request(self, what: str, ask: Callable[[], Result], *, once: bool = False) -> Result:
        """The result of `ask`, repeated while that may help."""
        try:
            return ask() if once else self.retry(ask, self.failures)
        except self.failures as error:
            why = self._refusal(error)
            raise self.use.error(f"Could not {what}: {why} {self.use.kept}") from error

    def _refusal(self, error: Exception) -> str:
        """The cause of a failure as far as the service tells, and what to do; never a secret."""
        rights, how = self.use.rights, _HOW[self.scheme]
        answer = next(iter(str(error).strip().splitlines()), type(error).__name__)
        for variable in _SECRETS:
            if secret := os.environ.get(variable):
                answer = answer.replace(secret, f"({variable})")
        answer = answer[:300]
        if isinstance(error, FileNotFoundError):
            return (
                f"there is no bucket {self.name!r}, or the object is gone. Correct "
                f"{self.use.setting}. (A service of your own is found through "
                f"{_ENDPOINT[self.scheme]}.)"
            )
        if not _is_denied(error):
            return (
                f"the service does not answer as it should: {answer}. Check the network, the proxy "
                "settings and the endpoint, and run the same command again."
            )
        if self.anonymous:
            return f"it needs the right to {rights}, and no credentials were found. {how}"
        return (
            "the credentials that were found are wrong, expired, or lack the right to "
            f"{rights}: {answer}. {how}"
        )

    def objects(self) -> list[RemoteFile]:
        """The objects that the address (a name, a folder, a pattern) stands for, by name."""

        def ask() -> dict[str, dict[str, Any]]:
            bare = self.path.rstrip("/")
            if not self.path.endswith("/") and bare != self.name:
                with suppress(FileNotFoundError):
                    entry = self.files.info(bare)
                    if entry["type"] == "file":
                        return {bare: entry}
            found: dict[str, dict[str, Any]] = self.files.find(bare, detail=True)
            if not found and any(sign in self.path for sign in "*?["):
                found = self.files.glob(self.path, detail=True)
                # The brackets may be those of a folder's name.
                found = found or self.files.glob(self.path.replace("[", "[[]"), detail=True)
            # An object whose name ends with a slash stands for a folder in a bucket's web page.
            found = {k: e for k, e in found.items() if e["type"] == "file" and k[-1] != "/"}
            if not found:
                self.files.ls(self.name, refresh=True)  # raises when there is no such bucket
            return found

        # Not repeated: a wrong address or key shows at once, before anything is fetched.
        found = self.request(f"read {self.address}", ask, once=True)
        if not found:
            raise self.use.error(
                f"{self.address} names nothing: the bucket is there and holds no such object, "
                f"folder or pattern. Names are case-sensitive; correct {self.use.setting}."
            )
        return [self._file(key, found[key]) for key in sorted(found)]

    def info(self, key: str) -> RemoteFile:
        """The object as the service has it now; for use inside `request`."""
        self.files.invalidate_cache()
        return self._file(key, self.files.info(key))

    def read_range(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes [start, end) of an object; for use inside `request`."""
        data: bytes = self.files.cat_file(file.key, start=start, end=end)
        return data

    def names(self, below: str = "") -> list[str]:
        """Names of the objects below `below`, relative to this place, sorted."""

        def ask() -> list[str]:
            self.files.invalidate_cache()
            found: list[str] = self.files.find(self._key(below).rstrip("/"))
            if not found:
                self.files.ls(self.name, refresh=True)  # raises when there is no such bucket
            return found

        start = len(self._key(""))
        found = self.request(f"list {self.address}/{below}", ask)
        return sorted(key[start:] for key in found if len(key) > start)

    def read(self, name: str) -> bytes | None:
        """The content of a small object, None if absent; a larger one is a CheckpointError."""

        def ask(key: str) -> bytes:
            self._refuse_larger(name, _MOST_READ)
            data: bytes = self.files.cat_file(key)
            return data

        what = f"read {self.address}/{name}"
        return self.request(what, lambda: _unless_absent(ask, self._key(name)))

    def put(self, name: str, data: bytes, *, new: bool = False) -> bool:
        """Write an object, if `new` only where there is none; False when there is another one.

        One of the same content counts as ours: the reply to an earlier try was lost.
        """

        def ask() -> bool:
            try:
                mode = "create" if new else "overwrite"
                self.files.pipe_file(self._key(name), data, mode=mode)
            except self.failures as error:
                if not (isinstance(error, FileExistsError) or _mentions(error, *_EXISTS)):
                    raise
                return self.read(name) == data
            self._verify(name, len(data), hashlib.md5(data, usedforsecurity=False).hexdigest())
            return True

        return self.request(f"write {self.address}/{name}", ask)

    def put_file(self, path: Path, name: str, *, grows: bool = False) -> None:
        """Write a plain file of this machine; one that is there with this content is left.

        What `grows` is appended to meanwhile, so what it has now is copied first; a link, or what
        cannot be read, is an OSError.
        """
        with ExitStack() as stack:
            file: BinaryIO = stack.enter_context(open_plain(path))
            if grows:
                copy = stack.enter_context(TemporaryFile(dir=path.parent))
                shutil.copyfileobj(file, copy)
                copy.flush()
                file = copy
            # The name of what is open: nobody can put another file in its place meanwhile.
            here, size = Path(f"/dev/fd/{file.fileno()}"), os.fstat(file.fileno()).st_size
            file.seek(0)
            md5 = md5_of(here)

            def ask() -> None:
                try:
                    self._verify(name, size, md5)
                except OSError:
                    file.seek(0)  # which macOS shares with what opens that name
                    self.files.put_file(str(here), self._key(name), chunksize=_PART_BYTES)
                    self._verify(name, size, md5)

            self.request(f"write {self.address}/{name}", ask)

    def get_file(self, name: str, path: Path, *, most: int) -> None:
        """Copy an object into a file; one of more than `most` bytes is a CheckpointError."""

        def ask() -> None:
            self._refuse_larger(name, most)
            self.files.get_file(self._key(name), str(path))

        self.request(f"read {self.address}/{name}", ask)

    def copy(self, name: str, to: str) -> None:
        """Copy an object to another name, within the service."""

        def ask() -> None:
            self.files.cp_file(self._key(name), self._key(to))
            here, there = self.info(self._key(name)), self.info(self._key(to))
            if here.bytes != there.bytes:
                raise MismatchError(f"{to} has {there.bytes} bytes in the bucket, not {here.bytes}")

        self.request(f"copy {self.address}/{name} to {to}", ask)

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, one after another; absent ones are no error."""
        for name in names:
            remove = partial(_unless_absent, self.files.rm_file, self._key(name))
            self.request(f"remove {self.address}/{name}", remove)

    def _key(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _refuse_larger(self, name: str, most: int) -> None:
        if (size := self.info(self._key(name)).bytes) > most:
            raise CheckpointError(
                f"{self.address}/{name} has {size:,} bytes, and no more than {most:,} belong "
                "there. Put the right file in its place, or choose another address."
            )

    def _verify(self, name: str, size: int, md5: str) -> None:
        found = self.info(self._key(name))
        if found.bytes != size or found.md5 not in (None, md5):
            raise MismatchError(
                f"{name} has {found.bytes} bytes with MD5 {found.md5} in the bucket; "
                f"{size} with {md5} were sent"
            )

    def _file(self, key: str, entry: dict[str, Any]) -> RemoteFile:
        size = int(entry["size"])
        if self.scheme == "s3":
            tag = str(entry.get("ETag", "")).strip('"')
            # Of an upload in parts the tag is "hash-n", no hash of the content.
            return RemoteFile("s3", key, size, tag, tag if len(tag) == 32 else None)
        md5 = entry.get("md5Hash")
        tag = str(md5 or entry.get("crc32c") or entry.get("generation") or entry.get("etag"))
        return RemoteFile("gs", key, size, tag, base64.b64decode(md5).hex() if md5 else None)


def _unless_absent(act: Callable[[str], Result], key: str) -> Result | None:
    try:
        return act(key)
    except FileNotFoundError:
        return None


def open_bucket(address: str, use: BucketUse, *, deadline: float = DEADLINE) -> Bucket:
    """Find the credentials for an address; nothing is asked of the service yet."""
    scheme_given, _, path = address.partition("://")
    scheme = SCHEMES[scheme_given]
    name = path.split("/")[0]
    if not name or "@" in name or any(sign in name for sign in "*?["):
        # The name is not shown: before an @ some tools take a key and its secret.
        raise use.error(
            f"{use.setting} names no usable bucket. An address is {scheme}://BUCKET/FOLDER/ or "
            f"{scheme}://BUCKET/NAME, patterns only after the bucket and keys never in it."
        )
    return Bucket(scheme, path, *_opened(scheme, use), use, Retry(deadline))


_UNCACHED: Final = {"use_listings_cache": False, "skip_instance_cache": True}
Opened = tuple[Any, bool, tuple[type[Exception], ...]]
"""The fields `files`, `anonymous` and `failures` of a `Bucket`."""


def _opened(scheme: str, use: BucketUse) -> Opened:
    """The file system of a service, by the credentials that its own tools would find."""
    try:
        import aiohttp

        files, anonymous, failures = _google(use) if scheme == "gs" else _amazon(use)
    except ImportError as error:
        library, extra = ("gcsfs", "gcs") if scheme == "gs" else ("s3fs", "s3")
        raise use.error(
            f"{scheme}:// addresses need {library}, which is not installed. Run: pip install "
            f"'toque[{extra}]' (or copy the files yourself and name them)."
        ) from error
    return files, anonymous, (OSError, ValueError, aiohttp.ClientError, *failures)


def _google(use: BucketUse) -> Opened:
    # It would print every repeated request with a traceback; the error's paragraph says enough.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    emulated = "STORAGE_EMULATOR_HOST" in os.environ
    if emulated:
        # With it gcsfs asks an emulator, which does not answer, for a minute and a half.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs
    import google.auth.exceptions
    import requests

    found: Any = None
    if not emulated:
        named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
        if named is not None and not Path(named).is_file():
            raise use.error(
                f"GOOGLE_APPLICATION_CREDENTIALS names {named}, and there is no such file. "
                f"{_HOW['gs']}"
            )
        try:
            found, _ = google.auth.default(
                scopes=["https://www.googleapis.com/auth/cloud-platform"]
            )
        except google.auth.exceptions.DefaultCredentialsError as error:
            if named is not None:
                raise use.error(
                    "The file that GOOGLE_APPLICATION_CREDENTIALS names holds no credentials: "
                    f"{str(error).splitlines()[0][:200]}. {_HOW['gs']}"
                ) from error
    files = gcsfs.GCSFileSystem(token=found or "anon", **_UNCACHED)
    auth_error = google.auth.exceptions.GoogleAuthError
    return files, found is None, (requests.RequestException, auth_error, gcsfs.retry.HttpError)


def _amazon(use: BucketUse) -> Opened:
    import botocore.exceptions
    import botocore.session
    import s3fs

    try:
        found = botocore.session.Session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise use.error(f"The AWS credentials cannot be used: {error}. {_HOW['s3']}") from error
    files = s3fs.S3FileSystem(anon=found is None, **_UNCACHED)
    exceptions = botocore.exceptions
    return files, found is None, (exceptions.BotoCoreError, exceptions.ClientError)
