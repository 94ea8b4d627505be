"""A server of the live page over any folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.servers import in_a_thread
from toque.runs.places import RunFinder
from toque.serving.gate import Limits
from toque.serving.server import Server
from toque.serving.watch_app import Watcher, build_watch_app


@contextmanager
def shown(at: Path) -> Iterator[str]:
    """A real server on a free port, in a thread of its own; gives its address."""
    watcher = Watcher(RunFinder(at), every=0.05)
    app = build_watch_app(watcher, token=None, hosts=("127.0.0.1",))
    server = Server(app, Limits(connections=16))
    with in_a_thread(server, lambda: server.handle_exit(2, None)) as address:
        yield address


@pytest.fixture(scope="session")
def showing() -> Callable[..., object]:
    return shown
