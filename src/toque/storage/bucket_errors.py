"""Bucket errors: one class for each use of a bucket, and the paragraph that a user reads."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from toque.errors import CheckpointError, DataError, ToqueError
from toque.storage.retry import is_denied

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
    """That names it."""
    rights: str
    kept: str
    """What a failure leaves intact."""
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
    """Say what failed, why as far as the service tells, and what to do; never a secret.

    Args:
        what: was to be done, e.g. "read s3://bucket/a".
        error: of the library.
        use: of the bucket.
        bucket: its address up to its name, as "s3://bucket".
        anonymous: no credentials were found.
    """
    scheme, _, name = bucket.partition("://")
    lines = str(error).strip().splitlines()
    answer = _without_secrets(lines[0] if lines else type(error).__name__)
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


def _without_secrets(text: str) -> str:
    for name in _SECRETS:
        if value := os.environ.get(name):
            text = text.replace(value, f"({name})")
    return text[:300]
