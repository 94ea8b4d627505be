"""A bucket of our own, for the contracts that need one."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest


@pytest.fixture
def pantry(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bucket, for the setting that needs one."""
    if path != "checkpoint.upload":
        yield
        return
    server = pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(f"http://{host}:{port}/pantry", data=b"", method="PUT")
    urllib.request.urlopen(request).close()  # noqa: S310
    yield
    running.stop()
