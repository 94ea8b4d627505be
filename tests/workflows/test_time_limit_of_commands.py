"""Runs whose length is the clock's: what comes after training is told before it, and kept free."""

from __future__ import annotations

import json

import pytest

from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError
from toque.reporter import Reporter
from toque.training.time_limit import CommandClock
from toque.workflows.prepare import prepare
from toque.workflows.train import train

CONFIG = """
run_dir: {folder}/run
model: {{family: gpt2, tokenizer: "trained:512",
  shape: {{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 320}}}}
data: {{sources: [{{path: {folder}/a.jsonl}}], store: {folder}/store, max_prompt_tokens: 64,
  max_target_tokens: 256}}
optim: {{warmup: "10 %", peak_lr: 1e-2}}
train: {{batch: "1024 tokens", precision: float32, compile: false, micro_batch_rows: 2,
  evaluate_every: "10 steps"}}
evaluation: {{max_examples: 4, generate: 1}}
observe: {{log_every: "1 step"}}
"""


class Ticking:
    """A clock on which a second goes by with every update; it watches the run as a callback."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def on_step_begin(self, state) -> None:
        self.now += 1.0


class Notices(Reporter):
    def __init__(self) -> None:
        self.told: list[str] = []

    def notice(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def settings(tmp_path):
    write_cookbook(tmp_path / "a.jsonl", n=60, seed=3)
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path))
    prepare(tmp_path / "run.yaml")
    return lambda *overrides: load_config(tmp_path / "run.yaml", overrides)


def begun(told: list[str]) -> str:
    return next(text for text in told if text.startswith("toque "))


def test_a_total_counts_the_whole_command(settings):
    clock, notices = Ticking(), Notices()
    command = CommandClock(clock, began=clock.now - 100.0)  # a hundred seconds went into reading
    limited = settings("train.stop_after=4 minutes total")
    run = train(limited, clock=command, callbacks=[clock], reporter=notices)
    assert run.reason == "finished"
    assert run.step > 0
    assert run.model.exists()
    assert 230.0 < clock.now - command.began <= 240.0
    assert "until 4 minutes total: 1:40 of it went into reading and measuring" in begun(
        notices.told
    )
    assert "evaluating and writing will take about" in begun(notices.told)
    start = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert float(start["stop_after"].removesuffix(" minutes")) < (240 - 100) / 60
    rates = [e["lr"] for e in run.history if e["event"] == "step"]
    assert rates[-1] < 0.1 * max(rates)
    again = train(settings("train.stop_after=4 minutes total"))
    assert again.step == run.step  # it is done, however much faster this machine has become


def test_a_total_that_leaves_nothing_is_refused_with_what_was_measured(settings):
    clock = Ticking()
    command = CommandClock(clock, began=clock.now - 100.0)
    with pytest.raises(ConfigError, match=r"1:40 of it went into .* Nothing is left for training"):
        train(settings("train.stop_after=90 seconds total"), clock=command)


@pytest.mark.parametrize("length", ["0.02 minutes", "1 second"])
def test_by_the_clock_of_its_updates_nothing_is_taken_off(settings, length):
    notices = Notices()
    run = train(settings(f"train.stop_after={length}"), reporter=notices)
    assert run.step > 0
    start = json.loads((run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert start["stop_after"].startswith(length)


def test_a_run_in_steps_is_not_measured_for_it(settings):
    notices = Notices()
    train(settings("train.stop_after=2 steps"), reporter=notices)
    assert "take about" not in begun(notices.told)


def test_telling_changes_no_number(settings, tmp_path):
    """Measuring the end draws nothing and leaves the model as it was."""
    plain = train(settings("train.stop_after=3 steps"))
    clock = CommandClock(lambda: 0.0, began=0.0)
    told = settings("train.stop_after=1000 minutes total", f"run_dir={tmp_path}/other")
    limited = train(told, clock=clock, callbacks=[StopAt(3)])
    assert [step for step, _ in limited.losses] == [1, 2, 3]
    assert limited.losses[0] == plain.losses[0]


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state) -> str | None:
        return "stop" if state.step >= self.step else None


def test_other_settings_have_no_total(tmp_path):
    (tmp_path / "run.yaml").write_text("train: {save_every: 5 minutes total}")
    with pytest.raises(ConfigError, match=r"train\.save_every"):
        load_config(tmp_path / "run.yaml")
