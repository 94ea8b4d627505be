"""Work of all ranks side by side, which may take longer than ranks wait for each other."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any, Final

from toque.training.distributed.collectives import Ranks

BEAT: Final = 1.0
"""Seconds between two signs of life, each a collective."""


def wait_for_all(ranks: Ranks, job: Future[Any]) -> None:
    """Return when the jobs of all ranks are done, whatever came of them.

    Raises:
        RankLost: another rank is gone.
    """
    while ranks.all_reduce_sum([job.done()])[0] < ranks.world_size:
        wait([job], timeout=BEAT)
