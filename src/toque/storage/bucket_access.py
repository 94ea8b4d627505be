"""Bucket access: what a bucket is opened for, its credentials, retries, and words of a refusal.

Credentials are found as the services' own tools find them, before a request is made. gcsfs and s3fs
retry by themselves, which is not enough here: s3fs gives up after about a second of waiting (five
tries), and neither repeats an upload that arrived damaged or a range that came short.
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, final

from toque.errors import CheckpointError, DataError, ToqueError

_ENDPOINT: Final = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
_SECRETS: Final = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
HOW: Final = {
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
DEADLINE: Final = 120.0
"""Seconds after which a request that keeps failing is given up."""
FIRST_WAIT = 0.5
LONGEST_WAIT: Final = 30.0
_DENIED: Final = ("401", "403", "Forbidden", "AccessDenied", "Unauthorized", "InvalidAccessKeyId")

Result = TypeVar("Result")


class BucketError(ToqueError):
    """A bucket refused, stayed away, or does not hold what it should."""


class SourceBucketError(BucketError, DataError):
    """The bucket is one of the sources."""


class RunBucketError(BucketError, CheckpointError):
    """The bucket holds a run."""


@dataclass(frozen=True)
class BucketUse:
    """The purpose a bucket is opened for."""

    setting: str
    """The setting that names the bucket."""
    rights: str
    kept: str
    """A sentence on what a failure leaves intact."""
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


def refusal(what: str, error: Exception, use: BucketUse, *, bucket: str, anonymous: bool) -> str:
    """Say what failed, why as far as the service tells, and what to do; never a secret."""
    scheme, _, name = bucket.partition("://")
    answer = next(iter(str(error).strip().splitlines()), type(error).__name__)
    for variable in _SECRETS:
        if secret := os.environ.get(variable):
            answer = answer.replace(secret, f"({variable})")
    answer = answer[:300]
    if isinstance(error, FileNotFoundError):
        why = (
            f"there is no bucket {name!r}, or the object is gone. Correct {use.setting}. (A "
            f"service of your own is found through {_ENDPOINT[scheme]}.)"
        )
    elif not is_denied(error):
        why = (
            f"the service does not answer as it should: {answer}. Check the network, the proxy "
            "settings and the endpoint, and run the same command again."
        )
    elif anonymous:
        why = f"it needs the right to {use.rights}, and no credentials were found. {HOW[scheme]}"
    else:
        why = (
            f"the credentials that were found are wrong, expired, or lack the right to "
            f"{use.rights}: {answer}. {HOW[scheme]}"
        )
    return f"Could not {what}: {why} {use.kept}"


_UNCACHED: Final = {"use_listings_cache": False, "skip_instance_cache": True}
Opened = tuple[Any, bool, tuple[type[Exception], ...]]
"""fsspec's file system; whether no credentials were found; what the library raises when a request
fails."""


def open_filesystem(scheme: str, use: BucketUse) -> Opened:
    """The file system of a service; a missing library or unreadable credentials: a BucketError."""
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
                f"{HOW['gs']}"
            )
        try:
            found, _ = google.auth.default(
                scopes=["https://www.googleapis.com/auth/cloud-platform"]
            )
        except google.auth.exceptions.DefaultCredentialsError as error:
            if named is not None:
                raise use.error(
                    "The file that GOOGLE_APPLICATION_CREDENTIALS names holds no credentials: "
                    f"{str(error).splitlines()[0][:200]}. {HOW['gs']}"
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
        raise use.error(f"The AWS credentials cannot be used: {error}. {HOW['s3']}") from error
    files = s3fs.S3FileSystem(anon=found is None, **_UNCACHED)
    exceptions = botocore.exceptions
    return files, found is None, (exceptions.BotoCoreError, exceptions.ClientError)


class MismatchError(OSError):
    """The bytes that arrived are not those that were sent: always worth another try."""


_WORD = re.compile(r"\w+")


def mentions(error: Exception, *signs: str) -> bool:
    """True if an error has one of the words or status codes in its text, code or cause."""
    # Whole words: an MD5 with "403" in it is no refusal.
    words = _WORD.findall(f"{error} {getattr(error, 'code', '')} {error.__cause__ or ''}")
    return any(sign in words for sign in signs)


def is_denied(error: Exception) -> bool:
    """True if the service refused for want of rights."""
    if isinstance(error, MismatchError):
        return False
    return isinstance(error, PermissionError) or mentions(error, *_DENIED)


@final
@dataclass
class Retry:
    """Repeats requests.

    Args:
        deadline: seconds for one request, repeats included; 0 for a single try.
        stop: set by whoever does not want to wait any longer.
    """

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
                if late or isinstance(error, FileNotFoundError) or is_denied(error):
                    raise
            longest = min(LONGEST_WAIT, FIRST_WAIT * 2**attempt)
            # Drawn, so that many threads or machines do not all come back at the same instant.
            self.waits.append(random.uniform(longest / 2, longest))
            self.stop.wait(self.waits[-1])
            attempt += 1
