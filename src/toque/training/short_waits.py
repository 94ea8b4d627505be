"""Short waits and fewer cores: how threads live beside other programs, switched at any time.

How long libgomp's threads spin is read from the environment when torch is loaded, once. But with
more OpenMP threads than cores they spin 100 rounds in place of 300,000 (the manual of GNU's
libgomp, GOMP_SPINCOUNT), and that may change at any time: every thread that has computed something
in parallel keeps a team of threads of its own until it ends. So a few threads that hold a team and
do nothing turn spinning off, and their end turns it on again. Another OpenMP takes no notice.

A thread that has lost its core to another program also holds up all that wait for it. Two to a core
that others leave to them, threads wait for nobody but each other. How threads wait and where they
run changes no number; how many compute would, and stays.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from toque.training.processor_use import WAIT_VARIABLES, contended, others_now, usable_cores

_PARALLEL_ELEMENTS: Final = 1 << 20
"""Of a sum that torch shares among its threads; from 32,768 it does."""
_TASKS: Final = "/proc/self/task"


@dataclass
class ShortWaits:
    """A switch for how torch's threads wait in this process.

    Args:
        threads: of torch.
        cores: that this process may use.
    """

    threads: int
    cores: int
    _end: threading.Event = field(default_factory=threading.Event)
    _holders: list[threading.Thread] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether threads sleep."""
        return bool(self._holders)

    @property
    def n_holders(self) -> int:
        """Teams besides the computing one until there are more threads than cores.

        >>> ShortWaits(threads=2, cores=2).n_holders, ShortWaits(threads=3, cores=8).n_holders
        (1, 3)
        """
        if self.threads < 2:
            return 0  # nobody to wait for
        return max(0, (self.cores - self.threads) // (self.threads - 1) + 1)

    def on(self) -> None:
        """Have threads sleep while they wait."""
        if self.is_on:
            return
        self._end = threading.Event()
        for _ in range(self.n_holders):
            has_team = threading.Event()
            holder = threading.Thread(
                target=_hold, args=(has_team, self._end), name="short waits", daemon=True
            )
            holder.start()
            has_team.wait()
            self._holders.append(holder)

    def off(self) -> None:
        """Have threads spin again, as they did."""
        self._end.set()
        for holder in self._holders:
            holder.join()
        self._holders.clear()


@dataclass
class FewerCores:
    """A switch for whether this process's threads keep to half as many cores as torch has threads.

    Which cores is drawn, or two runs on one machine would take the same ones.

    Args:
        threads: of torch.
        cores: that this process may use.
    """

    threads: int
    cores: Sequence[int]
    kept: frozenset[int] | None = None
    """The cores while it is on."""

    @property
    def n_left(self) -> int:
        """Cores that others would have to themselves; 0 where this cannot be done.

        >>> FewerCores(threads=2, cores=[0, 1]).n_left, FewerCores(threads=9, cores=[0, 1]).n_left
        (1, 0)
        """
        if self.threads < 2 or not hasattr(os, "sched_setaffinity"):
            return 0
        return max(0, len(self.cores) - self._n_kept)

    @property
    def _n_kept(self) -> int:
        return (self.threads + 1) // 2

    def on(self) -> None:
        """Keep to some cores; threads that begin meanwhile do, too."""
        if self.kept is None and self.n_left:
            self.kept = frozenset(random.SystemRandom().sample(self.cores, self._n_kept))
            _place(self.kept)

    def off(self) -> None:
        """Run anywhere again."""
        if self.kept is not None:
            self.kept = None
            _place(self.cores)


@contextmanager
def sleeping_beside_others(
    environment: Mapping[str, str] = os.environ, *, look: Callable[[], float] | None = None
) -> Iterator[ShortWaits]:
    """Threads sleep while they wait, if others keep cores busy now: as a run's updates will.

    What is measured of a run while they spin is many times too slow: its updates, its peak.
    """
    threads, cores = torch.get_num_threads(), len(usable_cores())
    waits = ShortWaits(threads, cores)
    if threads > 1 and not any(name in environment for name in WAIT_VARIABLES):
        others = (look or others_now)()
        if contended(threads=threads, others=others, cores=cores):
            waits.on()
    try:
        yield waits
    finally:
        waits.off()


def _place(cores: Iterable[int]) -> None:
    """Let all threads of this process run on these cores."""
    for thread in Path(_TASKS).iterdir():
        with suppress(OSError):  # a thread may end meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def _hold(has_team: threading.Event, end: threading.Event) -> None:
    torch.ones(_PARALLEL_ELEMENTS).sum()
    has_team.set()
    end.wait()
