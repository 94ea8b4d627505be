"""What a run says beforehand, and what it shows while it evaluates, writes and chooses."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

import toque
from toque.cooking.cookbook.generate import write_cookbook
from toque.training.observers import time_left

ADAPTED = {"model": {"family": "auto", "start_from": "plain/model"}, "adapter": {"r": 2}}


class Heard:
    """A reporter that keeps everything."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.shown: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def progress(self, text: str, *, done: int = 0, total: int = 0, keep: bool = False) -> None:
        self.shown.append(text)

    def working(self, text: str):
        self.shown.append(text)
        return nullcontext()


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("ahead")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(time_left, "_WORTH_SAYING_SECONDS", 0.0)
        yield folder


def configuration(*, adapted: bool = False, **sections):
    shape = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 320}
    base = {
        "model": {"family": "gpt2", "tokenizer": "trained:512", "shape": shape},
        "data": {"sources": [{"path": "a.jsonl"}], "max_prompt_tokens": 64,
                 "max_target_tokens": 256, "tasks": ["write", "difficulty"]},
        "train": {"stop_after": "4 steps", "batch": "1024 tokens", "precision": "float32",
                  "compile": False, "evaluate_every": "2 steps"},
        "evaluation": {"max_examples": 4, "generate": 3},
    }  # fmt: skip
    return toque.configure(base | (ADAPTED if adapted else {}), **sections)


@pytest.mark.usefixtures("kitchen")
@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_tells_its_time_and_shows_its_parts(*, adapted: bool) -> None:
    folder, heard = "adapted" if adapted else "plain", Heard()
    config = configuration(adapted=adapted, run_dir=folder, data={"store": f"{folder}-store"})
    toque.prepare(config)
    run = toque.train(config, reporter=heard)
    assert run.step == 4
    (said,) = [text for text in heard.notices if " in all: " in text]
    assert re.search(
        r"for 2 evaluations, and up to [\d:]+ to score the model and write 3 texts", said
    )
    evaluated = [at for at, text in enumerate(heard.notices) if "evaluation  loss" in text]
    assert heard.notices.index(said) < evaluated[0]
    shown = "\n".join(heard.shown)
    for text in (
        "evaluating 0 of 4 held-out examples\nevaluating ",
        "evaluating 4 of 4 held-out examples",
        "writing 0 of 3 texts",  # at an evaluation
        "writing 3 of 3 texts",  # at the end
        "scoring 3 texts",
        "prompts of the task difficulty",
        "writing the finished model",
    ):
        assert text in shown, text
    assert heard.shown[-1] == "writing the finished model"


@pytest.mark.usefixtures("kitchen")
def test_nothing_is_measured_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("nobody hears it")

    from toque.workflows.assembly.timing import ahead as time_ahead

    monkeypatch.setattr(time_ahead, "_writing_seconds", refuse)
    toque.train(configuration(run_dir="silent", data={"store": "plain-store"}))


@pytest.mark.usefixtures("kitchen")
def test_the_forecast_changes_no_number() -> None:
    heard = toque.train(
        configuration(run_dir="heard", data={"store": "plain-store"}), reporter=Heard()
    )
    silent = toque.train(configuration(run_dir="unheard", data={"store": "plain-store"}))
    assert heard.losses == silent.losses
    assert heard.metrics == silent.metrics
