"""Plans of runs that learn from preference pairs and from rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.kitchens import TINY
from fixtures.pairs import start_model, write_pairs
from toque.config import RunConfig
from toque.evaluation.reference_nats import RECORD
from toque.runs.estimate_parts import Work
from toque.workflows.plan.plan_report import Plan
from toque.workflows.plan.run_estimate import build_estimator

REWARDS = {"rewards": {"recipe_score": 1.0}, "samples": 4}
CARD = "rtx-4090"


@pytest.fixture(
    scope="module",
    params=["llama", pytest.param("t5", marks=pytest.mark.slow)],
)
def start(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    tokenizers_at: dict[str, Path],
) -> Path:
    """A small model with a tokenizer."""
    kind = "encoder-decoder" if request.param == "t5" else "decoder"
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return start_model(request.param, folder, tokenizers_at[kind])


def configured(start: Path, folder: Path, **sections: Any) -> RunConfig:
    """A run over the pairs in `folder`, or over their chosen answers."""
    source: dict[str, Any] = {"path": write_pairs(folder / "rows.jsonl")}
    if sections["objective"]["kind"] != "dpo":
        source["columns"] = {"prompt": "prompt", "target": "chosen"}
    data = {"sources": [source], "store": str(folder / "store")}
    train = {"batch": "8 examples", "stop_after": "2 epochs"}
    return toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(start)}},
        run_dir=str(folder / "run"),
        data=data | sections.pop("data", {}),
        train=train,
        **sections,
    )


def work_of(config: RunConfig) -> Work:
    return build_estimator(config, CARD)[0].work


def test_rows_have_whole_pairs_and_the_reference_is_one_pass(start, tmp_path):
    config = configured(start, tmp_path, objective={"kind": "dpo"})
    store = toque.prepare(config).store
    work = work_of(config)
    assert work.pairs == 8
    assert work.row.examples * work.update_rows == 2 * work.pairs
    assert work.worst_examples % 2 == 0
    tokens = int(store.prompt_lengths.sum() + store.target_lengths.sum())
    assert work.reference_tokens == tokens
    plan = toque.plan(config, hardware=CARD)
    per_token = plan.time.update_seconds / work.tokens_per_update
    assert plan.time.reference_seconds == pytest.approx(tokens * per_token / 3)
    steps = work.totals["steps"]
    assert plan.time.run_seconds >= (
        steps * plan.time.update_seconds + plan.time.reference_seconds
    )
    assert plan.disk.reference == 4 * 200
    assert "8 pairs in" in str(plan)

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RECORD).write_text("{}")
    assert "already stored in the run folder" in str(toque.plan(config, hardware=CARD))


def test_without_a_store_a_row_is_the_longest_pair(start, tmp_path):
    limits = {"max_prompt_tokens": 20, "max_target_tokens": 30}
    config = configured(start, tmp_path, objective={"kind": "dpo"}, data=limits)
    work = work_of(config)
    n_source = 40 if work.row.source else 0
    assert (work.row.source, work.row.tokens) == (n_source, 100)
    assert (work.pairs, work.row.examples) == (8, 2)
    assert work.reference_tokens is None
    assert "reference" in str(toque.plan(config, hardware=CARD))
    limited = configured(
        start, tmp_path, objective={"kind": "dpo"}, data=limits | {"max_examples": 60}
    )
    assert work_of(limited).reference_tokens == 60 * 50


@pytest.mark.parametrize("kind", ["grpo", "best_of"])
def test_texts_are_generated_before_the_update(kind, start, tmp_path):
    config = configured(start, tmp_path, objective={"kind": kind, **REWARDS})
    store = toque.prepare(config).store
    texts = work_of(config).texts
    assert texts is not None
    assert (texts.n_texts, texts.n_learnt) == (32, 32 if kind == "grpo" else 8)
    rows = store.rows("train")
    assert texts.mean_tokens == pytest.approx(store.target_lengths[rows].mean())
    assert texts.longest_prompt == store.prompt_lengths[rows].max()

    plan = toque.plan(config, hardware=CARD)
    record = plan.record()
    assert record["memory"]["generation"]["rows"] == 32
    assert record["memory"]["generation"]["parts"]["keys and values"] > 0
    assert 0.0 < plan.time.generation_seconds < plan.time.update_seconds
    said = str(plan)
    assert "4 texts for each of 8 prompts" in said
    assert "an estimate: the length of the targets" in said
    assert "a guess: 25% of the speed of the update" in said


def test_this_machine_generates_texts_to_measure_its_speed(start, tmp_path):
    config = configured(start, tmp_path, objective={"kind": "grpo", **REWARDS})
    plan = toque.plan(config)
    assert plan.time.generation_seconds > 0.0
    assert "measured just now with random weights" in str(plan)
    assert plan.time.utilisation is None or plan.time.utilisation > 0.0


def test_a_penalty_needs_a_copy_of_the_start_model_and_its_forward_pass(
    start, tmp_path
):
    def planned(kl: float) -> Plan:
        objective = {"kind": "grpo", **REWARDS, "kl": kl}
        return toque.plan(
            configured(start, tmp_path, objective=objective), hardware=CARD
        )

    without, with_copy = planned(0.0), planned(0.1)
    parts = with_copy.memory.parts
    assert parts["copy of the start model"] == parts["weights"]
    assert without.memory.parts["copy of the start model"] == 0
    updates = [
        plan.time.update_seconds - plan.time.generation_seconds
        for plan in (without, with_copy)
    ]
    # A forward pass is a third of an update.
    assert updates[1] / updates[0] == pytest.approx(4 / 3, rel=0.1)
    assert with_copy.memory.update.extra_flops > 0.0
