"""A run continued from any checkpoint is the run that was never stopped, to the last bit."""

import shutil

import pytest
import torch

from fixtures.damage import flip
from toque.errors import CheckpointError
from toque.runs.history import read_metrics
from toque.training.observers.metrics_log import MetricsLog
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.stopping import Patience
from toque.units import Duration

STEPS = 18  # the epochs end after updates 7 and 14


def noisy_evaluator(model):
    """Leaves the model in evaluation mode and random numbers behind, as careless ones do."""
    model.eval()
    return {"loss": float(torch.rand(()))}


def whole_run(make_run, **options):
    # In one process the first float32 run may differ in bits from later ones: some matrix
    # libraries choose their kernels on first use. A discarded first run settles the choice.
    make_run(folder=make_run.folder / "first", steps=3, **options).trainer.fit()
    reference = make_run(folder=make_run.folder / "whole", steps=STEPS, **options)
    reference.trainer.fit()
    return reference


def continued(make_run, at, **options):
    """A run in a folder of its own that holds only the whole run's checkpoint of update `at`."""
    folder = make_run.folder / f"from-{at}"
    name = f"checkpoints/step-{at:08d}"
    shutil.copytree(make_run.folder / "whole" / name, folder / name)
    return make_run(folder=folder, steps=STEPS, save_every=None, **options)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_resumed_from_every_step_the_losses_and_weights_are_the_same(
    make_run, precision
):
    reference = whole_run(make_run, precision=precision)
    assert len(reference.losses) == STEPS
    for at in range(1, STEPS):
        run = continued(make_run, at, precision=precision)
        run.trainer.fit()
        assert run.losses == reference.losses[at:], f"from step {at}"
        for name, weight in run.weights().items():
            assert torch.equal(weight, reference.weights()[name]), (
                f"{name} from step {at}"
            )


def test_noise_and_restarts_resume_to_the_bit(make_run):
    methods = {
        "schedule": "cosine_restarts",
        "noise": GradientNoise(eta=0.001, gamma=0.55, seed=17),
        "evaluate_every": "5 steps",
    }
    reference = whole_run(make_run, **methods)
    for at in (1, 4, 5, 11, 17):
        run = continued(make_run, at, **methods)
        run.trainer.fit()
        assert run.losses == reference.losses[at:], f"from step {at}"
        later = [e for e in reference.recorder.evaluations if e[0] > at]
        assert run.recorder.evaluations == later


def test_noise_does_not_depend_on_micro_batches(make_run):
    noise = GradientNoise(eta=0.001, gamma=0.55, seed=17)
    runs = [
        make_run(
            folder=make_run.folder / str(rows),
            micro_batch_rows=rows,
            dropout=0.0,
            noise=noise,
        )
        for rows in (1, 4)
    ]
    for run in runs:
        run.trainer.fit()
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-4)


def test_the_seed_decides_and_evaluating_after_every_step_changes_no_loss(make_run):
    plain = whole_run(make_run)
    run = continued(make_run, 9)
    run.trainer.seed += 1
    run.trainer.fit()
    assert run.losses != plain.losses[9:]
    with pytest.raises(CheckpointError, match=r"embed\.weight is unknown to the model"):
        continued(make_run, 4, freeze=("embed.weight",))
    folder = make_run.folder / "evaluated"
    run = make_run(folder=folder, evaluate_every="1 steps", evaluator=noisy_evaluator)
    run.trainer.fit()
    assert len(run.recorder.evaluations) == STEPS
    assert run.losses == plain.losses


def test_a_finished_run_continued_does_nothing_and_ends_well(make_run):
    make_run(steps=5).trainer.fit()
    before = sorted(p.name for p in make_run.folder.rglob("*"))
    again = make_run(steps=5)
    end = again.trainer.fit()
    assert again.recorder.events == ["start", "end finished"]
    assert (end.reason, end.progress.step) == ("finished", 5)
    assert sorted(p.name for p in make_run.folder.rglob("*")) == before


def test_frozen_weights_stay_out_and_the_run_still_resumes_exactly(make_run):
    frozen = ("embed.weight", "mix.weight_ih_l0")
    reference = whole_run(make_run, freeze=frozen)
    run = continued(make_run, 8, freeze=frozen)
    newest = run.trainer.checkpoints.newest_valid()
    held = newest.tensors("model")
    assert "embed.weight" not in held
    assert {"norm.weight", "scale"} <= held.keys()
    run.trainer.fit()
    assert run.losses == reference.losses[8:]


def test_early_stopping_keeps_its_count_through_a_resume(make_run):
    def rising(_model):
        rising.calls += 1
        return {"loss": float(rising.calls)}

    rising.calls = 0
    options = {"evaluate_every": "2 steps", "evaluator": rising}
    first = make_run(steps=4, callbacks=(Patience(patience=4),), **options)
    assert (
        first.trainer.fit().reason == "finished"
    )  # evaluated at 2 and 4: one without a fall
    second = make_run(steps=STEPS, callbacks=(Patience(patience=4),), **options)
    end = second.trainer.fit()
    assert (end.reason, end.progress.step) == ("early_stopping", 10)
    assert second.recorder.events[-3:] == [
        "evaluate 10",
        "save 10",
        "end early_stopping",
    ]
    third = make_run(steps=STEPS, callbacks=(Patience(patience=4),), **options)
    assert third.trainer.fit().reason == "early_stopping"
    assert third.losses == []
    patient = make_run(steps=12, callbacks=(Patience(patience=40),), **options)
    assert patient.trainer.fit().progress.step == 12


def test_sums_in_the_metrics_are_totals_over_a_run_killed_between_saves(make_run):
    path = make_run.folder / "metrics.jsonl"

    def log():
        return MetricsLog(path, log_every=Duration(4, "steps"))

    class PowerCutError(Exception):
        pass

    def until_13(model, batch):
        if run.trainer.progress.step == 13:
            raise PowerCutError
        return loss_fn(model, batch)

    run = make_run(save_every="5 steps", callbacks=(log(),))
    loss_fn, run.trainer.loss_fn = run.trainer.loss_fn, until_13
    with pytest.raises(PowerCutError):
        run.trainer.fit()
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # half a line, as a kill leaves it
    again = make_run(save_every="5 steps", callbacks=(log(),))
    assert again.trainer.progress.step == 10
    again.trainer.fit()

    events = read_metrics(path)
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 4, 5, 8, 10, 12, 15, 16, 18]
    total = again.trainer.progress
    assert sum(e["tokens"] for e in steps) == total.tokens
    assert sum(e["target_tokens"] for e in steps) == total.target_tokens
    assert sum(e["seconds"] for e in steps) == pytest.approx(total.seconds)
    assert [e["step"] for e in events if e["event"] == "save"] == [5, 10, 15, 18]


def test_another_thread_count_or_processor_is_said(make_run, monkeypatch):
    make_run(steps=3).trainer.fit()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "ABACUS")
    torch.set_num_threads(2)
    try:
        run = make_run(steps=3)
    finally:
        torch.set_num_threads(1)
    notes = " ".join(run.trainer.notes)
    assert "the last bits may differ" in notes
    assert "threads: 1 -> 2" in notes
    assert "-> ABACUS" in notes


def test_a_damaged_newest_checkpoint_is_skipped_and_said(make_run):
    reference = whole_run(make_run)
    folder = make_run.folder / "whole"
    flip(folder / "checkpoints/step-00000018/model.safetensors", at=-3)
    run = make_run(folder=folder, steps=STEPS)
    assert run.trainer.progress.step == 17
    assert any("step-00000018" in n and "damaged" in n for n in run.trainer.notes)
    run.trainer.fit()
    assert run.losses == reference.losses[17:]
    again = make_run(folder=folder, steps=STEPS)
    assert again.trainer.progress.step == 18
