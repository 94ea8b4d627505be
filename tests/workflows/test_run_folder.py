"""Run folders: refused while another process holds them, or where no save fits; and a short run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import toque
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import CheckpointError
from toque.training.checkpoint.store import run_lock

RUN = """
run_dir: run
model: {family: gpt2, tokenizer: "trained:512",
  shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 320}}
data: {sources: [{path: a.jsonl}], store: store, max_prompt_tokens: 64, max_target_tokens: 256}
optim: {peak_lr: 1e-2}
train: {stop_after: "1 epochs", batch: "1024 tokens", precision: float32, compile: false,
  save_every: "4 steps"}
evaluation: {max_examples: 4, generate: 1}
observe: {log_every: "1 step"}
"""


@pytest.fixture
def kitchen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_cookbook(Path("a.jsonl"), n=60, seed=3)
    Path("my.yaml").write_text(RUN)
    assert main(["prepare", "my.yaml"]) == 0
    return tmp_path


@pytest.mark.usefixtures("kitchen")
def test_a_short_run_reaches_its_learning_rate() -> None:
    run = toque.train("my.yaml")
    assert run.step < 40
    assert max(step["lr"] for step in run.history if step["event"] == "step") > 0.99e-2


def test_a_second_run_in_a_folder_is_refused_before_it_writes(kitchen: Path) -> None:
    run = kitchen / "run"
    refused = pytest.raises(CheckpointError, match="is in use by another training process")
    with run_lock(run / "checkpoints"), refused:
        toque.train("my.yaml")
    assert [path.name for path in run.iterdir()] == ["checkpoints"]


@pytest.mark.usefixtures("kitchen")
def test_a_disk_without_room_for_a_save_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(CheckpointError, match=r"has 1.0 kB free, and the next save does not fit"):
        toque.train("my.yaml")
