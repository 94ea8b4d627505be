"""A server of the live page over any folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.servers import in_a_thread
from toque.serving.server import Limits, Server
from toque.watching.app import build_app
from toque.watching.found_runs import Finder, FolderFinder
from toque.watching.watcher import Watcher


@contextmanager
def shown(at: Path | Finder, *, token: str | None = None) -> Iterator[str]:
    """A real server on a free port, in a thread of its own; gives its address."""
    finder = FolderFinder(at) if isinstance(at, Path) else at
    watcher = Watcher(finder, every=0.05)
    server = Server(build_app(watcher, token=token, hosts=("127.0.0.1",)), Limits(connections=16))
    with in_a_thread(server, lambda: server.handle_exit(2, None)) as address:
        yield address


@pytest.fixture(scope="session")
def showing() -> Callable[..., object]:
    return shown
