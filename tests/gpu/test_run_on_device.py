"""Whole runs: continued to the bit, without waiting, in 16 bits, compiled, out of memory."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from toque.models.forward.loss import loss_sum
from toque.training.runtime import Runtime
from toque.units import Cursor

FAMILIES = ["gpt2", "t5"]
"""Without and with a bias."""


def weights(trainer):
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_continues_to_the_same_bits(device, run, tmp_path, family):
    precision = "bf16" if device.type == "cuda" else "float32"
    whole, seen = run(family, folder=tmp_path / "whole", precision=precision)
    whole.fit()
    first, before = run(family, steps=3, precision=precision)
    first.fit()
    second, after = run(family, precision=precision)
    assert second.progress.step == 3
    second.fit()
    assert before.losses + after.losses == seen.losses
    mine, true = weights(second), weights(whole)
    assert all(torch.equal(mine[name], true[name]) for name in true)


@contextmanager
def waiting_is_an_error(device):
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("attention", ["auto", "dense"])
@pytest.mark.parametrize("family", ["gpt2", "t5", "llama", "neox"])
def test_no_update_waits_for_the_device(device, run, family, attention):
    precision = "bf16" if device.type == "cuda" else "float32"
    trainer, seen = run(
        family, precision=precision, attention=attention, save_every=None
    )
    with trainer.prefetch(trainer.batches, Cursor()) as ahead:
        for number in range(5):
            planned, batch = ahead.next()
            if number < 3:  # kernels are chosen and compiled
                info = trainer.step(planned, batch)
            else:
                with waiting_is_an_error(device):
                    info = trainer.step(planned, batch)
            trainer.progress = info.progress
            seen.on_step(info)
    assert len(set(seen.losses)) == 5
    assert all(map(math.isfinite, seen.losses))


def test_fp16_skips_an_overflowing_update_and_halves_its_scale(device, run):
    """On a CPU in float32, whose numbers the scale overflows as well."""
    half = device.type == "cuda"
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20 if half else 2.0**127)
    runtime = Runtime(device, "fp16" if half else "float32", scaler=scaler)
    trainer, _ = run("gpt2", runtime=runtime, steps=12, save_every=None, dropout=0.0)
    before = weights(trainer)
    planned = trainer.batches.at(Cursor())
    trainer.progress = trainer.step(planned).progress
    assert all(torch.equal(before[n], w) for n, w in weights(trainer).items())
    halved = scaler.get_scale()
    assert halved == (2.0**19 if half else 2.0**126)
    trainer.fit()
    assert trainer.progress.step == 12
    assert scaler.get_scale() < halved or not half
    assert any(not torch.equal(before[n], w) for n, w in weights(trainer).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_blocks_compute_the_same_and_are_compiled_once(device, run, family):
    if device.type == "cpu":
        pytest.skip("`train.compile` has tests of its own on a CPU")
    eager, seen = run(family, precision="float32", dropout=0.0, save_every=None)
    for number, (trainer, one) in enumerate(
        [
            (eager, seen),
            run(
                family, precision="float32", dropout=0.0, save_every=None, compiled=True
            ),
        ]
    ):
        with trainer.prefetch(trainer.batches, Cursor()) as ahead:
            for step in range(6):
                planned, batch = ahead.next()
                late = number == 1 and step >= 4
                with torch.compiler.set_stance(
                    "fail_on_recompile" if late else "default"
                ):
                    info = trainer.step(planned, batch)
                trainer.progress = info.progress
                one.on_step(info)
        if number == 0:
            expected = one.losses
    assert one.losses == pytest.approx(expected, rel=1e-3)


def test_out_of_memory_is_computed_again_with_fewer_rows(device, run, tmp_path):
    """A real one on a GPU: the forward asks for what the card has not."""

    def greedy(model, batch):
        if batch.n_rows > 2:
            if device.type == "cpu":
                raise torch.OutOfMemoryError("the CPU variant of running out of memory")
            whole = torch.cuda.get_device_properties(device).total_memory
            torch.empty(whole, dtype=torch.uint8, device=device)
        return loss_sum(model, batch)

    how = {"precision": "float32", "dropout": 0.0, "save_every": None, "steps": 4}
    small, expected = run(
        "gpt2", folder=tmp_path / "small", rows=2, loss_fn=loss_sum, **how
    )
    small.fit()
    trainer, seen = run("gpt2", rows=5, loss_fn=greedy, **how)
    trainer.fit()
    assert seen.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [warning for warning in seen.warnings if "5 rows per micro-batch" in warning]
    assert trainer.oom_fallback.rows_at(3) == 2


def test_the_prefetched_batch_is_the_planned_one(device, run):
    trainer, _ = run("gpt2", precision="auto")
    with trainer.prefetch(trainer.batches, Cursor()) as ahead:
        for _ in range(4):
            planned, batch = ahead.next()
            assert batch.labels.device.type == device.type
            for name, tensor in planned.batch.tensors().items():
                assert torch.equal(batch.tensors()[name].cpu(), tensor)
