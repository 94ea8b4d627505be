"""Defaults that a later release changed, and runs begun before."""

from __future__ import annotations

from pathlib import Path

import pytest

import toque
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook

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


class StopAtFour:
    def on_step_end(self, state):
        return "stop" if state.step == 4 else None


@pytest.mark.usefixtures("kitchen")
def test_a_short_run_reaches_its_learning_rate() -> None:
    run = toque.train("my.yaml")
    assert run.step < 40
    assert max(step["lr"] for step in run.history if step["event"] == "step") > 0.99e-2
