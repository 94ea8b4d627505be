"""`toque verify` on a run that trains: checkpoints that the run removes meanwhile are no damage."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from toque.cli import main
from toque.errors import CheckpointError
from toque.storage.atomic import atomic_folder, remove_folder
from toque.training.checkpoint import saved
from toque.training.checkpoint.saved import verify_checkpoint


@pytest.fixture
def run(whole_run, tmp_path) -> Path:
    """A run of three checkpoints."""
    copy = tmp_path / "run"
    shutil.copytree(whole_run, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    return copy


def steps(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step-*"))


def when_hashed(monkeypatch, name: str, act) -> None:
    """Have `act` done once, just before the first file of a folder of this name is hashed."""
    hashed, done = saved.sha256_of, []

    def acting(path: Path) -> str:
        if path.parent.name == name and not done:
            done.append(path)
            act(path.parent)
        return hashed(path)

    monkeypatch.setattr(saved, "sha256_of", acting)


def resave(folder: Path) -> None:
    """Save a step again, as a run does that continued from an older one."""
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    with atomic_folder(folder) as writer:
        for path in copy.iterdir():
            writer.put(path.name, path.read_bytes())
    shutil.rmtree(copy)


def test_fault_91_a_checkpoint_that_is_removed_meanwhile_is_counted(
    run, monkeypatch, capsys
):
    first, *others = steps(run)

    def remove(folder: Path) -> None:
        remove_folder(folder)
        shutil.copytree(
            others[-1], run / "checkpoints" / "step-00000099"
        )  # and a new one comes

    when_hashed(monkeypatch, first.name, remove)
    assert main(["verify", str(run)]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert (
        "step-00000099 has the checkpoint of step 12" in said
    )  # the new one is looked at, too
    assert "did not finish" not in said
    shutil.rmtree(run / "checkpoints" / "step-00000099")

    when_hashed(monkeypatch, others[0].name, remove_folder)
    assert main(["verify", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"{run}: not verified: 1 checkpoint that the run removed" in said
    assert f"{others[1]}: checkpoint of step 12" in said


def test_fault_91_a_checkpoint_that_is_saved_again_meanwhile_is_compared(
    run, monkeypatch, capsys
):
    first, *_ = steps(run)
    when_hashed(monkeypatch, first.name, resave)
    assert main(["verify", str(run)]) == 0
    assert f"{first}: checkpoint of step 8" in capsys.readouterr().out


def test_fault_91_a_checkpoint_that_stays_and_is_damaged_is_still_named(run, capsys):
    first, second, _ = steps(run)
    (first / "manifest.json").unlink()
    (second / "model.safetensors").write_bytes(b"")
    assert main(["verify", str(run)]) == CheckpointError.exit_code
    said = capsys.readouterr().err
    assert f"{first} has no manifest.json: the save did not finish" in said
    assert f"{second / 'model.safetensors'} has 0 bytes" in said


def test_fault_91_one_that_was_removed_is_not_called_unfinished(run):
    first, *_ = steps(run)
    remove_folder(first)
    with pytest.raises(CheckpointError, match="the folder was removed or moved"):
        verify_checkpoint(first)


@pytest.mark.slow
def test_fault_91_a_run_that_saves_at_every_step(kitchen, tmp_path, capsys):
    run = tmp_path / "run"
    words = [
        "train",
        str(kitchen / "run.yaml"),
        f"run_dir={run}",
        "train.save_every=1 step",
    ]
    words += ["train.keep_last=1", "train.stop_after=100000 steps"]
    child = subprocess.Popen(
        [sys.executable, "-m", "toque", *words], stderr=subprocess.PIPE
    )
    try:
        while not list(run.glob("checkpoints/step-*/manifest.json")):
            assert child.poll() is None
        for _ in range(100):
            assert main(["verify", str(run)]) == 0, capsys.readouterr().err
    finally:
        child.kill()
        child.wait()
    assert "that the run removed in between" in capsys.readouterr().out
