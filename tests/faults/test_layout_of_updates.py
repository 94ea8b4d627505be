"""The rows computed at once decide the last bits: a run continues with them, whatever happens.

Each run here has dropout, and what an earlier measurement of this machine says is changed before it
continues, so that rows that are chosen anew are others.
"""

import json
import shutil
from pathlib import Path

import pytest

from fixtures.kitchens import StopAt
from fixtures.processes import python
from fixtures.ranks import TORCHRUN
from toque.config import load_config
from toque.errors import CheckpointError
from toque.storage.atomic import sha256_of
from toque.training.checkpoint.store import CheckpointStore
from toque.workflows.train import train

AUTO = ("train.micro_batch_rows=auto", "train.batch=2048 tokens")
LORA = ("adapter.kind=lora", "adapter.r=2", "adapter.dropout=0.2")


@pytest.fixture(params=["whole", "lora"])
def words(request, kitchen, tmp_path, monkeypatch) -> list[str]:
    """Settings of a run whose rows are measured, and remembered in a cache of its own."""
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    if request.param == "whole":
        return [*AUTO]
    base = kitchen / "base"
    if not base.exists():
        train(load_config(str(kitchen / "run.yaml"), [f"run_dir={base}"]))
    shutil.copytree(kitchen / "store", tmp_path / "store")
    return [*AUTO, *LORA, f"model.start_from={base / 'model'}", "model.shape={}"]


def run(kitchen: Path, folder: Path, words: list[str], *, stop_at: int | None = None):
    resolved = load_config(str(kitchen / "run.yaml"), [f"run_dir={folder}", *words])
    return train(resolved, callbacks=[StopAt(stop_at)] if stop_at else [])


def measured_otherwise(cache: Path) -> None:
    """From now on this machine's measurements say another number of rows."""
    files = list((cache / "measured").glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text())
        if "micro_batch_rows" in found["found"]:
            rows = found["found"]["micro_batch_rows"]
            found["found"]["micro_batch_rows"] = 1 if rows > 1 else 2
            file.write_text(json.dumps(found))


def end_of(folder: Path) -> dict[str, str]:
    last = folder / "checkpoints" / "step-00000012"
    return {
        name: sha256_of(last / f"{name}.safetensors") for name in ("model", "optimizer")
    }


def notes(folder: Path) -> list[str]:
    events = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [e["message"] for e in events if e["event"] == "warning"]


def flipped(file: Path, word: str) -> None:
    """Another digit after `word`, as a flipped bit may make it."""
    data = bytearray(file.read_bytes())
    at = data.index(word.encode()) + len(word)
    data[at] = ord("1") if data[at] != ord("1") else ord("3")
    file.write_bytes(bytes(data))


def test_fault_52_resources_that_are_lost_or_flipped_change_no_bit(
    kitchen, tmp_path, words
):
    assert run(kitchen, tmp_path / "whole", words).reason == "finished"
    assert run(kitchen, tmp_path / "mould", words, stop_at=7).interrupted
    measured_otherwise(tmp_path / "cache")
    for harm, said in (
        (Path.exists, ""),
        (Path.unlink, "resources.json is missing or damaged"),
        (lambda file: flipped(file, '"micro_batch_rows": '), "is missing or damaged"),
        (lambda file: file.write_text("{}"), "is missing or damaged"),
    ):
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "mould", folder)
        harm(folder / "resources.json")
        assert run(kitchen, folder, words).reason == "finished"
        assert end_of(folder) == end_of(tmp_path / "whole")
        about = [note for note in notes(folder) if "resources.json" in note]
        assert [said in note for note in about] == [True] * bool(said)


@pytest.mark.parametrize("words", ["whole"], indirect=True)
def test_fault_52_settings_that_change_the_rows_are_said(kitchen, tmp_path, words):
    folder = tmp_path / "run"
    assert run(kitchen, folder, words, stop_at=7).interrupted
    before = run(kitchen, folder, [*words, "train.micro_batch_rows=1"])
    assert before.reason == "finished"
    assert any("micro_batch_rows: auto -> 1" in note for note in notes(folder))


@pytest.mark.parametrize("words", ["whole"], indirect=True)
@pytest.mark.parametrize(
    "nonsense", [{}, {"micro_batch_rows": -1}, {"compile": "yes"}, "rows", 7]
)
def test_fault_52_nonsense_in_the_checkpoint_is_refused(
    kitchen, tmp_path, words, nonsense
):
    folder = tmp_path / "run"
    assert run(kitchen, folder, words, stop_at=2).interrupted
    store = CheckpointStore(folder / "checkpoints")
    newest = store.newest_valid()
    state = newest.state()
    held = state["resources"]
    state["resources"] = (
        {**held, **nonsense} if nonsense and isinstance(nonsense, dict) else nonsense
    )
    tensors = {n: newest.tensors(n) for n in ("model", "optimizer")}
    manifest = newest.manifest
    store.identity = type(store.identity)(
        manifest.config_sha256,
        manifest.data_fingerprint,
        manifest.versions,
        manifest.settings,
    )
    store.save(newest.step, tensors, state)
    with pytest.raises(CheckpointError, match="invalid record of its micro-batches"):
        run(kitchen, folder, words)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fault_52_two_ranks_lose_their_resources(kitchen, tmp_path, monkeypatch):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))

    def both(folder: Path, *own: str) -> None:
        words = ("train", kitchen / "run.yaml", f"run_dir={folder}", *AUTO, *own)
        done = python(*TORCHRUN[1:], "-m", "toque", *words)
        assert done.returncode == 0, done.stdout + done.stderr

    both(tmp_path / "whole", "train.keep_last=9")
    run_folder = tmp_path / "run"
    shutil.copytree(tmp_path / "whole", run_folder)
    for path in (run_folder / "checkpoints").glob("step-*"):
        if int(path.name[-8:]) > 6:
            shutil.rmtree(path)
    shutil.rmtree(run_folder / "model")
    for path in run_folder.glob("resources*.json"):
        path.unlink()
    measured_otherwise(tmp_path / "cache")
    both(run_folder, "train.keep_last=9")
    assert end_of(run_folder) == end_of(tmp_path / "whole")
