"""Going back to a named checkpoint: the same bits again, and nothing is lost of what was newer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toque.cli import main
from toque.storage.bucket import open_bucket
from toque.storage.bucket_errors import RUNS
from toque.storage.checksums import sha256_of
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.observers.metrics_reader import read_metrics

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
LAST = "checkpoints/step-00000012"


def trained(kitchen: Path, run: Path, *words: str) -> int:
    return main(
        ["train", str(kitchen / "run.yaml"), f"run_dir={run}", "train.keep_last=4", *words]
    )


@pytest.fixture(scope="module")
def whole(kitchen: Path) -> Path:
    """A run that was left alone: twelve steps, the last four checkpoints kept."""
    assert trained(kitchen, kitchen / "whole-run") == 0
    return kitchen / "whole-run"


@pytest.fixture
def again(kitchen: Path, whole: Path, tmp_path: Path, capfd: Any) -> Callable[..., tuple[int, str]]:
    """Train once more in a copy of that run."""
    shutil.copytree(whole, tmp_path / "run")

    def train(*words: str) -> tuple[int, str]:
        capfd.readouterr()
        code = trained(kitchen, tmp_path / "run", *words)
        return code, "".join(capfd.readouterr())

    return train


def tree(folder: Path) -> dict[str, str]:
    """Every file with its hash, locks and logs aside."""
    return {
        str(path.relative_to(folder)): sha256_of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".") and path.name != "training.log"
    }


def end_of(run: Path) -> list[str]:
    """Hashes of the last weights, of the optimizer and of the finished model."""
    files = ("model.safetensors", "optimizer.safetensors")
    return [
        *(sha256_of(run / LAST / name) for name in files),
        sha256_of(run / "model" / "model.safetensors"),
    ]


@pytest.mark.parametrize("name", ["step-00000008", "8"])
def test_going_on_from_an_older_one_makes_the_same_bits(again, whole, tmp_path, name):
    run = tmp_path / "run"
    before = tree(run)
    code, said = again("--resume", name)
    assert code == 0
    assert end_of(run) == end_of(whole)
    (aside,) = (path for path in (run / "set-aside").iterdir() if path.is_dir())
    assert sorted(p.name for p in (aside / "checkpoints").iterdir()) == [
        "step-00000010", "step-00000012",
    ]  # fmt: skip
    kept = tree(aside)
    assert {n for n in before if "step-00000010" in n or "step-00000012" in n} | {"end.json"} == {
        *kept
    }
    assert all(before[n] == kept[n] for n in kept)
    told = [line for line in said.splitlines() if "set aside" in line]
    assert len(told) == 1
    assert "continuing from step-00000008" in told[0]
    assert "checkpoints/step-00000012, checkpoints/step-00000010" in told[0]
    steps = [e["step"] for e in read_metrics(run / "metrics.jsonl") if e["event"] == "step"]
    assert steps == list(range(1, 13))
    assert "resume" not in (run / "config.yaml").read_text()


def test_the_newest_may_be_named_and_nothing_is_moved(again, tmp_path):
    code, said = again("--resume", "step-00000012")
    assert code == 0
    assert "continuing from step-00000012, the newest there is" in said
    assert [p.name for p in (tmp_path / "run" / "set-aside").iterdir()] == ["resumed.json"]


@pytest.mark.parametrize("name", ["step-00000007", "best", "../best/step-00000010", "latest"])
def test_a_name_that_is_not_there_is_answered_with_those_that_are(again, tmp_path, name):
    before = tree(tmp_path / "run")
    code, said = again("--resume", name)
    assert code == 4
    words = " ".join(said.split())
    assert f"There is no checkpoint {name!r}" in words
    assert "step-00000006, step-00000008, step-00000010, step-00000012" in words
    assert tree(tmp_path / "run") == before


def test_a_damaged_one_is_refused_and_nothing_is_moved(again, tmp_path):
    file = tmp_path / "run" / "checkpoints" / "step-00000008" / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = tree(tmp_path / "run")
    code, said = again("--resume", "8")
    assert code == 4
    assert "optimizer.safetensors is damaged" in " ".join(said.split())
    assert tree(tmp_path / "run") == before


def test_other_settings_are_refused_and_nothing_is_moved(again, tmp_path):
    before = tree(tmp_path / "run")
    code, said = again("--resume", "8", "optim.peak_lr=0.5")
    assert code == 4
    assert "optim.peak_lr: 0.01 -> 0.5" in " ".join(said.split())
    assert tree(tmp_path / "run") == before


def test_a_run_that_has_not_begun_has_nothing_to_go_back_to(kitchen, tmp_path, capfd):
    assert trained(kitchen, tmp_path / "new", "--resume", "8") == 4
    assert "there are: none yet" in " ".join(capfd.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_it_goes_with_neither_a_new_run_nor_a_bucket_left_alone(again, whole):
    code, said = again("--resume", "8", "--from", str(whole))
    assert code == 2
    assert "--resume continues a run" in " ".join(said.split())
    code, said = again("--resume", "8", "--no-upload", "checkpoint.upload=s3://pantry/runs/x")
    assert code == 2
    assert "sets newer checkpoints aside in the bucket" in " ".join(said.split())


def test_a_launchers_restart_does_not_go_back_twice(again, tmp_path, monkeypatch):
    """What the command has saved before its restart is its own work."""
    run = tmp_path / "run"
    assert again("--resume", "6")[0] == 0  # made steps 8, 10 and 12; 6 is no longer kept after 14
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    shutil.rmtree(run / LAST)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, said = again("--resume", "6")
    assert code == 0
    assert "started again after going back to 6" in " ".join(said.split())
    assert len([p for p in (run / "set-aside").iterdir() if p.is_dir()]) == 1
    start = [e for e in read_metrics(run / "metrics.jsonl") if e["event"] == "start"][-1]
    assert start["step"] == 10


def test_in_a_bucket_the_newer_ones_are_set_aside_too(kitchen, whole, service, tmp_path, parts):
    at = parts.address(service, "runs/back")
    words = (f"checkpoint.upload={at}", "checkpoint.layout=sharded")
    assert trained(kitchen, tmp_path / "run", *words) == 0
    bucket = open_bucket(at, RUNS)
    names = bucket.names()
    assert "checkpoints/step-00000012/shard-00000-of-00001.safetensors" in names
    step = bucket.names("checkpoints")[0].split("/")[1]  # uploads may have skipped some
    shutil.rmtree(tmp_path / "run")  # an empty machine
    assert trained(kitchen, tmp_path / "run", *words, "--resume", step) == 0
    now = bucket.names()
    assert {n.split("/", 2)[2] for n in now if n.startswith("set-aside/")} == {
        n for n in names if n.startswith(("checkpoints/", "best/")) and n.split("/")[1] > step
    }
    assert set(names) <= {n for n in now if not n.startswith("set-aside/")} | {
        n.split("/", 2)[2] for n in now if n.startswith("set-aside/")
    }
    again, first = (
        verify_checkpoint(folder) for folder in (tmp_path / "run" / LAST, whole / LAST)
    )
    for stem in ("model", "optimizer"):
        mine, wanted = again.tensors(stem), first.tensors(stem)
        assert mine.keys() == wanted.keys()
        assert all(mine[name].equal(wanted[name]) for name in mine)
    start = [e for e in read_metrics(tmp_path / "run" / "metrics.jsonl") if e["event"] == "start"]
    assert start[-1]["step"] == int(step.removeprefix("step-"))
    manifest = json.loads((tmp_path / "run" / LAST / "manifest.json").read_text())
    assert manifest["format"] == 2
