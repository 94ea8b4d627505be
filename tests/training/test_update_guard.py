import json
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fixtures.runs import Recorder
from toque.training.callbacks import Callbacks
from toque.training.nan_tracer import NonFiniteOrigin
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime
from toque.training.update_guard import SkipStep, UpdateGuard
from toque.units import Cursor, Progress

NAN = math.nan


class NoReading(TorchDispatchMode):
    """Fails when a tensor's value is read, which on CUDA waits for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a value was read"
        return func(*args, **(kwargs or {}))


def judged(guard, batch, *updates):
    """Whether each (loss, norm) is applied."""
    return [
        bool(
            guard.should_apply(step, 0.1, torch.tensor(loss), torch.tensor(norm), batch)
        )
        for step, (loss, norm) in enumerate(updates)
    ]


@pytest.fixture
def batch(row_stream):
    return row_stream.at(Cursor()).batch


@pytest.mark.parametrize("skip_step", [None, SkipStep(window=2)])
@pytest.mark.parametrize(
    ("loss", "gradient"), [(1.0, 1.0), (NAN, 1.0), (1.0, NAN), (1.0, math.inf)]
)
def test_nothing_is_read_between_backward_and_the_applied_update(
    tiny_model, batch, skip_step, loss, gradient
):
    optimizer = build_optimizer(tiny_model)
    for parameter in tiny_model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    before = [p.detach().clone() for p in tiny_model.parameters()]
    runtime = Runtime(torch.device("meta"))  # not the CPU, where reading costs nothing
    guard, loss = UpdateGuard(runtime, skip_step=skip_step), torch.tensor(loss)
    with NoReading():
        norm = runtime.clip_gradients(optimizer, 1.0)
        apply = guard.should_apply(0, 0.1, loss, norm, batch)
        runtime.optimizer_step(optimizer, lr=0.1, only_if=apply, step=0)
    kept = [
        torch.equal(p, b) for p, b in zip(tiny_model.parameters(), before, strict=True)
    ]
    assert set(kept) == {not math.isfinite(float(loss) * gradient)}


def test_off_the_first_update_that_is_not_finite_ends_the_run(batch, tmp_path):
    guard = UpdateGuard(Runtime(), run_folder=tmp_path)
    assert judged(guard, batch, (1.0, 1.0), (NAN, 1.0), (1.0, math.inf)) == [
        True,
        False,
        False,
    ]
    bad = guard.check(Progress(step=3))
    assert bad.step == 1
    error = guard.record_error(bad, NonFiniteOrigin("the output of x", (7,)))
    assert "First not finite: the output of x, in examples 7." in str(error)
    record = json.loads((tmp_path / "non_finite.json").read_text())
    assert (record["loss"], record["first_example_ids"]) == ("nan", [7])
    assert guard.check(Progress(step=3)) is None


def test_on_it_is_skipped_with_a_warning_until_the_weights_are_in_doubt(
    batch, tmp_path
):
    recorder = Recorder()
    skip_step = SkipStep(window=4, roll_back_after=2)
    guard = UpdateGuard(
        Runtime(), Callbacks([recorder]), skip_step, run_folder=tmp_path
    )
    assert judged(guard, batch, (1.0, 1.0), (NAN, 1.0), (1.0, math.inf)) == [
        True,
        False,
        False,
    ]
    assert guard.check(Progress(step=3)) is None
    assert [w.split(" is not")[0] for w in recorder.warnings] == [
        "update 1",
        "update 2",
    ]
    assert (guard.n_skipped, guard.should_roll_back) == (2, True)
    assert len((tmp_path / "skipped_updates.jsonl").read_text().splitlines()) == 2
    assert "continues with the weights of step 0 and" in guard.record_rollback(3, 0)
    assert not guard.should_roll_back


def test_with_a_loss_scaler_an_infinite_norm_is_ordinary(batch):
    runtime = Runtime(scaler=torch.amp.GradScaler("cpu"))
    for skip_step in (None, SkipStep(roll_back_after=1)):
        guard = UpdateGuard(runtime, skip_step=skip_step)
        assert judged(guard, batch, (1.0, math.inf)) == [False]
        assert guard.check(Progress(step=1)) is None
        assert (guard.n_skipped, guard.should_roll_back) == (0, False)
