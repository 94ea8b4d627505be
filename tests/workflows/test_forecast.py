"""What a run's checkpoints take and how its rate goes, held to what happens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import toque
from toque.config import RunConfig, load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import CheckpointError, ConfigError
from toque.training.checkpoint.store import run_lock
from toque.workflows.forecast import course_of, space_of
from toque.workflows.show_settings import show

RUN = """
run_dir: {folder}/run
model: {{family: t5, tokenizer: "trained:512",
  shape: {{d_model: 32, d_kv: 8, d_ff: 48, num_layers: 1, num_heads: 4}}}}
data: {{sources: [{{path: "{folder}/a.jsonl"}}], store: "{folder}/store", max_prompt_tokens: 64,
  max_target_tokens: 128}}
optim: {{warmup: "2 steps", peak_lr: 1e-2}}
train: {{stop_after: "3 epochs", batch: "4 examples", precision: float32, micro_batch_rows: 2,
  compile: false, keep_last: 3}}
evaluation: {{max_examples: 4, generate: 0}}
observe: {{log_every: "1 step"}}
"""


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forecast")
    write_cookbook(folder / "a.jsonl", n=24, seed=3)
    (folder / "run.yaml").write_text(RUN.format(folder=folder))
    toque.prepare(folder / "run.yaml")
    return folder


def config_of(folder: Path, *words: str) -> RunConfig:
    return load_config(str(folder / "run.yaml"), list(words)).config


def test_the_forecast_is_what_the_run_then_takes_and_does(kitchen: Path) -> None:
    config = config_of(kitchen)
    before, course = space_of(config), course_of(config, 64)
    toque.train(config)
    (last,) = sorted((kitchen / "run" / "checkpoints").glob("step-*"))[-1:]
    taken = sum(path.stat().st_size for path in last.glob("*"))
    # Headers, state and manifest are not in the forecast; of a real model they are nothing.
    assert before.checkpoint < taken < before.checkpoint + 20_000
    assert before.how == "weights and optimizer, by their shapes"
    after = space_of(config)
    assert after.how == f"as {last.name} does"
    assert after.checkpoint == taken - (last / "manifest.json").stat().st_size
    assert (after.keep_last, after.keep_best) == (3, 1)
    assert after.most == 4 * after.checkpoint + 2 * after.best

    lines = map(json.loads, (kitchen / "run" / "metrics.jsonl").read_text().splitlines())
    done = {e["step"]: e["lr"] for e in lines if e["event"] == "step"}
    assert course.unit == "steps"
    assert course.length == pytest.approx(max(done), abs=1)
    assert max(course.rates) == pytest.approx(max(done.values()), rel=0.05)
    assert course.rates[-1] < 0.02 * max(course.rates)

    shown = show(load_config(kitchen / "run" / "config.yaml"))
    assert "# A checkpoint takes " in shown.splitlines()[-1]
    (kitchen / "again.yaml").write_text(shown)
    assert load_config(str(kitchen / "again.yaml"), []).config == config


def test_too_little_room_is_said(kitchen: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(kitchen)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    assert "THAT IS TOO LITTLE" in space_of(config_of(kitchen)).in_words()


def test_a_rate_that_only_data_can_place_is_said(kitchen: Path) -> None:
    lost = [f"data.store={kitchen}/absent", "optim.warmup=5 steps"]
    with pytest.raises(ConfigError, match="how many of one make the other is known from the prep"):
        course_of(config_of(kitchen, *lost), 8)
    course = course_of(config_of(kitchen, lost[0], "optim.warmup=25 %", "optim.min_lr=0"), 9)
    assert (course.unit, course.length) == ("epochs", 3.0)
    assert course.rates[2] == pytest.approx(1e-2)
    assert course.rates[-1] == pytest.approx(0.0, abs=1e-9)


def test_stages_stand_below_the_curve(kitchen: Path) -> None:
    stages = "curriculum={stages: [{from: '0 %', max_steps: 99}, {from: '50 %'}]}"
    lines = show(load_config(kitchen / "run.yaml", [stages]), plot=True).splitlines()
    assert lines[0].startswith("learning rate (cosine), 0 to ")
    assert lines[-2].endswith("|^ stage 1: up to 99 steps")
    assert lines[-1].endswith("|" + 32 * " " + "^ stage 2: everything")


def test_a_second_run_in_a_folder_is_refused_before_it_writes(kitchen: Path) -> None:
    run = kitchen / "taken"
    config = config_of(kitchen, f"run_dir={run}")
    refused = pytest.raises(CheckpointError, match="is in use by another training process")
    with run_lock(run / "checkpoints"), refused:
        toque.train(config)
    assert [path.name for path in run.iterdir()] == ["checkpoints"]
