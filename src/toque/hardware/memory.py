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
"""Fraction of the free memory for training. The rest is for fragmentation and other programs.
"""
BESIDE_TRAINING: Final = 0.25
"""Fraction of the free memory for generation or an evaluation during training. A guess."""
_LIMITS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
"""Files with a container's limit and usage, in control groups of version 2 and version 1."""
_OUT_OF_MEMORY: Final = re.compile(
    r"can't allocate memory|not enough memory|_STATUS_ALLOC_FAILED"
    r"|(?:CUDA|HIP)(?: driver)? error: out of memory|Triton Error \[\w+\]: out of memory"
)
"""Messages of out-of-memory errors without a separate class in torch. NCCL's message is not
included, because ranks cannot recover from it.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """True for an out-of-memory error of a device or of the CPU allocator."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return _OUT_OF_MEMORY.search(str(error)) is not None


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU for this process, or of the machine or container.

    Memory that torch has reserved but does not use counts as free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        return free + reserved - torch.cuda.memory_allocated(device)

    memory = psutil.virtual_memory()
    free = memory.available
    for limit, usage in _LIMITS:
        try:
            left = int(Path(limit).read_text()) - int(Path(usage).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
        # Usage includes cached files, which are freed under pressure. Assume half of them.
        free = min(free, max(left, 0) + memory.cached // 2)
    return free


def describe_other_use(device: torch.device) -> str:
    """Describe how much of a GPU's memory other programs use. Return "" if it is little."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    # CUDA itself takes half a GiB.
    if others < max(1 << 30, total // 10):
        return ""
    return f"other programs use {in_words(others)} of its {in_words(total)}; nvidia-smi lists them"


def describe_free_memory(device: torch.device) -> str:
    """Describe a device's free memory and its other users: "10.2 GiB that cuda has free"."""
    text = f"{in_words(free_bytes(device))} that {device} has free"
    others = describe_other_use(device)
    return f"{text} ({others})" if others else text


def peak_bytes(work: Callable[[], object], device: torch.device) -> int | None:
    """Measure the peak bytes that `work` allocates on a GPU. None if memory runs out."""
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
    """Free unused memory, after memory ran out."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_words(n_bytes: float) -> str:
    """Format bytes in MiB or GiB.

    >>> in_words(3 * 2**30), in_words(5_000_000)
    ('3.0 GiB', '5 MiB')
    """
    if n_bytes >= 2**29:
        return f"{n_bytes / 2**30:.1f} GiB"
    return f"{n_bytes / 2**20:.0f} MiB"
