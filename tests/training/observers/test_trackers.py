"""Trackers get copies of all that a run writes; what they do with it never touches the run."""

import json
import os
import threading
from importlib.machinery import ModuleSpec

import pytest

from toque.cooking.recipe_scores import RECIPE_SCORES, text_metrics
from toque.errors import ConfigError
from toque.training.callbacks import RunEnd
from toque.training.observers.tracker_services import tracker_connector
from toque.training.observers.trackers import TrackerFeed, tracker_values
from toque.units import Progress

END = RunEnd("finished", Progress(step=6, epoch=3.0), 60.0)
GPU = {"utilisation_percent": 90, "memory_used_bytes": 20, "memory_total_bytes": 80}
RECORDS = [
    {"event": "start", "step": 0, "versions": {}},
    {"event": "step", "step": 1, "loss": 2.0, "lr": 0.1, "mfu": None, "stage": 1},
    {"event": "evaluation", "step": 1, "seconds": 4.0, "metrics": {"loss": 1.5, "perplexity": 4.5},
     "texts": {"recipe_score": 0.5, "bleu": 3.0}},
    {"event": "gradients", "step": 1, "groups": {"head": {"grad_norm": 0.3}}},
    {"event": "system", "step": 1, "cpu_percent": 50.0, "cpu_percent_by_core": [20.0, 80.0],
     "memory_used_bytes": 1,
     "memory_total_bytes": 4, "disk_read_bytes_per_second": 2**20,
     "gpus": [{"index": 0, **GPU}, {"index": 1, **GPU, "utilisation_percent": 70}]},
    {"event": "warning", "step": 1, "message": "hot"},
    {"event": "end", "step": 1, "reason": "finished", "error": None},
]  # fmt: skip


class Listening:
    def __init__(self, heard, *, fails=False):
        self.heard, self.fails = heard, fails

    def log(self, step, values):
        if self.fails:
            raise ConnectionError("no network\nand a second line")
        self.heard.append((step, values))

    def log_texts(self, step, rows):
        shown = [(*row[1:3], row.cookable, row.recipe_score) for row in rows]
        self.heard.append(("texts", step, shown))

    def store_file(self, path):
        self.heard.append(("file", path.name))

    def end(self, *, failed):
        self.heard.append(("end", failed))


def test_figures_have_the_fields_usual_names():
    stages = [{"min_quality": 0.2, "max_difficulty": "easy"}]
    step, evaluation, gradients, system = (
        tracker_values(record, stages=stages, recipe_scores=RECIPE_SCORES)
        for record in RECORDS[1:5]
    )
    assert step == {
        "train/loss": 2.0, "train/learning_rate": 0.1, "curriculum/stage": 1.0,
        "curriculum/quality_threshold": 0.2, "curriculum/difficulty_level": 1.0,
    }  # fmt: skip
    assert evaluation == {
        "val_loss": 1.5, "val_perplexity": 4.5, "val_seconds": 4.0, "eval/bleu": 3.0,
        "recipe/recipe_score": 0.5,
    }  # fmt: skip
    assert gradients == {"gradients/head/grad_norm": 0.3}
    assert [system[f"system/cpu.{core}/percent"] for core in (0, 1)] == [20.0, 80.0]
    assert system["system/gpu_utilization"] == 80.0
    assert system["system/gpu_memory_percent"] == 25.0
    assert system["system/gpu.1/utilization"] == 70.0
    assert system["system/memory_percent"] == 25.0
    assert system["system/disk_read_bytes_per_second"] == 2**20
    assert tracker_values(RECORDS[0]) == tracker_values(RECORDS[5]) == {}


def test_the_names_of_recipe_scores_are_all_of_them():
    prompt = "Generate recipe for: Toast using ingredients: bread, butter"
    text = "Ingredients:\n- 2 slices bread\n- 1 tbsp butter\n\nInstructions:\n1. Toast the bread."
    found = text_metrics(prompt, text)
    assert set(found) <= RECIPE_SCORES
    event = {"event": "evaluation", "texts": found}
    told = tracker_values(event, recipe_scores=RECIPE_SCORES)
    # The mean of rules of form was an "overall quality" of 0.99 beside a recipe score of 0.17.
    assert told["recipe/form"] == found["form"]
    assert [name for name in told if "quality" in name] == [
        "recipe/instruction_quality"
    ]


def test_a_tracker_gets_figures_texts_scores_and_the_page_in_order(
    tmp_path, warn, warnings
):
    heard, samples = [], tmp_path / "samples.jsonl"
    line = {"step": 1, "prompt": "toast", "text": "Bread.", "tokens": 2, "metrics": {}}
    samples.write_text(
        json.dumps(line | {"step": 0, "prompt": "of another session"}) + "\n"
    )
    scores = tmp_path / "evaluation.json"
    found = {"step": 6, "heldout": {"loss": 1.0}, "generated": {"bleu": 2.0}}
    scores.write_text(
        json.dumps(found | {"tasks": {"joke": {"loss": 3.0, "accuracy": 0.5}}})
    )
    feed = TrackerFeed("paper", lambda: Listening(heard), warn=warn, samples=samples)
    for record in RECORDS[1:3]:
        feed.take(record)
    with samples.open("a") as file:
        file.write(json.dumps(line) + '\n[]\n{"step": 1}\n')
    feed.on_evaluate(Progress(step=1), {})
    feed.take(RECORDS[-1])
    feed.on_fit_end(END)
    with samples.open("a") as file:
        metrics = {"cookable": 0.25, "recipe_score": 0.75}
        line |= {"step": 6, "text": "Butter.", "metrics": metrics}
        file.write(json.dumps(line) + "\n")
    feed.finish(failed=False, scores=scores, page=tmp_path / "report.html")
    assert heard[2:] == [
        ("texts", 1, [("toast", "Bread.", None, None)]),
        ("texts", 6, [("toast", "Butter.", 0.25, 0.75)]),
        (
            6,
            {
                "final/loss": 1.0,
                "final/joke_loss": 3.0,
                "final/joke_choice_accuracy": 0.5,
                "final/bleu": 2.0,
            },
        ),
        ("file", "report.html"),
        ("end", False),
    ]
    assert warnings == []


@pytest.mark.parametrize("error", ["it broke", None])
def test_the_end_says_whether_the_run_failed(warn, tmp_path, error):
    heard = []
    feed = TrackerFeed(
        "paper", lambda: Listening(heard), warn=warn, samples=tmp_path / "none"
    )
    feed.take(RECORDS[1])
    feed.take(RECORDS[-1] | {"error": error})
    feed.on_fit_end(END)
    feed.finish(failed=False)
    assert heard[-1] == ("end", error is not None)


def test_a_tracker_that_fails_is_warned_of(warn, warnings, tmp_path):
    feed = TrackerFeed(
        "paper", lambda: Listening([], fails=True), warn=warn, samples=tmp_path / "none"
    )
    for record in RECORDS[:3]:
        feed.take(record)
    feed.finish(failed=False)
    ((_, said),) = warnings
    assert said.startswith(
        "2 records for paper could not be delivered so far (the last failed"
    )
    assert said.endswith("no network). The run continues")


def test_a_tracker_that_hangs_costs_the_end_its_patience_alone(
    warn, warnings, monkeypatch, tmp_path
):
    monkeypatch.setattr("toque.training.observers.trackers.END_PATIENCE_SECONDS", 0.1)
    gate = threading.Event()
    feed = TrackerFeed(
        "paper",
        lambda: gate.wait(60) and Listening([]),
        warn=warn,
        samples=tmp_path / "none",
    )
    for record in RECORDS:
        feed.take(record)
    feed.finish(failed=False)
    assert not gate.is_set()
    gate.set()
    assert "could not be delivered" in warnings[-1][1]


@pytest.mark.parametrize("found", [None, ModuleSpec("trackio", None)])
def test_a_tracker_that_is_not_installed_is_refused_with_its_extra(
    monkeypatch, tmp_path, found
):
    # A mere folder of its name, as W&B leaves one, has a specification without an origin.
    monkeypatch.setattr("importlib.util.find_spec", lambda _: found)
    with pytest.raises(ConfigError, match=r"is not installed.*toque\[track\]"):
        tracker_connector("trackio", folder=tmp_path, settings={})


def fed(name, folder, warn, settings):
    samples = folder / "samples.jsonl"
    feed = TrackerFeed(
        name,
        tracker_connector(name, folder=folder, settings=settings),
        warn=warn,
        samples=samples,
    )
    for record in RECORDS:
        feed.take(record)
    line = {
        "step": 1,
        "prompt": "toast",
        "text": "```\n# Bread.",
        "tokens": 2,
        "metrics": {},
    }
    samples.write_text(json.dumps(line) + "\n")
    feed.on_evaluate(Progress(step=1), {})
    (folder / "report.html").write_text("<p>page</p>")
    done = threading.Event()
    feed._thread.offer(done.set)
    assert done.wait(120)  # a library's first import may take long
    feed.finish(failed=False, page=folder / "report.html")


def test_tensorboard_files_hold_figures_texts_and_settings(tmp_path, warn, warnings):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fed("tensorboard", tmp_path, warn, {"seed": 17})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0)]
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(1, 1.5)]
    tags = events.Tags()["tensors"]
    assert {
        "config/text_summary",
        "samples/text_summary",
        "report/text_summary",
    } <= set(tags)
    assert warnings == []


def test_trackio_keeps_figures_texts_and_the_page_on_this_machine(
    tmp_path, warn, warnings, monkeypatch
):
    pytest.importorskip("trackio")
    import sqlite3

    import trackio.utils

    home = trackio.utils.TRACKIO_DIR  # read when it is imported
    monkeypatch.setenv("TRACKIO_PROJECT", f"toque-test-{os.getpid()}")
    fed("trackio", tmp_path, warn, {"seed": 17})
    assert warnings == []
    (kept,) = home.glob(f"toque-test-{os.getpid()}.db")
    with sqlite3.connect(kept) as rows:
        logged = [
            json.loads(row) for (row,) in rows.execute("select metrics from metrics")
        ]
        artifacts = rows.execute("select count(*) from artifacts").fetchone()
    assert any(entry.get("val_loss") == 1.5 for entry in logged)
    assert any("samples" in entry for entry in logged)
    assert artifacts == (1,)
