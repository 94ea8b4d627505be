"""Runs that learn from preference pairs: from a start model to a finished run, and back again."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from fixtures.kitchens import TINY, StopAt, start_model
from toque.config.resolve import load_config
from toque.errors import ConfigError
from toque.evaluation.reference_nats import RECORD, REFERENCE
from toque.storage.atomic import sha256_of

ROWS = [
    {
        "prompt": f"Rice {n}:",
        "chosen": f"Stew it {n} minutes.",
        "rejected": f"Fry {n} of it.",
    }
    for n in range(40)
]
DPO = {"kind": "dpo", "beta": 0.3}


@pytest.fixture(scope="module", params=["gpt2", "t5"])
def begun(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    """A configuration whose pairs are prepared."""
    folder = tmp_path_factory.mktemp(request.param)
    model = start_model(folder, request.param)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(model)}},
        run_dir=str(folder / "dpo"),
        objective=DPO,
        data={"sources": [{"path": str(folder / "pairs.jsonl")}],
              "store": str(folder / "pairs")},
        train={"stop_after": "6 steps", "batch": "8 examples", "save_every": "2 steps"},
    )  # fmt: skip
    toque.prepare(config)
    return config


def train(config: toque.RunConfig, name: str, **sections: Any) -> Path:
    """Train in a folder of its own, and return it."""
    folder = Path(config.run_dir).parent / name
    toque.train(toque.configure(config, run_dir=str(folder), **sections))
    return folder


def events(run: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == kind]


def test_run_starts_at_its_reference_and_learns_the_preference(begun):
    run = train(begun, "whole", train={"stop_after": "30 steps"})
    steps = events(run)
    assert steps[0]["loss"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert steps[-1]["rewards/margins"] > 5 * abs(steps[0]["rewards/margins"])
    measured = events(run, "evaluation")[-1]["metrics"]
    assert measured["rewards/accuracies"] == 1.0
    assert measured["loss"] < 0.5
    assert "perplexity" not in measured
    record = json.loads((run / "evaluation.json").read_text())
    assert record["heldout"]["loss"] == pytest.approx(measured["loss"], abs=1e-4)


def test_continued_run_has_the_same_weights(begun):
    whole = train(begun, "undisturbed")
    stopped = Path(begun.run_dir).parent / "stopped"
    config = toque.configure(begun, run_dir=str(stopped))
    toque.train(config, callbacks=[StopAt(3)])
    before = sha256_of(stopped / REFERENCE)
    toque.train(config)
    assert sha256_of(stopped / REFERENCE) == before
    assert [e["loss"] for e in events(stopped)] == [e["loss"] for e in events(whole)]
    weights = [run / "model" / "model.safetensors" for run in (whole, stopped)]
    assert sha256_of(weights[0]) == sha256_of(weights[1])


@pytest.mark.parametrize(
    "train_settings",
    [{"micro_batch_rows": 1}, {"pack": False}, {"row_tokens": 256}, {"readers": 2}],
)
def test_layout_of_rows_does_not_change_the_updates(begun, train_settings):
    name = "-".join(train_settings)
    run = train(begun, name, train=train_settings)
    usual = (
        train(begun, "usual")
        if not (Path(begun.run_dir).parent / "usual").exists()
        else (Path(begun.run_dir).parent / "usual")
    )
    for step, expected in zip(events(run), events(usual), strict=True):
        for field in ("loss", "rewards/chosen", "rewards/margins", "logps/rejected"):
            assert step[field] == pytest.approx(expected[field], abs=2e-5)


def test_adapter_keeps_the_base_as_its_reference(begun):
    run = train(
        begun, "adapter", adapter={"dropout": 0.0}, train={"stop_after": "12 steps"}
    )
    steps = events(run)
    assert steps[-1]["rewards/margins"] > steps[0]["rewards/margins"]
    nats = np.load(run / REFERENCE)
    base = train(begun, "base", train={"stop_after": "2 steps"})
    np.testing.assert_allclose(nats, np.load(base / REFERENCE), rtol=1e-4)


def test_evaluate_measures_the_chosen_answers(begun):
    run = train(begun, "measured")
    evaluation = toque.evaluate(str(run))
    assert evaluation.heldout["perplexity"] == pytest.approx(
        math.exp(evaluation.heldout["loss"]), rel=1e-6
    )


def test_other_reference_is_refused(begun):
    run = train(begun, "moved", train={"stop_after": "2 steps"})
    record = json.loads((run / RECORD).read_text())
    (run / RECORD).write_text(json.dumps(record | {"weights": "0" * 64}))
    (run / REFERENCE).unlink()  # its record is enough
    config = toque.configure(begun, run_dir=str(run), train={"stop_after": "4 steps"})
    with pytest.raises(ConfigError, match="was computed with other weights or data"):
        toque.train(config)


def test_imitation_of_pairs_is_refused(begun):
    with pytest.raises(
        ConfigError, match=r"has preference pairs, but objective\.kind is sft"
    ):
        train(begun, "sft", objective={"kind": "sft", "beta": 0.1})


def test_store_without_pairs_is_refused(begun):
    folder = Path(begun.run_dir).parent
    data = load_config(folder / "run.yaml").config.data.model_dump(mode="json")
    with pytest.raises(ConfigError, match="has no preference pairs"):
        train(begun, "no-pairs", data=data)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"kind": "sft", "beta": 0.2}}, "only dpo uses it"),
        ({"optim": {"label_smoothing": 0.1}}, "Use `objective.label_smoothing`"),
        ({"augmentation": {"tips": 0.5}}, "Remove `augmentation`"),
        ({"model": {"start_from": "scratch", "family": "gpt2"}}, "can already write"),
    ],
)
def test_settings_that_do_not_fit(sections, message):
    usual = TINY | {"model": {"family": "auto", "start_from": "model"}}
    with pytest.raises(ConfigError, match=message):
        toque.configure(usual | {"objective": DPO} | sections)
