"""Short waits: torch's threads hardly spin while other programs use their cores.

GNU's OpenMP reads its spin time only once. But if a process has more threads than cores, its
threads spin only 100 rounds. An additional idle team of threads has this effect at any time, and
its end restores the spin time. Results do not change, because the computing teams stay the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from toque.hardware.processor import ProcessorUse, is_contended, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in

_UPDATE_SECONDS: Final = 1.0
# Torch divides a sum of this size among its threads.
_PARALLEL_ELEMENTS: Final = 1 << 20


def teams_needed(threads: int, cores: int) -> int:
    """Return the number of idle teams that, with a computing team, exceed the number of cores.

    Each team adds `threads - 1` threads, because its first thread exists already.

    >>> teams_needed(2, 2), teams_needed(8, 8), teams_needed(4, 16)
    (1, 1, 5)
    """
    return (cores - threads) // (threads - 1) + 1


class ShortWaits:
    """Idle teams that exist while other programs compute."""

    def __init__(
        self, threads: int, read: Callable[[], ProcessorUse] = ProcessorUse.now
    ) -> None:
        self._threads, self._read = threads, read
        self._cores = len(usable_cores())
        self._before = read()
        self._end: threading.Event | None = None

    @property
    def are_short(self) -> bool:
        """True if the idle teams exist."""
        return self._end is not None

    def update(self) -> None:
        """Start or end the idle teams, depending on other programs' use since the last call."""
        use = self._read()
        others = use.others_since(self._before)
        self._before = use
        is_busy = is_contended(threads=self._threads, others=others, cores=self._cores)
        if is_busy and self._end is None:
            self._end = threading.Event()
            for _ in range(teams_needed(self._threads, self._cores)):
                threading.Thread(
                    target=_idle_team, args=(self._end,), name="idle team", daemon=True
                ).start()
        elif not is_busy and self._end is not None:
            self._end.set()
            self._end = None


def _idle_team(end: threading.Event) -> None:
    # A parallel operation creates this thread's team, which then sleeps.
    torch.ones(_PARALLEL_ELEMENTS).sum()
    end.wait()


def _update_forever(waits: ShortWaits) -> None:
    while True:
        time.sleep(_UPDATE_SECONDS)
        waits.update()


_started: Final = threading.Event()


def shorten_waits_when_busy() -> None:
    """Start a thread that shortens waits, once per process.

    It does not start if the user set how threads wait, or if torch has only one thread.
    """
    threads = torch.get_num_threads()
    if _started.is_set() or threads < 2 or chosen_by_user(waits_in()):
        return
    _started.set()
    waits = ShortWaits(threads)
    threading.Thread(
        target=_update_forever, args=(waits,), name="short waits", daemon=True
    ).start()
