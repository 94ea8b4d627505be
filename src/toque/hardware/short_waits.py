"""Short waits: torch's threads hardly spin while other programs use their cores.

GNU's OpenMP reads its spin time only once. But if a process has more threads than cores, they spin
only 100 rounds. An idle team of threads has this effect at any time, and ending it restores the
spin time. Results do not change, because the computing teams stay the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from toque.hardware.processor import ProcessorUse, contended, usable_cores
from toque.hardware.thread_waits import chosen_by_user, waits_in

_LOOK_SECONDS: Final = 1.0
# Torch divides a sum of this size among its threads.
_PARALLEL_ELEMENTS: Final = 1 << 20


def teams_needed(threads: int, cores: int) -> int:
    """Number of idle teams of `threads` that, with a computing team, exceed the number of cores.

    >>> teams_needed(2, 2), teams_needed(8, 8), teams_needed(4, 16)
    (1, 1, 5)
    """
    return (cores - threads) // (threads - 1) + 1


class ShortWaits:
    """Idle teams that exist while other programs compute. `look` compares two readings."""

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

    def look(self) -> None:
        """Start or end the idle teams, depending on other programs since the last call."""
        use = self._read()
        others = use.others_since(self._before)
        self._before = use
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
    torch.ones(
        _PARALLEL_ELEMENTS
    ).sum()  # creates the team of this thread, which then sleeps
    end.wait()


def _watch(waits: ShortWaits) -> None:
    never = threading.Event()
    while not never.wait(_LOOK_SECONDS):
        waits.look()


_started: Final = threading.Event()


def shorten_waits_when_busy() -> None:
    """Start to watch the cores, once per process, unless the user set how threads wait."""
    threads = torch.get_num_threads()
    if _started.is_set() or threads < 2 or chosen_by_user(waits_in()):
        return
    _started.set()
    waits = ShortWaits(threads)
    threading.Thread(
        target=_watch, args=(waits,), name="short waits", daemon=True
    ).start()
