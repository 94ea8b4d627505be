"""Server of a studio: one application with all views, for one folder."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.errors import ConfigError, needing
from toque.reporter import SILENT, Reporter
from toque.runs.places import is_run
from toque.storage.locks import inheritable_lock

if TYPE_CHECKING:
    from toque.studio.workplace import Workplace

_MAX_PORTS: Final = 20
"""Number of ports that are tried, from the requested one on."""


def run_studio(
    folder: str | Path = ".",
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    browser: bool = True,
    reporter: Reporter = SILENT,
) -> None:
    """Serve the studio of a folder until SIGTERM or Ctrl-C. Training continues after that.

    Args:
        folder: Folder with the data files and the runs.
        host: Address to listen on.
        port: Port to listen on. If it is in use, the next free port is used.
        token: Token of the server. None means a random one, which the printed address has.
        browser: Open the page in the browser of this machine, if it has a desktop.
        reporter: Receives the address of the page.

    Raises:
        ConfigError: The folder is missing or read-only, another studio uses it, or no port is free.
    """
    with needing("serve", "`toque studio`"):
        from toque.serving.gate import Limits
        from toque.serving.server import Server, allowed_hosts, url_of
        from toque.studio.workplace import Workplace
    folder = Path(folder)
    _refuse_folder(folder)
    token = token or secrets.token_urlsafe(16)
    hosts = allowed_hosts(host, port=port, token=token, risk="train models")
    os.chdir(folder)  # commands and configurations name files relative to it
    workplace = Workplace(Path.cwd())
    workplace.state.mkdir(exist_ok=True)
    _refuse_links(workplace.state)
    with _only_studio(workplace), _open_free_port(host, port, reporter) as sock:
        with reporter.working("loading torch"):
            from toque.studio.application import build_studio
        limits = Limits()
        app = build_studio(workplace, token=token, hosts=hosts, limits=limits)
        address = f"{url_of(host, sock)}/?token={token}"
        reporter.line(address)
        reporter.notice(
            f"This address opens the studio of {workplace.folder}. Ctrl-C stops the page. Training "
            "continues."
        )
        if browser and _has_desktop():
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            Server(app, limits).run(sockets=[sock])
    reporter.notice("Stopped. A run that is training continues.")


def _has_desktop() -> bool:
    """Check whether this machine has a desktop. A text browser would take over the terminal."""
    if sys.platform == "darwin":
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _refuse_folder(folder: Path) -> None:
    """Raise a ConfigError if the folder is missing or not writable."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder. Create it, or start the studio in the folder with your "
            "files."
        )
    if is_run(folder):
        raise ConfigError(
            f"{folder} is a run. Start the studio in the folder that contains your runs and files."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"You may not write to {folder}, but a studio stores uploads and runs there. Start it "
            "in another folder."
        )


def _refuse_links(state: Path) -> None:
    """Raise a ConfigError for a link in the folder of the studio, which may come from anyone."""
    for path in (state, *state.iterdir()):
        if path.is_symlink():
            raise ConfigError(
                f"{path} is a symbolic link, but the studio writes and removes files there. Remove "
                "the link."
            )


@contextmanager
def _only_studio(workplace: Workplace) -> Iterator[None]:
    """Lock the folder for this server.

    Raises:
        ConfigError: Another studio uses the folder.
    """
    with inheritable_lock(workplace.state / "server.lock") as descriptor:
        if descriptor is None:
            raise ConfigError(
                f"Another studio already uses {workplace.folder}. Open its page, or stop it first."
            )
        yield


def _open_free_port(host: str, port: int, reporter: Reporter) -> socket.socket:
    """Open a socket at a port, or at the next free one.

    Raises:
        ConfigError: No port is free, or the address is not available.
    """
    from toque.serving.server import open_socket

    for candidate in range(port, port + _MAX_PORTS):
        try:
            sock = open_socket(host, candidate)
        except ConfigError as error:
            is_used = getattr(error.__cause__, "errno", None) == errno.EADDRINUSE
            if not is_used or candidate == port + _MAX_PORTS - 1:
                raise
        else:
            if candidate != port:
                reporter.notice(
                    f"Port {port} is in use, so the studio uses {candidate}."
                )
            return sock
    raise AssertionError("the last port raises")
