"""A run's folder is moved away while it trains: whatever is put in its place stays as it is."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.processes import python
from toque.errors import CheckpointError
from toque.runs.history import read_metrics
from toque.storage.atomic import sha256_of
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore, run_lock

OFTEN = (
    "train.save_every=1 step",
    "train.evaluate_every=2 steps",
    "train.keep_last=1",
    "evaluation.generate=2",
    "evaluation.texts=2",
)


def everything(folder: Path) -> dict[str, str]:
    """Every file and folder, with hashes and the times of their last changes."""
    return {
        str(path.relative_to(folder)): f"{sha256_of(path) if path.is_file() else ''} "
        f"{path.stat().st_mtime_ns}"
        for path in [folder, *sorted(folder.rglob("*"))]
    }


@pytest.mark.parametrize(
    "how",
    [
        "moved, and another put there",
        pytest.param("moved", marks=pytest.mark.slow),
        pytest.param("removed", marks=pytest.mark.slow),
    ],
)
def test_another_run_put_in_the_place_of_one_that_trains_stays_as_it_is(
    kitchen: Path, whole_run: Path, tmp_path: Path, how: str
) -> None:
    run, away = tmp_path / "run", tmp_path / "elsewhere" / "run"
    away.parent.mkdir()
    words = ["train", str(kitchen / "run.yaml"), f"run_dir={run}", *OFTEN]
    words += ["train.stop_after=100000 steps"]
    child = subprocess.Popen(
        [sys.executable, "-m", "toque", *words], stderr=subprocess.PIPE, text=True
    )
    while not list(run.glob("checkpoints/step-0000000[3-9]/manifest.json")):
        assert child.poll() is None
    child.send_signal(
        signal.SIGSTOP
    )  # or it could save while its folder is being removed
    run.rename(away)
    if how == "removed":
        shutil.rmtree(away)
    before = {}
    if "another" in how:
        shutil.copytree(whole_run, tmp_path / "copy")
        before = everything(tmp_path / "copy")
        (tmp_path / "copy").rename(run)
    child.send_signal(signal.SIGCONT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == CheckpointError.exit_code, said
    assert "is not the folder that this run started in" in said
    if before:
        assert everything(run) == before
    else:
        assert not run.exists()
    (now,) = [*away.parent.glob("run"), *tmp_path.glob("run.aside-*")]
    assert f"set run_dir={now}" in said
    # An older one stays where the process was stopped between a save and its clearing up.
    newest = max((now / "checkpoints").glob("step-*"))
    step = int(newest.name.removeprefix("step-"))
    if how != "removed":
        metrics = [
            e for e in read_metrics(now / "metrics.jsonl") if e["event"] == "step"
        ]
        assert metrics[-1]["step"] == step  # nothing since the last update was lost
    found = CheckpointStore(
        now / "checkpoints"
    ).newest_valid()  # what the same command continues
    assert found is not None
    assert found.step == step


MOVES = """
import os, sys
from pathlib import Path
from toque.cli import main
from toque.evaluation.evaluator import Evaluator
written = Evaluator.generate_in_time
def moved(*args, final=False):
    if final:
        run = Path(sys.argv[1])
        os.rename(run, run.with_name("away"))
        os.rename(run.with_name("copy"), run)
    return written(*args, final=final)
Evaluator.generate_in_time = moved
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_the_finished_model_and_scores_do_not_go_into_another_run(
    kitchen: Path, whole_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path / "copy")
    before = everything(tmp_path / "copy")
    run = tmp_path / "run"
    words = ["train", str(kitchen / "run.yaml"), f"run_dir={run}", *OFTEN]
    words += ["observe.trackers=[tensorboard]"]  # which gets a report page in the end
    done = python("-c", MOVES, run, *words)
    assert done.returncode == CheckpointError.exit_code, done.stderr
    assert f"set run_dir={tmp_path / 'away'}" in done.stderr
    assert everything(run) == before
    assert not (tmp_path / "away" / "model").exists()
    assert (tmp_path / "away" / "report.html").exists()


def test_a_run_moved_during_an_evaluation_keeps_its_best_model_and_texts_out_of_another(
    make_run, tmp_path: Path
) -> None:
    other = make_run(folder=tmp_path / "other", steps=9, evaluate_every="3 steps")
    other.trainer.fit()
    before = everything(tmp_path / "other")
    run = tmp_path / "run"

    def moving(_model):
        if not (tmp_path / "away").exists():
            run.rename(tmp_path / "away")
            (tmp_path / "other").rename(run)
        return {"loss": 0.0}  # better than any other

    began = make_run(
        folder=run, steps=9, evaluate_every="3 steps", evaluator=moving, keep_last=1
    )
    with (
        run_lock(run / "checkpoints"),  # as `toque train` holds it
        pytest.raises(
            CheckpointError, match="is not the folder that this run started in"
        ),
    ):
        began.trainer.fit()
    assert everything(run) == before
    (saved,) = (tmp_path / "away" / "checkpoints").glob("step-*")
    assert verify_checkpoint(saved).step == 4  # the update after the evaluation
    assert [p.name for p in tmp_path.glob("away/best/*")] == ["step-00000003"]


@pytest.mark.parametrize(
    "stage", ["mkdir", "write state.json", "fsync folder", "rename"]
)
@pytest.mark.parametrize("background", [False, True])
def test_a_run_moved_during_a_save_is_saved_where_it_lies(
    make_run, tmp_path: Path, stage: str, *, background: bool
) -> None:
    """The writer's thread saw the move first, and its error ended the run without a last save."""
    other = make_run(folder=tmp_path / "other", steps=9, evaluate_every="3 steps")
    other.trainer.fit()
    before = everything(tmp_path / "other")
    run, away = tmp_path / "run", tmp_path / "away"

    def moving(done: str) -> None:
        saved = max((path.name for path in run.glob("checkpoints/step-*")), default="")
        if done == stage and saved >= "step-00000003" and not away.exists():
            run.rename(away)
            (tmp_path / "other").rename(run)

    store = CheckpointStore(run / "checkpoints", keep_last=1, after=moving)
    began = make_run(folder=run, steps=100, store=store, background_saves=background)
    with (
        run_lock(run / "checkpoints"),
        pytest.raises(
            CheckpointError, match="is not the folder that this run started in"
        ),
    ):
        began.trainer.fit()
    assert everything(run) == before
    found = CheckpointStore(away / "checkpoints").newest_valid()
    assert found is not None
    assert 4 <= found.step == began.recorder.steps[-1].progress.step < 100


def test_a_run_moved_while_its_checkpoints_are_listed_is_saved_where_it_lies(
    make_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once another process had the writer's thread stopped just there, and the run ended of it."""
    run, away, listed = tmp_path / "run", tmp_path / "away", os.listdir

    def moving(folder: Path) -> list[str]:
        if Path(folder) == run / "checkpoints" and not away.exists():
            run.rename(away)
        return listed(folder)

    store = CheckpointStore(run / "checkpoints", keep_last=1)
    began = make_run(folder=run, steps=100, store=store, background_saves=False)
    with run_lock(run / "checkpoints"), monkeypatch.context() as patch:
        patch.setattr(os, "listdir", moving)
        with pytest.raises(
            CheckpointError, match="is not the folder that this run started in"
        ):
            began.trainer.fit()
    found = CheckpointStore(away / "checkpoints").newest_valid()
    assert found is not None
    assert found.step == began.recorder.steps[-1].progress.step < 100


def test_a_link_to_the_moved_folder_is_the_same_folder(tmp_path: Path) -> None:
    from toque.storage.atomic import atomic_write

    with run_lock(tmp_path / "run" / "checkpoints"):
        (tmp_path / "run").rename(tmp_path / "larger-disk")
        with pytest.raises(CheckpointError, match="larger-disk"):
            atomic_write(tmp_path / "run" / "config.yaml", b"")
        (tmp_path / "run").symlink_to(tmp_path / "larger-disk")
        atomic_write(tmp_path / "run" / "config.yaml", b"")
    assert (tmp_path / "larger-disk" / "config.yaml").exists()
