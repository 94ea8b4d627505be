"""Bucket services: file systems of gs:// and s3://, with the credentials of the services' tools."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, Final

from toque.errors import ToqueError

LOGIN_ADVICE: Final = {
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
_UNCACHED: Final = {"use_listings_cache": False, "skip_instance_cache": True}
"""Options for fsspec file systems, so that every listing is current."""
FileSystem = tuple[Any, bool, tuple[type[Exception], ...]]
"""fsspec file system, True if it has no credentials, and the errors that requests raise."""


def open_file_system(scheme: str, raised: type[ToqueError]) -> FileSystem:
    """Open a service's file system with the credentials of the service's own tools.

    Raises an error of the type `raised` if the library is not installed, or the credentials are
    invalid.
    """
    open_service = _open_gcs if scheme == "gs" else _open_s3
    try:
        import aiohttp

        files, anonymous, failures = open_service(raised)
    except ImportError as error:
        library, extra = ("gcsfs", "gcs") if scheme == "gs" else ("s3fs", "s3")
        raise raised(
            f"{scheme}:// addresses need {library}, which is not installed. Run: pip install "
            f"'toque[{extra}]' (or download the files and give their paths)."
        ) from error
    return files, anonymous, (OSError, ValueError, aiohttp.ClientError, *failures)


def _open_gcs(raised: type[ToqueError]) -> FileSystem:
    """Open gcsfs with the default credentials of Google's tools, or anonymously."""
    # gcsfs would log a traceback for each retry. Toque's message is enough.
    logging.getLogger("gcsfs").addHandler(logging.NullHandler())
    is_emulated = "STORAGE_EMULATOR_HOST" in os.environ
    if is_emulated:
        # With HNS support, gcsfs waits 90 seconds for an endpoint that emulators do not have.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import gcsfs
    import google.auth.exceptions
    import requests

    credentials = None if is_emulated else _google_credentials(raised)
    files = gcsfs.GCSFileSystem(token=credentials or "anon", **_UNCACHED)
    auth_error = google.auth.exceptions.GoogleAuthError
    failures = (requests.RequestException, auth_error, gcsfs.retry.HttpError)
    return files, credentials is None, failures


def _google_credentials(raised: type[ToqueError]) -> Any:
    """Find Google's Application Default Credentials. Return None if no credentials are set."""
    import google.auth.exceptions

    key_file = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    if key_file is not None and not Path(key_file).is_file():
        raise raised(
            f"GOOGLE_APPLICATION_CREDENTIALS is {key_file}, which does not exist. "
            f"{LOGIN_ADVICE['gs']}"
        )
    scopes = ["https://www.googleapis.com/auth/cloud-platform"]
    try:
        credentials, _ = google.auth.default(scopes=scopes)
    except google.auth.exceptions.DefaultCredentialsError as error:
        if key_file is None:
            return None
        raise raised(
            "The file of GOOGLE_APPLICATION_CREDENTIALS has no valid credentials: "
            f"{str(error).splitlines()[0][:200]}. {LOGIN_ADVICE['gs']}"
        ) from error
    return credentials


def _open_s3(raised: type[ToqueError]) -> FileSystem:
    """Open s3fs with the default credentials of the AWS tools, or anonymously."""
    import botocore.exceptions
    import botocore.session
    import s3fs

    try:
        credentials = botocore.session.Session().get_credentials()
    except botocore.exceptions.BotoCoreError as error:
        message = f"The AWS credentials are invalid: {error}. {LOGIN_ADVICE['s3']}"
        raise raised(message) from error
    files = s3fs.S3FileSystem(anon=credentials is None, **_UNCACHED)
    failures = (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError)
    return files, credentials is None, failures
