"""Buckets: what an address names, with credentials checked first and every refusal in words.

Through fsspec: gcsfs for `gs://`, s3fs for `s3://`. Keys and secrets are never in a message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toque.errors import DataError

SCHEMES = {"gs": "gs", "gcs": "gs", "s3": "s3", "s3a": "s3"}
_LIBRARY = {"gs": "gcsfs", "s3": "s3fs"}
_EXTRA = {"gs": "gcs", "s3": "s3"}
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_GS_HOW = (
    "Set GOOGLE_APPLICATION_CREDENTIALS to the JSON file of a service account that may list and "
    "read the bucket, or run `gcloud auth application-default login`. For an emulator set "
    "STORAGE_EMULATOR_HOST."
)
_S3_HOW = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN where there is one), "
    "or AWS_PROFILE with ~/.aws/credentials, of a user with s3:ListBucket and s3:GetObject. For "
    "another S3 service such as MinIO set AWS_ENDPOINT_URL."
)
_HOW = {"gs": _GS_HOW, "s3": _S3_HOW}


@dataclass(frozen=True)
class RemoteFile:
    """One object of a bucket."""

    scheme: str
    key: str
    """Bucket and name, as "bucket/dumps/a.json.gz"."""
    bytes: int
    tag: str
    """What changes with the content: MD5 or generation of gs, ETag of s3."""
    md5: str | None
    """MD5 of the content in hexadecimal, where the service says it."""

    @property
    def address(self) -> str:
        """The address a user would write."""
        return f"{self.scheme}://{self.key}"


def is_remote(path: str) -> bool:
    """Whether a source's path is an address such as s3://bucket/a.json.

    Raises:
        DataError: it is an address of a kind that is not read.
    """
    scheme, sign, _ = path.partition("://")
    if not sign or not scheme.isalnum():
        return False
    if scheme not in SCHEMES:
        raise DataError(
            f"The source {scheme}://... is at a kind of address that is not read. Sources are "
            "files of this machine, gs:// and s3:// addresses, or hf:NAME. Fetch it first, and "
            "name the file."
        )
    return True


def listing(path: str, say: Callable[[str], None]) -> tuple[Bucket, list[RemoteFile]]:
    """The bucket of an address and what is to be read of it; hidden and empty objects are told.

    Raises:
        DataError: credentials, the bucket or the name are wrong, or nothing is left to read.
    """
    bucket, rest = bucket_of(path)
    found = bucket.list(rest)
    first_sign = min((rest.index(sign) for sign in "*?[" if sign in rest), default=len(rest))
    n_given = rest[:first_sign].count("/")
    named = [file for file in found if file.key == rest]
    hidden = [f for f in found if not named and "/." in "/" + _below(f.key, n_given)]
    empty = [file for file in found if file.bytes == 0 and file not in hidden]
    for files, why in ((hidden, "hidden (a part of the name begins with a dot)"), (empty, "empty")):
        if files:
            shown = ", ".join(file.address for file in files[:3])
            more = f" and {len(files) - 3:,} more" if len(files) > 3 else ""
            say(f"Not read, because {why}: {shown}{more}.")
    left = [file for file in found if file not in hidden and file not in empty]
    if not left:
        raise DataError(
            f"{path} names {len(found):,} objects, all of them empty or hidden. Correct the "
            "address in data.sources, or write them again."
        )
    return bucket, left


def _below(key: str, n_parts: int) -> str:
    return "/".join(key.split("/")[n_parts:])


@dataclass(frozen=True)
class Bucket:
    """The bucket of an address, with the credentials that were found."""

    scheme: str
    name: str
    files: Any
    """fsspec's file system."""
    anonymous: bool
    failures: tuple[type[Exception], ...]
    """What the library raises when a request fails."""

    def list(self, path: str) -> list[RemoteFile]:
        """The objects that `path` ("bucket/dumps/", a name, a pattern) stands for, by name.

        Raises:
            DataError: no right to list them, no such bucket, or nothing there.
        """
        with self.refusals(f"{self.scheme}://{path}"):
            found = self._entries(path)
            if not found:
                self.files.ls(self.name, refresh=True)  # raises when there is no such bucket
        if not found:
            raise DataError(
                f"{self.scheme}://{path} names nothing: the bucket is there and holds no such "
                "object, folder or pattern. Names are case-sensitive; correct data.sources."
            )
        return [self._file(key, found[key]) for key in sorted(found)]

    def again(self, file: RemoteFile) -> RemoteFile:
        """The object as it is now."""
        self.files.invalidate_cache()
        return self._file(file.key, self.files.info(file.key))

    def read(self, file: RemoteFile, start: int, end: int) -> bytes:
        """Bytes [start, end) of an object."""
        data: bytes = self.files.cat_file(file.key, start=start, end=end)
        return data

    @contextmanager
    def refusals(self, address: str) -> Iterator[None]:
        """Turn a refused request into one paragraph.

        Raises:
            DataError: which says what to set, or what the service answered.
        """
        try:
            yield
        except FileNotFoundError as error:
            raise DataError(
                f"{address} cannot be read: there is no bucket {self.name!r}, or the object is "
                "gone. Correct the name in data.sources. (A service of your own is found through "
                f"{'STORAGE_EMULATOR_HOST' if self.scheme == 'gs' else 'AWS_ENDPOINT_URL'}.)"
            ) from error
        except self.failures as error:
            raise self._refused(address, error) from error

    def _entries(self, path: str) -> dict[str, dict[str, Any]]:
        bare = path.rstrip("/")
        if not path.endswith("/") and bare != self.name:
            try:
                entry = self.files.info(bare)
            except FileNotFoundError:
                entry = {"type": "none"}
            if entry["type"] == "file":
                return {bare: entry}
        found: dict[str, dict[str, Any]] = self.files.find(bare, detail=True)
        if not found and any(sign in path for sign in "*?["):
            found = self.files.glob(path, detail=True)
        # An object whose name ends with a slash stands for a folder in a bucket's web page.
        return {k: e for k, e in found.items() if e["type"] == "file" and not k.endswith("/")}

    def _file(self, key: str, entry: dict[str, Any]) -> RemoteFile:
        size = int(entry["size"])
        if self.scheme == "s3":
            tag = str(entry.get("ETag", "")).strip('"')
            # Of an upload in parts the tag is "hash-n", no hash of the content.
            return RemoteFile("s3", key, size, tag, tag if len(tag) == 32 else None)
        md5 = entry.get("md5Hash")
        tag = str(md5 or entry.get("crc32c") or entry.get("generation") or entry.get("etag"))
        return RemoteFile("gs", key, size, tag, _hexadecimal(md5))

    def _refused(self, address: str, error: Exception) -> DataError:
        said = _without_secrets(str(error).strip().splitlines()[0] if str(error).strip() else "")
        words = f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}"
        denied = isinstance(error, PermissionError) or any(
            sign in words for sign in ("401", "403", "Forbidden", "AccessDenied", "Unauthorized")
        )
        if not denied:
            return DataError(
                f"{address} cannot be reached: {said or type(error).__name__}. Check the network, "
                "the proxy settings and the endpoint, and run the same command again: what is "
                "fetched already is kept."
            )
        if self.anonymous:
            return DataError(
                f"{address} may not be read without credentials, and none were found. "
                f"{_HOW[self.scheme]}"
            )
        return DataError(
            f"{address} may not be read with the credentials that were found: {said}. They are "
            f"wrong, expired, or lack the right to list and read. {_HOW[self.scheme]}"
        )


def bucket_of(path: str) -> tuple[Bucket, str]:
    """The bucket of an address, and the address without its scheme.

    Raises:
        DataError: the address names no bucket, the library is missing, or the credentials' file
            cannot be read.
    """
    given, _, rest = path.partition("://")
    scheme = SCHEMES[given]
    name = rest.split("/")[0]
    if not name or "@" in name or any(sign in name for sign in "*?["):
        # The name is not shown: before an @ some tools take a key and its secret.
        raise DataError(
            f"A source begins with {scheme}:// and names no usable bucket after it. An address is "
            f"{scheme}://BUCKET/FOLDER/ or {scheme}://BUCKET/NAME, patterns only after the bucket "
            "and keys never in it."
        )
    opened = _google() if scheme == "gs" else _amazon()
    return Bucket(scheme, name, *opened), rest


_Opened = tuple[Any, bool, tuple[type[Exception], ...]]


def _google() -> _Opened:
    # It would print every repeated request with a traceback; the error's paragraph says enough.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    emulated = "STORAGE_EMULATOR_HOST" in os.environ
    if emulated:
        # With it gcsfs asks an emulator, which does not answer, for a minute and a half.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        import aiohttp
        import gcsfs
        import google.auth.exceptions
        import requests
    except ImportError as error:
        raise _missing("gs") from error
    found: Any = None
    if not emulated:
        _check_file("GOOGLE_APPLICATION_CREDENTIALS", _GS_HOW)
        try:
            found, _ = google.auth.default(
                scopes=["https://www.googleapis.com/auth/cloud-platform"]
            )
        except google.auth.exceptions.DefaultCredentialsError as error:
            if "GOOGLE_APPLICATION_CREDENTIALS" in os.environ:
                raise DataError(
                    "The file that GOOGLE_APPLICATION_CREDENTIALS names holds no credentials: "
                    f"{str(error).splitlines()[0][:200]}. {_GS_HOW}"
                ) from error
    files = gcsfs.GCSFileSystem(
        token=found or "anon", use_listings_cache=False, skip_instance_cache=True
    )
    failures = (
        OSError,
        ValueError,
        aiohttp.ClientError,
        requests.RequestException,
        google.auth.exceptions.GoogleAuthError,
        gcsfs.retry.HttpError,
    )
    return files, found is None, failures


def _amazon() -> _Opened:
    try:
        import aiohttp
        import botocore.exceptions
        import botocore.session
        import s3fs
    except ImportError as error:
        raise _missing("s3") from error
    try:
        found = botocore.session.Session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise DataError(f"The AWS credentials cannot be used: {error}. {_S3_HOW}") from error
    files = s3fs.S3FileSystem(
        anon=found is None, use_listings_cache=False, skip_instance_cache=True
    )
    failures = (
        OSError,
        ValueError,
        aiohttp.ClientError,
        botocore.exceptions.BotoCoreError,
        botocore.exceptions.ClientError,
    )
    return files, found is None, failures


def _check_file(variable: str, how: str) -> None:
    named = os.environ.get(variable)
    if named is not None and not Path(named).is_file():
        raise DataError(f"{variable} names {named}, and there is no such file. {how}")


def _missing(scheme: str) -> DataError:
    return DataError(
        f"{scheme}:// sources need {_LIBRARY[scheme]}, which is not installed. Run: pip install "
        f"'toque[{_EXTRA[scheme]}]' (or fetch the files yourself and name them)."
    )


def _hexadecimal(md5: str | None) -> str | None:
    if md5 is None:
        return None
    import base64

    return base64.b64decode(md5).hex()


def _without_secrets(text: str) -> str:
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, f"({name})")
    return text[:300]
