"""Part clock: parts add up to the time that passed, whatever was compiled meanwhile."""

from __future__ import annotations

from toque.training.phases import PartClock


def test_compiling_is_taken_out_of_the_part_that_needed_it():
    times = iter([0.0, 5.0, 12.0, 13.0])
    compiled = iter([3.0, 4.0, 0.0])
    clock = PartClock(now=lambda: next(times), compiling=lambda: next(compiled))
    clock.restart()  # what was compiled before does not count
    clock.lap("forward_backward")
    clock.lap("optimizer")
    assert clock.taken() == {"forward_backward": 3.0, "compiling": 4.0, "optimizer": 1.0}
