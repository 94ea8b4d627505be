"""`toque serve` among hostile clients: 10,000 requests that are wrong, huge, cut, slow or silent.

    python bench/robustness/hostile_requests.py --requests 10000 --connections 1000

A server in a process of its own is sent drawn requests of ten kinds, with so many connections left
open and silent beside them. Passes when every answer has the code of its kind, the server's memory
stays within --megabytes of what it was after warming up, and it then writes what it wrote before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "speed"))
import harness
import psutil
import serve

PATHS = ("/v1/completions", "/v1/chat/completions")
ASK = {"model": "model", "prompt": "rice", "temperature": 0, "max_tokens": 4}
NOBODY = -1
"""Instead of a code, where the client goes away before there is one."""


def request(body: bytes, *, path: str = PATHS[0], length: int | None = None) -> bytes:
    """The bytes of a request."""
    n = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {n}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body


def encoded(**fields: object) -> bytes:
    """A request for four tokens with some fields changed."""
    return request(json.dumps(ASK | fields).encode())


def wrong_type(r: random.Random) -> bytes:
    """A field of another type."""
    field = r.choice(["model", "prompt", "temperature", "n", "seed", "stop", "max_tokens", "top_p"])
    return encoded(**{field: r.choice([{}, [[]], {"a": 1}, [None], [[1.5]]])})


def out_of_range(r: random.Random) -> bytes:
    """A number that is not allowed."""
    field = r.choice(["temperature", "n", "max_tokens", "top_p"])
    return encoded(**{field: r.choice([-1, -(10**40), 10**400])})


def no_json(r: random.Random) -> bytes:
    """Bytes at random, deep brackets, half a body."""
    deep = b'{"prompt":' + b"[" * 50_000
    half = json.dumps(ASK).encode()[: r.randint(0, 30)]
    return request(r.choice([r.randbytes(300), deep, half, b"\x00", b"null"]))


def no_http(r: random.Random) -> bytes:
    """What is no HTTP."""
    return r.choice([b"\x16\x03\x01" + r.randbytes(200), b"HELO me\r\n\r\n", b"GET\r\n\r\n"])


def cut(r: random.Random) -> bytes:
    """A stream that is left after its first bytes."""
    return encoded(stream=True, max_tokens=500, n=r.randint(1, 8))


KINDS: dict[str, tuple[Callable[[random.Random], bytes], frozenset[int]]] = {
    "right": (lambda _: encoded(), frozenset({200, 429})),
    "wrong type": (wrong_type, frozenset({400})),
    "out of range": (out_of_range, frozenset({400})),
    "no JSON": (no_json, frozenset({400})),
    "no HTTP": (no_http, frozenset({400})),
    "unknown model": (lambda r: encoded(model=str(r.random())), frozenset({404})),
    "unknown path": (lambda r: request(b"{}", path=f"/v1/{r.random()}"), frozenset({404})),
    "huge": (lambda r: request(b" " * r.randint(1 << 21, 1 << 22)), frozenset({413})),
    "long prompt": (lambda r: encoded(prompt="rice " * r.randint(2000, 9000)), frozenset({400})),
    "cut": (cut, frozenset({200, 429, NOBODY})),
}
"""Bytes of each kind, and the codes that are right."""


async def code_of(address: tuple[str, int], data: bytes, *, leave: bool) -> int:
    """The code that answers some bytes; `leave` after the first of the answer."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        with suppress(ConnectionError):  # the answer may stand there all the same
            writer.write(data)
            await writer.drain()
        line = await asyncio.wait_for(reader.readline(), 60)
        if not leave:
            with suppress(ConnectionError):
                await reader.read()
        return int(line.split()[1]) if line else NOBODY
    except ConnectionError:
        return NOBODY
    finally:
        writer.close()


async def attack(address: tuple[str, int], a: argparse.Namespace) -> dict[str, Counter[int]]:
    """The codes that each kind got."""
    drawn, places = random.Random(a.seed), asyncio.Semaphore(a.at_once)
    found: dict[str, Counter[int]] = {name: Counter() for name in KINDS}
    silent = [await asyncio.open_connection(*address) for _ in range(a.connections)]

    async def one(name: str, data: bytes) -> None:
        async with places:
            found[name][await code_of(address, data, leave=name == "cut")] += 1

    names = drawn.choices(list(KINDS), k=a.requests)
    for i in range(0, len(names), 200):  # so that not all bodies lie in memory
        await asyncio.gather(*(one(name, KINDS[name][0](drawn)) for name in names[i : i + 200]))
    for _, writer in silent:
        writer.close()
    return found


def memory_of(port: int) -> float:
    """Megabytes of the process that listens on a port."""
    for process in psutil.Process().children(recursive=True):
        if any(c.laddr.port == port for c in process.net_connections("tcp") if c.laddr):
            return float(process.memory_info().rss / 1e6)
    raise RuntimeError(f"nothing listens on port {port} any more")


def measure(a: argparse.Namespace) -> harness.Result:
    """Warm up, attack, and ask again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or serve.written_model(Path(folder) / "model")
        with serve.served(model, a.threads) as where:
            there = urlsplit(where)
            address = (str(there.hostname), int(there.port or 0))
            prompts = [f"recipe {i}" for i in range(40)]

            def texts() -> list[str]:
                asked = serve.streamed(where, prompts, at_once=32, new=100)
                return [told.text for told in asyncio.run(asked)]

            before = texts()
            began = memory_of(address[1])
            codes = asyncio.run(attack(address, a))
            grown = memory_of(address[1]) - began
            same = texts() == before
    wrong = {
        name: dict(found) for name, found in codes.items() if not found.keys() <= KINDS[name][1]
    }
    passes = not wrong and same and grown <= a.megabytes
    return harness.Result(
        quality={"passes": passes, "wrong_codes": wrong, "writes_the_same": same},
        details={
            "codes": {name: dict(found) for name, found in codes.items()},
            "megabytes_before": round(began),
            "megabytes_grown": round(grown, 1),
        },
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--model", type=Path)
    p.add_argument("--requests", type=int, default=10_000)
    p.add_argument("--connections", type=int, default=1000)
    p.add_argument("--at-once", type=int, default=64)
    p.add_argument("--megabytes", type=float, default=200.0)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
