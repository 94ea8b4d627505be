"""Short waits: OpenMP's threads sleep almost at once instead of spinning, switched while they run.

How long libgomp's threads spin is read from the environment when torch is loaded, once. But with
more OpenMP threads than cores they spin 100 rounds in place of 300,000 (the manual of GNU's
libgomp, GOMP_SPINCOUNT), and that may change at any time: every thread that has computed something
in parallel keeps a team of threads of its own until it ends. So a few threads that hold a team and
do nothing turn spinning off, and their end turns it on again. How threads wait changes no number;
how many compute would, and stays. Another OpenMP takes no notice.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

import torch

_PARALLEL_ELEMENTS: Final = 1 << 20
"""Of a sum that torch shares among its threads; from 32,768 it does."""


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
            holder = threading.Thread(target=_hold, args=(has_team, self._end), daemon=True)
            holder.start()
            has_team.wait()
            self._holders.append(holder)

    def off(self) -> None:
        """Have threads spin again, as they did."""
        self._end.set()
        for holder in self._holders:
            holder.join()
        self._holders.clear()


def _hold(has_team: threading.Event, end: threading.Event) -> None:
    torch.ones(_PARALLEL_ELEMENTS).sum()
    has_team.set()
    end.wait()
