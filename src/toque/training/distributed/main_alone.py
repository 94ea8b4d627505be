"""Work of rank 0 alone, which may take longer than ranks wait for each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from toque.errors import RankLost
from toque.training.distributed.collectives import Ranks

BEAT: Final = 10.0
"""Seconds between two signs of life of rank 0."""


def while_others_wait(ranks: Ranks, work: Callable[[], None], *, beat: float = BEAT) -> None:
    """Do `work` on rank 0; the others return when it is done.

    Args:
        ranks: the processes that share the run.
        work: called on rank 0 alone, in the thread that calls this.
        beat: seconds between two signs of life, each a collective that the others take part in.

    Raises:
        RankLost: another rank is gone; also whatever `work` raises.
    """
    if not ranks.is_main:
        while not ranks.broadcast():
            pass
        return
    done, lost = threading.Event(), list[RankLost]()

    def live() -> None:
        try:
            while ranks.is_distributed and not done.wait(beat):
                ranks.broadcast(False)
        except RankLost as error:
            lost.append(error)

    signs = threading.Thread(target=live, name="toque-alive", daemon=True)
    if ranks.is_distributed:
        signs.start()
    try:
        work()
    finally:
        done.set()
        if ranks.is_distributed:
            signs.join()
    if lost:
        raise lost[0]
    ranks.broadcast(True)
