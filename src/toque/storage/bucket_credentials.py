"""Bucket credentials: found as the services' own tools find them, before a request is made."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from toque.storage.bucket_errors import HOW, BucketUse

Opened = tuple[Any, bool, tuple[type[Exception], ...]]
"""fsspec's file system; whether no credentials were found; what the library raises when a request
fails."""


def open_filesystem(scheme: str, use: BucketUse) -> Opened:
    """The file system of a service.

    Raises:
        BucketError: the library is missing, or the credentials cannot be read.
    """
    open_service, library, extra = (
        (_google, "gcsfs", "gcs") if scheme == "gs" else (_amazon, "s3fs", "s3")
    )
    try:
        import aiohttp

        files, anonymous, failures = open_service(use)
    except ImportError as error:
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
    files = gcsfs.GCSFileSystem(
        token=found or "anon", use_listings_cache=False, skip_instance_cache=True
    )
    failures = (
        requests.RequestException,
        google.auth.exceptions.GoogleAuthError,
        gcsfs.retry.HttpError,
    )
    return files, found is None, failures


def _amazon(use: BucketUse) -> Opened:
    import botocore.exceptions
    import botocore.session
    import s3fs

    try:
        found = botocore.session.Session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        raise use.error(f"The AWS credentials cannot be used: {error}. {HOW['s3']}") from error
    files = s3fs.S3FileSystem(
        anon=found is None, use_listings_cache=False, skip_instance_cache=True
    )
    failures = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
    return files, found is None, failures
