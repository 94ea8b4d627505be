"""Freed memory is kept, so that a new tensor costs no page faults, or handed back, as asked."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    from toque.models.glibc_malloc import keep_freed_memory
    if not keep_freed_memory():
        print(-1); raise SystemExit
for _ in range(8):  # an aligned tensor seldom fits the first hole left by another
    torch.ones(16 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.ones(16 << 20)  # 64 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def test_freed_tensors_are_reused() -> None:
    kept = faults("kept")
    if kept < 0:
        pytest.skip("this C library has no mallopt")
    assert kept * 3 < faults("plain")


RETURNED = """
import psutil
import torch
from toque.models.glibc_malloc import keep_freed_memory, return_freed_memory
torch.set_num_threads(1)
keep_freed_memory()
whole = [torch.ones(1 << 20) for _ in range(32)]  # 4 MiB each
before = psutil.Process().memory_info().rss
whole.clear()
if not return_freed_memory():
    print(-1); raise SystemExit
print(before - psutil.Process().memory_info().rss)
"""


def test_what_was_kept_goes_back_when_asked() -> None:
    command = [sys.executable, "-c", RETURNED]
    returned = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    if returned == -1:
        pytest.skip("this C library has no mallopt")
    assert returned > 0.9 * 32 * (4 << 20)
