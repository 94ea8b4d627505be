"""The machine: readings that grow with work, threads that hold up each other, free memory."""

from __future__ import annotations

import torch

from toque.hardware.memory import free_bytes, in_words, is_out_of_memory
from toque.hardware.processor import ProcessorUse, is_contended


def test_readings_grow_with_work() -> None:
    before = ProcessorUse.now()
    total = 0
    while ProcessorUse.now().own - before.own < 0.1:
        total += sum(range(1000))
    after = ProcessorUse.now()
    assert after.at > before.at
    assert after.busy >= before.busy
    assert after.others_since(before) >= 0.0


def test_spare_cores_are_no_contention() -> None:
    assert not is_contended(threads=2, others=1.5, cores=4)
    assert is_contended(threads=4, others=0.5, cores=4)
    assert not is_contended(threads=1, others=9.0, cores=2)


def test_memory_is_read_and_said() -> None:
    assert free_bytes(torch.device("cpu")) > 2**20
    assert (in_words(3 * 2**30), in_words(5_000_000)) == ("3.0 GiB", "5 MiB")
    assert not is_out_of_memory(ValueError("can't allocate memory"))
