"""Processor use: readings that grow with work."""

from __future__ import annotations

from toque.hardware.processor import ProcessorUse


def test_readings_grow_with_work() -> None:
    before = ProcessorUse.now()
    total = 0
    while ProcessorUse.now().own - before.own < 0.1:
        total += sum(range(1000))
    after = ProcessorUse.now()
    assert after.at > before.at
    assert after.busy >= before.busy
    assert after.others_since(before) >= 0.0
