"""Slowness on purpose, for `robustness/slowed_runs.py`.

Python imports this when its folder is on PYTHONPATH, and SLOWED says what is to be slow.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from typing import Any

SECONDS = float(os.environ.get("SLOWED_SECONDS", "0.5"))
_MANY_ROWS = 8


def slow_reader() -> None:
    """Every update's rows arrive late, as from a network disk."""
    from toque.data.loader.collate import Layout

    own = Layout.batches

    def batches(self: Any, groups: Any, examples: Any = None) -> Any:
        time.sleep(SECONDS * len(groups))
        return own(self, groups, examples)

    Layout.batches = batches  # type: ignore[method-assign]


def slow_disk() -> None:
    """Whatever is made durable takes its time."""
    own = os.fsync

    def fsync(descriptor: Any) -> None:
        time.sleep(SECONDS)
        own(descriptor)

    os.fsync = fsync


def swapping() -> None:
    """Micro-batches of many rows read pages back from disk, as where memory runs out.

    A machine without swap kills instead; pages of a file that are dropped before they are read
    stand in for it.
    """
    from toque.training.trainer import Trainer

    file = tempfile.NamedTemporaryFile()  # noqa: SIM115 - lives as long as the run
    file.write(os.urandom(64 << 20))
    file.flush()
    os.fsync(file.fileno())
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    pages.madvise(mmap.MADV_RANDOM)
    own = Trainer.forward_backward

    def forward_backward(self: Any, micro_batches: Any, n_targets: int) -> Any:
        if any(rows.n_rows > _MANY_ROWS for rows in micro_batches):
            pages.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            until = time.monotonic() + 4 * SECONDS
            for at in range(0, len(pages), mmap.PAGESIZE):
                _ = pages[at]
                if time.monotonic() > until:
                    break
        return own(self, micro_batches, n_targets)

    Trainer.forward_backward = forward_backward  # type: ignore[method-assign]


KINDS = {"reader": slow_reader, "disk": slow_disk, "swap": swapping}

if os.environ.get("SLOWED") in KINDS:
    KINDS[os.environ["SLOWED"]]()
