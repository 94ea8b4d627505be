import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from toque.batch import IGNORE
from toque.errors import CheckpointError, DataError, NonFiniteError
from toque.training.callbacks import Callback, Requests
from toque.training.checkpoint.store import CheckpointStore
from toque.training.stopping import INTERRUPTED, TAKEN_OVER
from toque.units import Cursor


class AskAt(Callback):
    def __init__(self, step, request):
        self.step, self.request = step, request

    def on_step(self, info):
        return self.request if info.progress.step == self.step else None


def textbook_losses(stream, model, steps):
    """Whole batches, their mean loss, torch's own clipping and unfused AdamW."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": 0.01},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.0, fused=False)
    cursor, losses = Cursor(), []
    for step in range(steps):
        planned = stream.at(cursor)
        cursor = planned.cursor
        logits = model(planned.batch.tokens).flatten(0, 1)
        loss = F.cross_entropy(
            logits, planned.batch.labels.flatten(), ignore_index=IGNORE
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = max(0, step - 3) / (steps - 3)
        for group in optimizer.param_groups:
            group["lr"] = (
                min(1.0, (step + 1) / 3) * 1e-2 * 0.5 * (1 + math.cos(math.pi * done))
            )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("micro_batch_rows", [1, 2, 3, 4])
def test_every_micro_batch_size_gives_the_textbook_run(
    make_run, row_stream, tiny_model, micro_batch_rows
):
    tiny_model.dropout.p = 0.0
    expected = textbook_losses(row_stream, tiny_model, 18)
    run = make_run(dropout=0.0, micro_batch_rows=micro_batch_rows, save_every=None)
    run.trainer.fit()
    assert run.losses == pytest.approx(expected, rel=1e-4)


def test_evaluate_then_save_then_stop_and_the_last_step_always_does_both(make_run):
    run = make_run(steps=5, evaluate_every="2 steps", save_every="4 steps")
    run.trainer.fit()
    assert run.recorder.events == [
        "start",
        "step 1",
        *("step 2", "evaluate 2"),
        "step 3",
        *("step 4", "evaluate 4", "save 4"),
        *("step 5", "evaluate 5", "save 5"),
        "end finished",
    ]


def test_progress_counts_what_was_trained_on(make_run, row_stream):
    run = make_run(steps=9, save_every=None)
    progress = run.trainer.fit().progress
    cursor, planned = Cursor(), []
    for _ in range(9):
        planned.append(row_stream.at(cursor))
        cursor = planned[-1].cursor
    assert progress.step == 9
    assert progress.epoch == planned[-1].epoch == 1 + 8 / 26
    assert progress.examples == 26 + 8
    assert progress.tokens == sum(p.n_tokens for p in planned)
    assert progress.target_tokens == sum(p.n_targets for p in planned)
    assert progress.seconds == pytest.approx(sum(i.seconds for i in run.recorder.steps))
    assert run.trainer.cursor == cursor


def test_durations_in_other_units_end_the_run(make_run):
    run = make_run(stop_after="2 epochs", evaluate_every="50 %", save_every=None)
    assert run.trainer.fit().progress.step == 14
    assert [at for at, _ in run.recorder.evaluations] == [7, 14]
    run = make_run(
        folder=make_run.folder / "m", stop_after="0.0005 minutes", save_every=None
    )
    assert run.trainer.fit().progress.seconds >= 0.03


def test_an_observer_may_ask_for_everything(make_run):
    asks = (
        AskAt(2, Requests(evaluate=True)),
        AskAt(3, Requests(save=True)),
        AskAt(5, Requests(stop=True, reason="enough")),
    )
    run = make_run(save_every=None, callbacks=asks)
    assert run.trainer.fit().reason == "enough"
    assert run.recorder.events == [
        "start",
        "step 1",
        *("step 2", "evaluate 2"),
        *("step 3", "save 3"),
        "step 4",
        *("step 5", "evaluate 5", "save 5"),
        "end enough",
    ]


def test_an_interruption_saves_first_and_evaluates_when_continued(make_run):
    interrupt = AskAt(4, Requests(stop=True, save=True, reason=INTERRUPTED))
    run = make_run(
        steps=6, evaluate_every="2 steps", save_every=None, callbacks=(interrupt,)
    )
    assert run.trainer.fit().reason == "interrupted"
    assert run.recorder.events[-3:] == ["step 4", "save 4", "end interrupted"]
    whole = make_run(
        folder=make_run.folder / "whole", steps=6, evaluate_every="2 steps"
    )
    whole.trainer.fit()
    again = make_run(steps=6, evaluate_every="2 steps", save_every=None)
    again.trainer.fit()
    assert again.recorder.events[:3] == ["start", "evaluate 4", "step 5"]
    evaluations = run.recorder.evaluations + again.recorder.evaluations
    assert evaluations == whole.recorder.evaluations
    assert run.losses + again.losses == whole.losses


def test_a_run_that_was_taken_over_saves_and_leaves_its_evaluation_to_the_other(
    make_run,
):
    taken = AskAt(4, Requests(stop=True, reason=TAKEN_OVER))
    run = make_run(steps=4, save_every=None, callbacks=(taken,))
    assert run.trainer.fit().reason == "taken_over"
    assert run.recorder.events[-3:] == ["step 4", "save 4", "end taken_over"]


class AskFirst(Callback):
    def on_fit_start(self, start):
        return Requests(evaluate=True, save=True)


def test_what_is_asked_for_where_a_session_begins_is_done(make_run):
    run = make_run(steps=4, save_every=None, callbacks=(AskFirst(),))
    run.trainer.fit()
    assert run.recorder.events[:4] == ["start", "evaluate 0", "save 0", "step 1"]
    plain = make_run(folder=make_run.folder / "plain", steps=4, save_every=None)
    plain.trainer.fit()
    assert run.losses == plain.losses
    shutil.rmtree(make_run.folder / "checkpoints" / "step-00000004")
    again = make_run(steps=4, save_every=None)
    again.trainer.fit()
    assert again.recorder.events[:2] == ["start", "step 1"]
    assert again.losses == plain.losses


def test_a_save_that_an_owed_evaluation_leads_to_is_done(make_run):
    interrupt = AskAt(2, Requests(stop=True, save=True, reason=INTERRUPTED))
    run = {"steps": 4, "evaluate_every": "2 steps", "save_every": None}
    make_run(**run, callbacks=(interrupt,)).trainer.fit()

    class SaveThen(Callback):
        def on_evaluate(self, at, metrics):
            return Requests(save=True)

    again = make_run(**run, callbacks=(SaveThen(),))
    again.trainer.fit()
    assert again.recorder.events[:4] == ["start", "evaluate 2", "save 2", "step 3"]


def test_interrupted_at_the_last_step_the_owed_evaluation_is_all_that_is_left(make_run):
    interrupt = AskAt(4, Requests(stop=True, save=True, reason=INTERRUPTED))
    make_run(steps=4, callbacks=(interrupt,)).trainer.fit()
    again = make_run(steps=4)
    assert again.trainer.fit().reason == "finished"
    assert again.recorder.events == ["start", "evaluate 4", "save 4", "end finished"]
    third = make_run(steps=4)
    third.trainer.fit()
    assert third.recorder.events == ["start", "end finished"]


def poison(trainer, step):
    loss_fn = trainer.loss_fn

    def spoiled(model, batch):
        loss = loss_fn(model, batch)
        return loss * math.nan if trainer.progress.step == step else loss

    trainer.loss_fn = spoiled


def test_a_loss_that_is_no_number_stops_before_the_update(make_run):
    weights = []

    class Watch(Callback):
        def on_step(self, info):
            weights.append(run.weights())

    run = make_run(save_every="2 steps", callbacks=(Watch(),))
    poison(run.trainer, step=5)
    with pytest.raises(
        NonFiniteError, match=r"Step 5 has loss nan.*learning rate.*examples"
    ) as e:
        run.trainer.fit()
    assert e.value.exit_code == 5
    assert all(torch.equal(w, weights[-1][n]) for n, w in run.weights().items())
    record = json.loads((make_run.folder / "non_finite.json").read_text())
    assert (record["step"], record["loss"], len(record["example_ids"])) == (5, "nan", 4)
    assert run.recorder.events[-1] == "end non_finite"
    assert run.trainer.checkpoints.newest_valid().step == 4


def test_a_batch_without_targets_is_refused(make_run, row_stream):
    run = make_run()
    with pytest.raises(DataError, match="no target token"):
        run.trainer.step(replace(row_stream.at(Cursor()), loss_count=0))


class FullDiskAt:
    """A store's hook: the given save meets a full disk while writing."""

    def __init__(self, *saves):
        self.saves, self.count = saves, 0

    def __call__(self, stage):
        if stage == "mkdir":
            self.count += 1
        if stage == "write optimizer.safetensors" and self.count in self.saves:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("full_at", [2, 3])
def test_a_full_disk_warns_and_at_the_last_save_ends_the_run(make_run, full_at):
    store = CheckpointStore(
        make_run.folder / "checkpoints",
        keep_best=0,
        after=FullDiskAt(full_at),
        keep_last=1,
    )
    run = make_run(steps=6, save_every="2 steps", store=store)
    if full_at == 3:
        with pytest.raises(CheckpointError, match="Cannot save step 6"):
            run.trainer.fit()
        assert store.newest_valid().step == 4
        assert not list(store.folder.glob("temp-*"))
        return
    assert run.trainer.fit().reason == "finished"
    (warning,) = run.recorder.warnings
    assert "step 4" in warning
    assert "No space left" in warning
    assert [e for e in run.recorder.events if e.startswith("save")] == [
        "save 2",
        "save 6",
    ]


@pytest.mark.parametrize("background", [False, True])
def test_the_best_models_are_kept_apart_from_the_checkpoints(make_run, background):
    losses = iter([5.0, 3.0, 4.0, 2.0, 6.0, 7.0])
    run = make_run(
        steps=6,
        evaluate_every="1 steps",
        save_every=None,
        keep_best=2,
        evaluator=lambda _model: {"loss": next(losses)},
        background_saves=background,
    )
    end = run.trainer.fit()
    assert (end.best.step, end.best.loss) == (4, 2.0)
    store = run.trainer.checkpoints
    assert sorted(p.name for p in store.best_folder.glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    assert store.best().step == 4
    assert store.best().manifest.metrics == {"loss": 2.0}
    assert "optimizer.safetensors" not in [f.file for f in store.best().manifest.files]
