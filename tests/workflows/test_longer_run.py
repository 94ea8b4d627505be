"""Lengths of runs: a short one, and one that goes on past the length it was begun with."""

import os
import signal
from pathlib import Path

import msgspec
import pytest

import toque
from fixtures.kitchens import Notices, tiny_config
from toque.config import load_config
from toque.config.new_length import can_change_length
from toque.errors import CheckpointError
from toque.storage.atomic import sha256_of
from toque.training.checkpoint.saved import read_manifest
from toque.units import Progress
from toque.workflows.results import TrainedRun

pytestmark = pytest.mark.usefixtures("shared_kitchen")


def configuration(run: str, **sections) -> toque.RunConfig:
    train = {
        "stop_after": "4 steps",
        "evaluate_every": "1 steps",
        "save_every": "2 steps",
    }
    base = tiny_config(run_dir=run, optim={"warmup": "2 steps"}, train=train)
    return toque.configure(base, **sections)


def to(steps: int) -> dict[str, str]:
    return {"stop_after": f"{steps} steps"}


def same(one: TrainedRun, other: TrainedRun) -> None:
    assert one.step == other.step
    name = f"checkpoints/step-{one.step:08d}/model.safetensors"
    assert sha256_of(one.folder / name) == sha256_of(other.folder / name)
    for name in ("model/model.safetensors", "evaluation.json"):
        assert sha256_of(one.folder / name) == sha256_of(other.folder / name)


def test_a_short_run_reaches_its_learning_rate():
    optim, train = {"warmup": "3 %"}, {"stop_after": "1 epochs"}
    run = toque.train(tiny_config(run_dir="short", optim=optim, train=train))
    assert run.step < 40
    assert max(step["lr"] for step in run.history if step["event"] == "step") > 0.99e-2


def test_a_constant_rate_goes_on_to_the_bits_of_a_run_that_was_longer_from_the_start():
    optim = {"schedule": "constant"}
    whole = toque.train(configuration("whole", optim=optim, train=to(8)))
    toque.train(configuration("longer", optim=optim))
    heard = Notices()
    longer = toque.train(
        configuration("longer", optim=optim, train=to(8)), reporter=heard
    )
    same(whole, longer)
    notice = (
        "this run was planned for 4 steps and is at step 4: it continues to 8 steps."
    )
    assert notice in heard.notices
    assert (
        load_config(longer.folder / "config.yaml").config.train.stop_after.amount == 8
    )


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "linear"])
def test_a_rate_that_had_fallen_rises_again_and_that_is_said(schedule):
    optim = {"schedule": schedule} | ({"cooldown": "50 %"} if schedule == "wsd" else {})
    name = f"run-{schedule}"
    toque.train(configuration(name, optim=optim))
    heard = Notices()
    longer = toque.train(configuration(name, optim=optim, train=to(8)), reporter=heard)
    assert (longer.step, longer.reason) == (8, "finished")
    (said,) = [text for text in heard.notices if "it continues to 8 steps" in text]
    assert f"optim.schedule={schedule}" in said
    rates = {e["step"]: e["lr"] for e in longer.history if e["event"] == "step"}
    whole = toque.train(configuration(f"{name}-whole", optim=optim, train=to(8)))
    afresh = {e["step"]: e["lr"] for e in whole.history if e["event"] == "step"}
    assert rates[5] > rates[4]
    assert [rates[n] for n in range(5, 9)] == [afresh[n] for n in range(5, 9)]


def test_a_longer_run_that_is_killed_goes_on_exactly():
    optim = {"schedule": "cosine"}
    runs = []
    for name, stop in (("left-alone", False), ("stopped", True)):
        toque.train(configuration(name, optim=optim))
        longer = configuration(name, optim=optim, train=to(9))
        if stop:

            class Stop:
                def on_step_end(self, run):
                    if run.step == 7:
                        os.kill(os.getpid(), signal.SIGTERM)

            assert toque.train(longer, callbacks=[Stop()]).interrupted
        runs.append(toque.train(longer))
    same(*runs)


def test_an_unfinished_run_of_a_falling_rate_keeps_its_length():
    class Stop:
        def on_step_end(self, run):
            if run.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    assert toque.train(configuration("unfinished"), callbacks=[Stop()]).interrupted
    with pytest.raises(CheckpointError, match=r"train.stop_after: 4 steps -> 8 steps"):
        toque.train(configuration("unfinished", train=to(8)))
    with pytest.raises(CheckpointError, match=r"optim.peak_lr"):
        toque.train(configuration("unfinished", train=to(8), optim={"peak_lr": 2e-2}))


def may_continue(at: Progress, old: str, new: str, **optim) -> bool:
    def config(length: str) -> toque.RunConfig:
        return toque.configure(
            optim={"warmup": "10 steps", **optim}, train={"stop_after": length}
        )

    return can_change_length(config(old), config(new), at)


@pytest.mark.parametrize(
    ("at", "old", "new", "optim", "may"),
    [
        (Progress(100), "100 steps", "200 steps", {"schedule": "cosine"}, True),
        (Progress(100, 2.0), "100 steps", "3 epochs", {"schedule": "cosine"}, True),
        (Progress(100), "100 steps", "90 steps", {"schedule": "constant"}, False),
        (Progress(100), "100 steps", "100 steps", {"schedule": "constant"}, False),
        (Progress(60), "100 steps", "200 steps", {"schedule": "cosine"}, False),
        (Progress(60), "100 steps", "80 steps", {"schedule": "constant"}, False),
        (Progress(60), "100 steps", "200 steps", {"schedule": "constant"}, True),
        (Progress(60), "100 steps", "200 steps", {"schedule": "inverse_sqrt"}, True),
        (Progress(60), "100 steps", "9 epochs", {"schedule": "constant"}, False),
        (
            Progress(60),
            "100 steps",
            "200 steps",
            {"schedule": "constant", "warmup": "5 %"},
            False,
        ),
        (Progress(60), "100 steps", "200 steps", {"schedule": "wsd"}, True),
        (Progress(90), "100 steps", "200 steps", {"schedule": "wsd"}, False),
        (Progress(100), "100 steps", "200 steps", {"schedule": "wsd"}, True),
    ],
)
def test_what_may_be_longer(at, old, new, optim, may):
    assert may_continue(at, old, new, **optim) == may


@pytest.mark.parametrize(
    ("old", "new", "reached", "may"),
    [
        ("30 seconds total", "60 seconds total", 30.0, True),
        ("30 seconds total", "2 minutes total", 30.0, True),
        ("30 seconds total", "50 steps", 30.0, True),
        (
            "30 seconds total",
            "60 seconds total",
            0.0,
            False,
        ),  # it has not come to its end
        ("60 seconds total", "50 seconds total", 60.0, False),
    ],
)
def test_a_length_of_the_whole_command_ends_where_its_limit_says(
    old, new, reached, may
):
    def config(length: str) -> toque.RunConfig:
        return toque.configure(
            optim={"schedule": "linear"}, train={"stop_after": length}
        )

    at = Progress(10, seconds=24.0)
    old_config, new_config = config(old), config(new)
    can_change = can_change_length(old_config, new_config, at, total_seconds=reached)
    assert can_change == may


def test_stages_of_a_curriculum_keep_their_length():
    stages = [{"from": "0 %", "max_difficulty": "easy"}, {"from": "50 %"}]

    def config(length: str) -> toque.RunConfig:
        return toque.configure(
            train={"stop_after": length}, curriculum={"stages": stages}
        )

    old, new = config("300 steps"), config("400 steps")
    assert not can_change_length(old, new, Progress(300))


def test_a_checkpoint_older_than_keyed_masks_continues_and_that_is_said_once():
    toque.train(configuration("older"))
    newest = Path("older/checkpoints/step-00000004")
    manifest = read_manifest(newest)
    versions = dict(manifest.versions)
    assert versions.pop("dropout masks") == "keyed"
    older = msgspec.structs.replace(manifest, versions=versions, self_sha256="")
    (newest / "manifest.json").write_bytes(older.to_json())

    heard = Notices()
    longer = toque.train(configuration("older", train=to(6)), reporter=heard)
    assert longer.step == 6
    (note,) = [text for text in heard.notices if "masks" in text]
    assert "dropout uses other masks after step 4 than before" in note
    assert note in (longer.folder / "training.log").read_text()

    heard = Notices()
    toque.train(configuration("older", train=to(7)), reporter=heard)
    assert not [text for text in heard.notices if "masks" in text]


def test_a_run_without_dropout_records_no_masks():
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    run = toque.train(configuration("undropped", model={"shape": off}))
    assert (
        "dropout masks"
        not in read_manifest(run.folder / "checkpoints/step-00000004").versions
    )
