"""A TCP line to a store that misbehaves on purpose: answers 503, resets, stalls, damages, kills.

It speaks just enough HTTP to know where a request and its answer end, so that a fault strikes at
the request it is meant for: the first PUT of a manifest, the third byte of a body. What is not
meant passes through unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
FORBIDDEN = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass
class Fault:
    """What happens to the first `times` requests that `meant` picks by method and path.

    Args:
        meant: (method, what) -> whether; `what` is the path with its query, and the begin of the
            body, where Google's service is told the name.
        answer: sent instead of asking the store.
        reset_after: bytes of the request's body that reach the store, then both ends are cut.
        stall: seconds before the answer is passed on.
        lose_answer: the store does what was asked, and its answer never arrives.
        damage: flip a bit of the request's body on its way.
        then: called when the store has answered, before anything is passed on.
    """

    meant: Callable[[str, str], bool]
    times: int = 1
    answer: bytes | None = None
    reset_after: int | None = None
    stall: float = 0.0
    lose_answer: bool = False
    damage: bool = False
    then: Callable[[], None] | None = None
    struck: int = field(default=0, init=False)


class FaultProxy:
    """A line to the store at `port`, in a thread of its own."""

    def __init__(self, port: int, *faults: Fault) -> None:
        self._to, self.faults = port, faults
        self.seen: list[tuple[str, str]] = []
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, "127.0.0.1", 0)
        )
        self.port = int(server.sockets[0].getsockname()[1])
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        server.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _connection(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(near, back):
                pass
        back.close()

    async def _exchange(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> bool:
        head = await near.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        if b"100-continue" in head.lower():
            back.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = b"\r\n".join(x for x in head.split(b"\r\n") if b"100-continue" not in x.lower())
        body = await _body(near, head)
        what = urllib.parse.unquote(path) + " " + body[:400].decode("latin-1")
        self.seen.append((method, what))
        fault = self._fault(method, what)
        if fault is not None and fault.answer is not None:
            back.write(fault.answer)
            await back.drain()
            return False
        if fault is not None and fault.damage and body:
            body = body[:-5] + bytes([body[-5] ^ 1]) + body[-4:]
        reader, writer = await asyncio.open_connection("127.0.0.1", self._to)
        if fault is not None and fault.reset_after is not None:
            writer.write(head + body[: fault.reset_after])
            await writer.drain()
            writer.transport.abort()
            back.transport.abort()
            return False
        writer.write(head + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        answer += await _body(reader, answer, bodiless=method == "HEAD")
        writer.close()
        if fault is not None:
            await asyncio.sleep(fault.stall)
            if fault.then is not None:
                fault.then()
            if fault.lose_answer:
                back.transport.abort()
                return False
        back.write(answer)
        await back.drain()
        return True

    def _fault(self, method: str, what: str) -> Fault | None:
        for fault in self.faults:
            if fault.struck < fault.times and fault.meant(method, what):
                fault.struck += 1
                return fault
        return None


async def _body(reader: asyncio.StreamReader, head: bytes, *, bodiless: bool = False) -> bytes:
    """The rest of a message, as it came."""
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in head.split(b"\r\n")[1:])
    }
    if bodiless:
        return b""
    if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
        parts = []
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            parts.append(line + await reader.readexactly(size + 2))
            if size == 0:
                return b"".join(parts)
    return await reader.readexactly(int(fields.get(b"content-length", b"0")))


def writes(ending: str) -> Callable[[str, str], bool]:
    """Requests that write an object whose name ends so, on either service."""

    def meant(method: str, what: str) -> bool:
        return method in ("PUT", "POST") and ending in what

    return meant


@contextlib.contextmanager
def behind(port: int, *faults: Fault) -> Iterator[FaultProxy]:
    """The line, closed at the end."""
    line = FaultProxy(port, *faults)
    try:
        yield line
    finally:
        line.close()
