"""Memory: free bytes of a device or container, peaks of work, and out-of-memory errors."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil
import torch

HEADROOM: Final = 0.9
"""Share of the free memory that training uses; fragments, and other programs, take some."""
BESIDE_TRAINING: Final = 0.25
"""Share of the free memory that writing texts or an evaluation may take; a guess."""
_LIMITS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""A container's limit and use, in control groups of version 2 and 1."""
_RAN_OUT: Final = re.compile(
    r"can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED"
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory|Triton Error \[\w+\]: out of memory"
)
"""Words where torch has no error of its own. Not NCCL's: ranks cannot begin again after it."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if `error` is an out-of-memory error of a device or of the CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _RAN_OUT.search(str(error)) is not None


def free_bytes(device: torch.device) -> int:
    """Bytes a process may still allocate on `device`; for "cpu", of the machine or container.

    Memory that torch holds but does not use counts as free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held
    free = psutil.virtual_memory().available
    for limit, used in _LIMITS:
        try:
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        # Cached files count as used there and are given back under pressure; guess: half of them.
        free = min(free, max(left, 0) + psutil.virtual_memory().cached // 2)
    return free


def held_by_others(device: torch.device) -> str:
    """Words about a GPU's memory that other programs hold, where that is much; "" elsewhere."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    held = total - free - torch.cuda.memory_reserved(device)
    if held < max(1 << 30, total // 10):  # CUDA itself takes half a GiB
        return ""
    return f"other programs hold {in_words(held)} of its {in_words(total)}; nvidia-smi lists them"


def free_in_words(device: torch.device) -> str:
    """A device's free memory, and who has the rest: "10.2 GiB that cuda has free"."""
    others = held_by_others(device)
    others = others and f" ({others})"
    return f"{in_words(free_bytes(device))} that {device} has free{others}"


def peak_of(work: Callable[[], object], device: torch.device) -> int | None:
    """Bytes of a GPU that `work` takes at most beside what is there; None if memory runs out."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        work()
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if not is_out_of_memory(error):
            raise
        return None
    return torch.cuda.max_memory_allocated(device) - before


def release_memory() -> None:
    """Give back what nothing uses any more, after memory ran out."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_words(n_bytes: float) -> str:
    """Bytes in MiB or GiB.

    >>> in_words(3 * 2**30), in_words(5_000_000)
    ('3.0 GiB', '5 MiB')
    """
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**29 else f"{n_bytes / 2**20:.0f} MiB"
