"""Processor use: readings that grow with work, and when threads hold up each other."""

from __future__ import annotations

from toque.hardware.processor import ProcessorUse, contended


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
    assert not contended(threads=2, others=1.5, cores=4)
    assert contended(threads=4, others=0.5, cores=4)
    assert not contended(threads=1, others=9.0, cores=2)
