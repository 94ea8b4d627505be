import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError
from toque.evaluation.bootstrap import Interval, paired_difference, t_quantile
from toque.workflows.ablate import (
    Ablation,
    Result,
    _lock_folder,
    plan_ablation,
    summarise,
)
from toque.workflows.improvements import IMPROVEMENTS


def plan(*overrides, seeds=2):
    return plan_ablation("demo", overrides, seeds=seeds)


def test_every_improvement_is_taken_away_and_added_with_every_seed():
    made = plan()
    k = len(made.improvements)
    assert k >= 4
    assert len(made.variants) == 2 * (2 + 2 * k)
    assert {v.seed for v in made.variants} == {17, 18}
    assert set(made.left_out) == {i.name for i in IMPROVEMENTS} - set(made.improvements)
    assert "start_from" in made.left_out["adapter"]  # the demo starts from scratch
    without = next(v for v in made.variants if v.name == "all on, label smoothing off")
    config = load_config("demo", without.overrides).config
    assert config.optim.label_smoothing == 0.0
    assert config.optim.gradient_noise is not None
    alone = next(v for v in made.variants if v.name == "all off, warm restarts on")
    config = load_config("demo", alone.overrides).config
    assert (config.optim.schedule, config.optim.gradient_noise) == (
        "cosine_restarts",
        None,
    )
    neither = next(v for v in made.variants if v.name == "all off")
    assert (
        load_config("demo", neither.overrides).config.optim.schedule == "linear"
    )  # the demo's


def test_equal_variants_are_one_run_and_the_key_is_of_the_settings():
    first, second = plan(), plan()
    assert [v.key for v in first.variants] == [v.key for v in second.variants]
    assert len(first.runs) == len(first.variants)
    other = plan("optim.peak_lr=1e-4")
    assert not set(other.runs) & set(first.runs)


def test_on_another_store_each_is_another_run():
    made = plan()
    one, other = made.for_store("a" * 64), made.for_store("b" * 64)
    assert not set(one.runs) & set(other.runs)
    assert one == plan().for_store("a" * 64)
    assert [v.overrides for v in one.variants] == [v.overrides for v in made.variants]


def test_improvements_of_one_setting_are_written_together():
    made = plan("train.stop_after=12 steps")  # by the clock there are no stages
    everything = next(v for v in made.variants if v.name == "all on")
    config = load_config("demo", everything.overrides).config
    bounds = [(s.max_difficulty, s.min_quality) for s in config.curriculum.stages]
    assert bounds == [("easy", 0.5), ("medium", 0.6), (None, 0.7)]
    assert (config.augmentation.prompt_formats, config.augmentation.tips) == (True, 0.3)
    less = next(v for v in made.variants if v.name == "all on, curriculum off")
    config = load_config("demo", less.overrides).config
    assert [s.max_difficulty for s in config.curriculum.stages] == [None] * 3
    assert [s.min_quality for s in config.curriculum.stages] == [0.5, 0.6, 0.7]
    alone = next(v for v in made.variants if v.name == "all off, other wordings on")
    config = load_config("demo", alone.overrides).config
    assert not config.augmentation.prompt_formats
    assert config.curriculum is None


def test_a_setting_of_the_configurations_own_is_switched_as_a_whole():
    made = plan("augmentation={substitute: 0.5}", "optim.label_smoothing=0.25")
    on = next(v for v in made.variants if v.name == "all off, label smoothing on")
    assert load_config("demo", on.overrides).config.optim.label_smoothing == 0.25
    assert "prompt formats" in made.improvements
    assert "which prompt formats switches" in made.left_out["other wordings"]
    values = {
        v.name: load_config("demo", v.overrides).config.augmentation
        for v in made.variants
        if v.seed == 17
    }
    assert values["all off, prompt formats on"].substitute == 0.5
    assert not values["all off, prompt formats on"].prompt_formats
    assert values["all on, prompt formats off"] is None


def test_paired_differences_by_hand():
    # Differences 1, 2, 3: mean 2, standard error 1 / sqrt(3), t(2) = 4.303.
    found = paired_difference([2.0, 3.0, 4.0, None], [1.0, 1.0, 1.0, 1.0])
    half = 4.303 / math.sqrt(3)
    assert found == Interval(2.0, pytest.approx(2 - half), pytest.approx(2 + half), 3)
    assert not found.decided
    assert paired_difference([1.0], [0.5]) == Interval(0.5, None, None, 1)
    assert paired_difference([None], [0.5]) is None
    # Published tables: 2.201 for 11, 2.086 for 20, 2.042 for 30, 1.980 for 120.
    for freedom, value in ((11, 2.201), (20, 2.086), (30, 2.042), (120, 1.980)):
        assert t_quantile(freedom) == pytest.approx(value, abs=1e-3)


def results(made, effects):
    """Held-out loss is 3, less each effect a run has, plus a tenth for the second seed."""
    found = {}
    for v in made.variants:
        begin, _, rest = v.name.partition(", ")
        has = dict.fromkeys(made.improvements, begin == "all on")
        if rest:
            has[rest.rpartition(" ")[0]] = rest.endswith(" on")
        loss = (
            3.0
            - sum(effects.get(n, 0.0) for n, on in has.items() if on)
            + 0.1 * (v.seed - 17)
        )
        found[v.key] = Result(v.key, 0, {"loss": loss, "training_seconds": 2.0}, 10**6)
    return found


def test_the_summary_finds_what_was_put_in():
    made = plan()
    record = summarise(made, results(made, {"gradient noise": 0.5}))
    for way in ("taken from all on", "added to all off"):
        effect = record["effects"]["gradient noise"][way]["loss"]
        assert effect["mean"] == pytest.approx(-0.5)
        assert effect["decided"]
        assert record["effects"]["label smoothing"][way]["loss"][
            "mean"
        ] == pytest.approx(0.0)
    assert "rougeL" not in record["effects"]["gradient noise"]["added to all off"]


def test_a_failure_is_a_row_and_costs_its_pair_only(tmp_path):
    made = plan(seeds=3)
    done = results(made, {"gradient noise": 0.5})
    lost = made.keys("all on, gradient noise off")[1]
    done[lost] = Result(lost, 5, {}, 0, "toque: the loss is not finite")
    record = summarise(made, done)
    assert record["failed"] == ["all on, gradient noise off"]
    effect = record["effects"]["gradient noise"]
    assert effect["taken from all on"]["loss"]["pairs"] == 2
    assert effect["added to all off"]["loss"]["pairs"] == 3
    shown = str(Ablation(tmp_path, record))
    assert "failed: all on, gradient noise off" in shown
    assert "-0.5000 (-0.5000..-0.5000)*" in shown


def test_two_ablations_in_one_folder_are_refused(tmp_path):
    with (
        _lock_folder(tmp_path / "out"),
        pytest.raises(
            ConfigError,
            match=rf"Another `toque ablate` \({os.getpid()}.*\) is writing to",
        ),
        _lock_folder(tmp_path / "out"),
    ):
        pass
    with _lock_folder(tmp_path / "out"):
        pass


@pytest.mark.slow
def test_done_runs_are_not_done_again(own_kitchen, monkeypatch, capsys):
    improvements = "toque.workflows.improvements.IMPROVEMENTS"
    monkeypatch.setattr(improvements, (IMPROVEMENTS[1],))
    words = ["ablate", "my.yaml", "--seeds", "2", "--steps", "2", "--out", "abl"]
    assert main(words) == 0
    assert "4/4" in capsys.readouterr().out
    times = {
        p: p.stat().st_mtime_ns
        for p in (own_kitchen / "abl/runs").rglob("evaluation.json")
    }
    assert len(times) == 4  # on and off, two seeds
    one = next((own_kitchen / "abl/results").iterdir())
    one.unlink()  # as if killed before this one was noted
    assert main(words) == 0
    assert {p: p.stat().st_mtime_ns for p in times} == times
    # Other recipes in the same file and store: none of these results is theirs.
    write_cookbook(own_kitchen / "a.jsonl", n=50, seed=4)
    assert main(["prepare", "my.yaml", "--replace"]) == 0
    assert main(words) == 0
    assert len([*(own_kitchen / "abl/results").iterdir()]) == 8
    assert (own_kitchen / "abl/ablation.json").exists()


@pytest.mark.slow
def test_told_to_stop_alone_it_has_its_run_save_and_leaves_nothing_training(
    own_kitchen,
):
    words = ["ablate", "my.yaml", "--seeds", "2", "--steps", "5000", "--out", "abl"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "toque", *words]
    with subprocess.Popen(
        command, env=environ, stderr=subprocess.PIPE, text=True
    ) as parent:
        while not any(
            "step" in f.read_text()
            for f in own_kitchen.glob("abl/runs/*/metrics.jsonl")
        ):
            assert parent.poll() is None
            time.sleep(0.1)
        parent.send_signal(signal.SIGTERM)
        _, said = parent.communicate(timeout=120)
    assert parent.returncode == 75
    assert "A signal stopped a run of the ablation." in " ".join(said.split())
    (log,) = own_kitchen.glob("abl/runs/*/metrics.jsonl")
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("end", "interrupted")
    assert list(own_kitchen.glob("abl/runs/*/checkpoints/step-*/manifest.json"))
