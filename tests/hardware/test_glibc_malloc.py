"""Freed memory is kept, so that a new tensor costs no page faults, or handed back, as asked."""

import pytest

from fixtures.processes import python

SCRIPT = """
import resource
import psutil
import torch
from toque.hardware.glibc_malloc import keep_freed_memory, return_freed_memory

def faults():
    for _ in range(8):  # an aligned tensor seldom fits the first hole left by another
        torch.ones(16 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(16 << 20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
plain, taken, kept = faults(), keep_freed_memory(), faults()
whole = [torch.ones(1 << 20) for _ in range(32)]  # 4 MiB each
before = psutil.Process().memory_info().rss
whole.clear()
taken &= return_freed_memory()
print(int(taken), plain, kept, before - psutil.Process().memory_info().rss)
"""


def test_freed_tensors_are_reused_and_go_back_when_asked() -> None:
    taken, plain, kept, returned = map(int, python("-c", SCRIPT).stdout.split())
    if not taken:
        pytest.skip("this C library has no mallopt")
    assert kept * 3 < plain
    assert returned > 0.9 * 32 * (4 << 20)
