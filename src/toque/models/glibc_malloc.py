"""glibc malloc settings for CPU runs: what happens to the memory of a tensor that is freed."""

from __future__ import annotations

import ctypes
import platform
from typing import Final

# From glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_TOP_PAD: Final = -2
_M_MMAP_THRESHOLD: Final = -3
_M_MMAP_MAX: Final = -4
# glibc's defaults.
_TRIM_BYTES, _MMAP_BYTES, _MMAPS = 128 << 10, 128 << 10, 65536


def keep_freed_memory() -> bool:
    """Let glibc reuse freed tensors instead of handing them back to the system; True if it does.

    Large tensors are otherwise mapped anew, and the page faults of their first touch are a third of
    a small T5's step on a CPU. Results do not change. Other C libraries have no such settings.
    """
    return _set((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20))


def return_freed_memory() -> bool:
    """Let glibc hand the memory of freed tensors back, also what was kept before; True if it does.

    For runs divided to fit into memory: holes that gathered weights leave between the parts that
    stay would grow the process by about a model. A fixed threshold: glibc's own rises to 32 MiB.
    """
    taken = _set(
        (_M_MMAP_MAX, _MMAPS),
        (_M_MMAP_THRESHOLD, _MMAP_BYTES),
        (_M_TRIM_THRESHOLD, _TRIM_BYTES),
        (_M_TOP_PAD, _TRIM_BYTES),
    )
    if taken:
        ctypes.CDLL(None).malloc_trim(0)
    return taken


def _set(*settings: tuple[int, int]) -> bool:
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(taken)
