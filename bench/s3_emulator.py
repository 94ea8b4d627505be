"""S3 emulator in a process of its own, and a slow line to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

from harness import Skipped, free_port

BUCKET = "s3://pantry"
_CHUNK = 1 << 16


@contextlib.contextmanager
def s3_emulator(megabytes_per_second: float | None = None) -> Iterator[None]:
    """An emulator with the bucket `BUCKET`; the environment of child processes leads to it.

    Args:
        megabytes_per_second: Of what is sent to it, all connections together; None: unlimited.

    Raises:
        Skipped: it did not start.
    """
    port = free_port()
    near = port if megabytes_per_second is None else _slow_line(port, megabytes_per_second)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{near}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _make_bucket(port)
        yield
    finally:
        server.kill()
        server.wait()


def _make_bucket(port: int) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/pantry", data=b"", method="PUT")
    for _ in range(300):
        try:
            urllib.request.urlopen(request).close()  # noqa: S310
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return
    raise Skipped("the S3 emulator did not start: pip install 'moto[server,s3]'")


def _slow_line(to: int, rate: float) -> int:
    """The port of a line whose bytes towards port `to` pass at `rate` MB/s; a thread carries it."""
    free_at = 0.0

    async def carry(near: asyncio.StreamReader, far: asyncio.StreamWriter, *, slow: bool) -> None:
        nonlocal free_at
        with contextlib.suppress(ConnectionError):
            while data := await near.read(_CHUNK):
                if slow:
                    free_at = max(free_at, time.monotonic()) + len(data) / (rate * 1e6)
                    await asyncio.sleep(max(0.0, free_at - time.monotonic()))
                far.write(data)
                await far.drain()
        far.close()

    async def connected(near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, there = await asyncio.open_connection("127.0.0.1", to)
        except OSError:
            back.close()
            return
        await asyncio.gather(carry(near, there, slow=True), carry(far, back, slow=False))

    port = free_port()

    async def serve() -> None:
        await (await asyncio.start_server(connected, "127.0.0.1", port)).serve_forever()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    return port
