"""A server of the live page over any folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from toque.serving.limits import Limits
from toque.serving.server import Server, listening
from toque.watching.app import build_app
from toque.watching.found_runs import Finder, FolderFinder
from toque.watching.watcher import Watcher


@contextmanager
def shown(at: Path | Finder, *, token: str | None = None) -> Iterator[str]:
    """A real server on a free port, in a thread of its own; gives its address."""
    finder = FolderFinder(at) if isinstance(at, Path) else at
    watcher = Watcher(finder, every=0.05)
    server = Server(build_app(watcher, token=token, hosts=("127.0.0.1",)), Limits(connections=16))
    sock = listening("127.0.0.1", 0)
    thread = threading.Thread(target=partial(server.run, sockets=[sock]))
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.handle_exit(2, None)
        thread.join()


@pytest.fixture(scope="session")
def showing() -> Callable[..., object]:
    return shown
