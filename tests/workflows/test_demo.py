"""The demonstration, cut short: what it ends with, and what continues it."""

import re
import shlex
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toque.cli import main

STOPS = """
import os, signal

class AtTwoAndFour:
    def on_step_end(self, run):
        if run.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return "stop" if run.step >= 4 else None
"""
SMALL = (
    "train.stop_after=10 minutes total",
    "observe.callbacks=[stops:AtTwoAndFour]",
    "model={family: gpt2, shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}",
    "model.tokenizer=trained:512",
    "data.max_target_tokens=48",
    "evaluation={generate: 0, max_examples: 4}",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def said(capfd: Any, *words: str) -> tuple[int, str]:
    """The exit code of `toque demo`, and its paragraph of an error."""
    capfd.readouterr()
    code = main(["demo", *words])
    return code, " ".join("".join(capfd.readouterr()).split())


def test_interrupted_it_ends_with_75_and_words_that_continue_it(
    folder, tmp_path, monkeypatch, capfd
):
    (tmp_path / "stops.py").write_text(STOPS)
    monkeypatch.syspath_prepend(tmp_path)
    # A hundred seconds went into writing and preparing, which are of the whole command.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - 100.0)
    with monkeypatch.context() as patch:
        patch.setattr("toque.workflows.demo.time", clock)
        code, told = said(capfd, *SMALL, "--n", "60")
    assert code == 75, told
    assert re.search(r"reading and measuring took 1:[45]\d of it", told)
    _, _, again = told.partition("Continue with: toque demo ")
    code, told = said(capfd, *shlex.split(again))
    assert code == 0, told
    assert "trained 4 steps and scored" in told
    assert (folder / "runs/demo/model").exists()
    code, told = said(capfd, *SMALL, "--n", "50")
    assert code == 2
    assert (
        "--n is 50, but runs/demo/cookbook.jsonl already contains another cookbook"
        in told
    )


@pytest.mark.parametrize(
    "sources",
    [
        "[]",
        '[{path: "*.jsonl"}]',
        "[{path: gs://pantry/book.jsonl}]",
        '[{path: "hf:pantry:train"}]',
        "[{path: .}]",
        "[{path: a.jsonl}, {path: b.jsonl}]",
    ],
)
def test_sources_that_are_no_file_to_write_are_refused(folder, capfd, sources):
    code, told = said(capfd, f"data.sources={sources}")
    assert code == 2
    assert "data.sources must name one local file" in told
    assert list(folder.iterdir()) == []
