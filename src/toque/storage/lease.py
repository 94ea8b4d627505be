"""Lease: a lock by a file that only one process can make, and that its holder renews.

For file systems without flock (some NFS, FUSE and Lustre mounts). No clock of another machine is
believed: a lease counts as left behind when it has not changed while it was watched, or when its
process ran on this machine and is gone.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, final

from toque.storage.no_follow import open_new, open_no_follow
from toque.storage.owner import Owner, died_here, owner_in

HEARTBEAT: Final = 10.0
"""Seconds between renewals."""
STALE: Final = 45.0
"""Seconds without a renewal after which a lease counts as left behind."""
_SETTLE: Final = 1.0
"""Seconds after which a taken lease is read again: two may have taken over one at a time."""
_MOST_BYTES: Final = 1 << 12

OnBusy = Callable[[str], None]
"""Called with the process id of the holder; raises to refuse, or returns to wait."""


@final
class Lease:
    """Hold `path` against other processes, of other machines too, from `take` to `release`.

    Args:
        path: the file of the lease; absent while nobody holds it.
        heartbeat: seconds between renewals.
        stale: seconds to watch another's before taking it over.
        settle: seconds before reading a lease that was taken.
    """

    def __init__(
        self,
        path: Path,
        *,
        heartbeat: float | None = None,
        stale: float | None = None,
        settle: float | None = None,
    ) -> None:
        self._path, self._me = path, Owner()
        self._heartbeat = HEARTBEAT if heartbeat is None else heartbeat
        self._stale = STALE if stale is None else stale
        self._settle = _SETTLE if settle is None else settle
        self.lost = threading.Event()
        """Another process has taken it over, because this one did not renew it for too long."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="toque-lease", daemon=True)

    def take(self, on_busy: OnBusy) -> None:
        """Take it.

        Raises:
            OSError: it cannot be made.
        """
        told = False
        while True:
            while not self._made():
                record = self._read()
                state = self._watched(record)
                if state == "stale":
                    self._set_aside(record)
                elif state == "alive" and not told:
                    told = True
                    on_busy(str(owner_in(record).get("pid", "unknown")))
            time.sleep(self._settle)
            if self._me.wrote(self._read()):
                break
        self._thread.start()

    def is_mine(self) -> bool:
        """Whether it still is this process's; looks, so that one that was stopped finds out."""
        record = self._read()
        if record is not None and not self._me.wrote(record):
            self.lost.set()
        return not self.lost.is_set()

    def release(self) -> None:
        """Give it back; one that cannot be removed goes stale by itself."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._heartbeat)
        with contextlib.suppress(OSError):
            if self._me.wrote(self._read()):
                self._path.unlink(missing_ok=True)

    def _made(self) -> bool:
        try:
            descriptor = open_new(self._path)
        except FileExistsError:
            return False
        try:
            os.write(descriptor, self._me.record())
        except OSError:
            self._path.unlink(missing_ok=True)  # a full disk: an empty one would hold others up
            raise
        finally:
            os.close(descriptor)
        return True

    def _read(self) -> bytes | None:
        try:
            descriptor = open_no_follow(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)

    def _watched(self, first: bytes | None) -> Literal["alive", "stale", "gone"]:
        if first is None:
            return "gone"
        began = time.monotonic()
        while not died_here(owner_in(first)) and time.monotonic() - began < self._stale:
            time.sleep(min(1.0, self._stale / 5))
            now = self._read()
            if now != first:
                return "gone" if now is None else "alive"
        return "stale"

    def _set_aside(self, stale: bytes | None) -> None:
        """Remove the lease if it is still the stale one; of two that try, one finds it gone."""
        aside = self._path.with_name(f".{self._path.name}.{os.urandom(8).hex()}.partial")
        try:
            self._path.rename(aside)
        except FileNotFoundError:
            return
        if aside.read_bytes() != stale:  # another has taken it over meanwhile: give it back
            with contextlib.suppress(OSError):
                os.link(aside, self._path)
        aside.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._closing.wait(self._heartbeat):
            with contextlib.suppress(OSError):  # down: whoever comes meanwhile is seen next time
                if not self.is_mine():
                    return
                descriptor = open_no_follow(self._path, os.O_WRONLY)
                try:
                    os.pwrite(descriptor, self._me.record(), 0)  # as long as the one before it
                finally:
                    os.close(descriptor)
