"""Short waits: torch's threads sleep almost immediately while other programs use their cores.

GNU's OpenMP reads once how long threads spin. But its threads spin only a hundred rounds while the
process has more of them than cores. An idle team brings this about at any time, and its end undoes
it. No number changes: the teams that compute stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from toque.hardware.processor import ProcessorUse, contended, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in

_LOOK_SECONDS: Final = 1.0
_IN_PARALLEL: Final = 1 << 20  # elements of a sum that torch divides among its threads


def teams_needed(threads: int, cores: int) -> int:
    """Number of idle teams of `threads` that make more threads than `cores`, beside one team.

    >>> teams_needed(2, 2), teams_needed(8, 8), teams_needed(4, 16)
    (1, 1, 5)
    """
    return (cores - threads) // (threads - 1) + 1


class ShortWaits:
    """Idle teams that are there while other programs compute; `look` decides by two readings."""

    def __init__(self, threads: int, read: Callable[[], ProcessorUse] = ProcessorUse.now) -> None:
        self._threads, self._read = threads, read
        self._cores = len(usable_cores())
        self._before = read()
        self._end: threading.Event | None = None

    @property
    def are_short(self) -> bool:
        """True while the idle teams are there."""
        return self._end is not None

    def look(self) -> None:
        """Shorten the waits, or let threads spin again, by what others did since the last look."""
        use = self._read()
        others, self._before = use.others_since(self._before), use
        is_busy = contended(threads=self._threads, others=others, cores=self._cores)
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
    torch.ones(_IN_PARALLEL).sum()  # makes this thread's team, which then sleeps
    end.wait()


def _watch(waits: ShortWaits) -> None:
    never = threading.Event()
    while not never.wait(_LOOK_SECONDS):
        waits.look()


_started: Final = threading.Event()


def shorten_waits_when_busy() -> None:
    """Watch the cores from now on, once per process, unless the user chose how threads wait."""
    threads = torch.get_num_threads()
    if _started.is_set() or threads < 2 or chosen_by_user(waits_in()):
        return
    _started.set()
    waits = ShortWaits(threads)
    threading.Thread(target=_watch, args=(waits,), name="short waits", daemon=True).start()
