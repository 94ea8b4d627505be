"""A bucket of our own, for the contracts that need one."""

import pytest


@pytest.fixture
def pantry(path: str, request: pytest.FixtureRequest) -> None:
    """A bucket, for the setting that needs one."""
    if path == "checkpoint.upload":
        request.getfixturevalue("s3_service")
