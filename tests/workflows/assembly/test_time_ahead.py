"""Time ahead of a run: what a few tokens say of whole texts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import toque
from toque.batch import Batch
from toque.cooking.cookbook.generate import write_cookbook
from toque.training.autotune.micro_batch import Probe
from toque.training.processor_use import usable_cores
from toque.workflows.assembly.timing.ahead import seconds_of_texts


def machine(*, loading: float, prompts: float, token: float) -> Callable[[int], float]:
    """Seconds of writing: the first time loads kernels, and every time reads the prompts."""
    calls: list[int] = []

    def timed(tokens: int) -> float:
        calls.append(tokens)
        return prompts + tokens * token + (loading if len(calls) == 1 else 0.0)

    return timed


@pytest.mark.parametrize(
    ("loading", "prompts", "token"),
    [(30.0, 1.1, 0.01), (3.0, 4.0, 0.02), (0.0, 0.0, 0.5), (9.0, 0.001, 0.001)],
)
def test_loading_and_reading_prompts_are_not_taken_for_tokens(
    loading: float, prompts: float, token: float
) -> None:
    """A text of 512 tokens was foreseen by two of the first: 20 to 60 times too long."""
    told = seconds_of_texts(machine(loading=loading, prompts=prompts, token=token), 512)
    assert told == pytest.approx(prompts + 512 * token, rel=0.5)
    disturbed = seconds_of_texts(lambda tokens: 2.0 if tokens < 10 else 1.0, 512)
    assert disturbed == pytest.approx(2.0 + 510 * 0.1)


@pytest.mark.skipif(len(usable_cores()) < 2, reason="one core leaves nobody to wait for")
def test_what_is_measured_beside_others_is_measured_as_the_run_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads spun while updates were timed and slept while they ran: 3:15:33 was told of 4:34."""
    monkeypatch.setattr("toque.training.short_waits.others_now", lambda: 99.0)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    slept: list[bool] = []
    seconds_of = Probe.seconds_of

    def noted(probe: Probe, batch: Batch) -> float:
        slept.append(any(thread.name == "short waits" for thread in threading.enumerate()))
        return seconds_of(probe, batch)

    monkeypatch.setattr(Probe, "seconds_of", noted)
    write_cookbook(tmp_path / "c.jsonl", n=30, seed=3)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        toque.train({
            "run_dir": str(tmp_path / "run"),
            "model": {"family": "gpt2", "tokenizer": "trained:512",
                      "shape": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512}},
            "data": {"sources": [{"path": str(tmp_path / "c.jsonl")}],
                     "store": str(tmp_path / "store")},
            "train": {"stop_after": "1 steps", "batch": "1024 tokens"},
            "evaluation": {"max_examples": 2, "generate": 0},
        })  # fmt: skip
    finally:
        torch.set_num_threads(before)
    assert slept
    assert all(slept)
    assert not any(thread.name == "short waits" for thread in threading.enumerate())
