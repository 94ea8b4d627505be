"""Object stores of our own for the tests: moto's S3, the GCS emulator, and a line that breaks."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator

COMMANDS = {
    "s3": ["moto.server", "-H", "127.0.0.1", "-p"],
    "gs": ["gcp_storage_emulator", "start", "--in-memory", "--host=127.0.0.1", "--port"],
}
_SIGNED = (
    "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, "
    "Signature=0"
)
_MULTIPART = (
    b'--x\r\nContent-Type: application/json\r\n\r\n{"name": "%s"}\r\n'
    b"--x\r\nContent-Type: text/plain\r\n\r\n%s\r\n--x--\r\n"
)


class Service:
    """A running service with the bucket "pantry", in a process of its own."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.port = scheme, free_port()
        self._process = subprocess.Popen(
            [sys.executable, "-m", *COMMANDS[scheme], str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                break
            assert self._process.poll() is None, "the service did not start"
            time.sleep(0.05)
        if scheme == "s3":
            self._send("PUT", "pantry/", b"")
        else:
            self._send("POST", "storage/v1/b", b'{"name": "pantry"}', "application/json")

    def put(self, name: str, data: bytes) -> None:
        """Write an object of the bucket."""
        if self.scheme == "s3":
            self._send("PUT", f"pantry/{name}", data)
        elif data:
            place = f"?uploadType=media&name={urllib.parse.quote(name, safe='')}"
            self._send("POST", f"upload/storage/v1/b/pantry/o{place}", data)
        else:  # the emulator knows nothing of an empty body
            body = _MULTIPART % (name.encode(), data)
            place = "upload/storage/v1/b/pantry/o?uploadType=multipart"
            self._send("POST", place, body, "multipart/related; boundary=x")

    def _send(self, method: str, path: str, data: bytes, kind: str = "text/plain") -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            data=data,
            method=method,
            headers={"Content-Type": kind, "Authorization": _SIGNED},
        )
        urllib.request.urlopen(request).close()  # noqa: S310

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class BreakingLine:
    """A TCP proxy that cuts each connection after some bytes of answers, a number of times."""

    def __init__(self, port: int, *, cut_after: int, cuts: int) -> None:
        self._to, self._cut_after, self.cuts_left = port, cut_after, cuts
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._copy, args=(near, far, None), daemon=True).start()
            threading.Thread(
                target=self._copy, args=(far, near, self._cut_after), daemon=True
            ).start()

    def _copy(self, source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        n_bytes = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                n_bytes += len(data)
                if limit is not None and n_bytes > limit and self.cuts_left > 0:
                    self.cuts_left -= 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def breaking(port: int, *, cut_after: int, cuts: int) -> Iterator[BreakingLine]:
    line = BreakingLine(port, cut_after=cut_after, cuts=cuts)
    try:
        yield line
    finally:
        line.close()
