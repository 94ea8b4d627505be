"""Work of all ranks side by side, which may take longer than ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final

from toque.errors import CheckpointError
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


def do_all(ranks: Ranks, work: Callable[[], None]) -> None:
    """Do `work` on every rank.

    Raises:
        CheckpointError: on every rank, when that of one raised it, or an OSError; also RankLost.
    """

    def attempt() -> str:
        try:
            work()
        except OSError as error:
            return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
        except CheckpointError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(1, "toque-side") as pool:
        job = pool.submit(attempt)
        wait_for_all(ranks, job)
    faults: list[str] = ranks.all_gather(job.result())
    said = [f"Rank {rank}: {why}" for rank, why in enumerate(faults) if why]
    if said:
        raise CheckpointError(" ".join(said))
