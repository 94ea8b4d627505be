"""The model card says what was measured and recorded, and calls the rest not measured."""

import math
import re
from dataclasses import replace

import pytest
from huggingface_hub import ModelCard

import toque
from fixtures.kitchens import Notices, tiny_config
from tiny import model_of
from toque.config import FilesConfig, load_config
from toque.config.schema_methods import AdapterConfig
from toque.data.store.store_manifest import (
    Records,
    SourceEntry,
    Splits,
    StoreManifest,
    TokenCounts,
    TokenizerEntry,
)
from toque.evaluation.bootstrap import Estimate
from toque.evaluation.memorisation import Memorisation, SharedRun
from toque.evaluation.task_scores import TaskScores
from toque.evaluation.text_scores import Scores
from toque.models.loading.provenance import Provenance
from toque.models.lora.layers import attach
from toque.runs.history import RunHistory
from toque.training.callbacks import Goal
from toque.units import Progress
from toque.workflows.evaluate import Evaluation
from toque.workflows.model_card import FinishedRun, model_card, with_actual_values

RECIPES = Provenance(form="recipes", max_new_tokens=256, tasks=["write"])
SYSTEM = {
    "event": "system", "step": 3, "seconds": 10.0,
    "gpus": [{"index": 0, "power_watts": 300.0}, {"index": 1, "power_watts": None}],
}  # fmt: skip


def manifest(path="a|b\n.jsonl") -> StoreManifest:
    return StoreManifest(
        format=1, fingerprint="f" * 64, family_kind="decoder",
        tokenizer=TokenizerEntry("t", "0", 9), examples=90, rows=90, tokens=TokenCounts(1000, 2000),
        splits=Splits(80, 10), records=Records(100, 90), dropped={"too short": 10, "never": 0},
        sources=[
            SourceEntry(path, "recipes", 0, "0", 5, 60, 50),
            SourceEntry("c", "r", 0, "0", 5, 40, 40),
        ],
        shards=[], files=[], columns={}, settings={"max_prompt_tokens": 64}, cut={},
        self_sha256="",
    )  # fmt: skip


def finished(texts=None, history=None, tasks=()) -> FinishedRun:
    scores = Scores(8, texts or {}, {}, {}, {})
    return FinishedRun(
        Evaluation(4, {"loss": 1.5}, scores, tasks), Goal("bleu", rises=True),
        Progress(step=6, epoch=1.5, tokens=5000, seconds=75.0), history or RunHistory(),
    )  # fmt: skip


def card_of(run: FinishedRun, *words: str, record: Provenance = RECIPES) -> str:
    return model_card(load_config("demo", list(words)).config, record, manifest(), run)


def test_a_run_of_which_little_is_known() -> None:
    card = card_of(finished())
    assert "weights of step 4, the highest bleu" in card
    assert "| runs/demo/cookbook.jsonl | not recorded | 2 | 100 | 90 |" in card
    assert "Dropped records by reason: too short 10." in card
    assert "No texts were generated" in card
    for name in ("parameters", "precision", "device", "energy of the GPUs"):
        assert f"| {name} | not measured |" in card
    assert (
        "Trained on prompts of up to 64 tokens. Longer ones were not measured." in card
    )
    assert "| time of the updates | 1:15 |" in card


def test_weights_that_nothing_chose_are_called_the_last() -> None:
    card = card_of(replace(finished(), goal=None))
    assert "weights of step 4, the last of the run. `config.yaml`" in card


@pytest.mark.usefixtures("own_kitchen")
def test_a_run_that_keeps_no_best_model_says_which_it_wrote() -> None:
    heard = Notices()
    run = toque.train(tiny_config(train={"keep_best": 0}), reporter=heard)
    assert any(
        "is in run/model (step 3, last of the run)." in text for text in heard.notices
    )
    assert (
        "weights of step 3, the last of the run."
        in (run.model / "README.md").read_text()
    )


def test_sizes_are_no_scores_of_the_front_matter() -> None:
    losses = {
        "loss": 1.5,
        "bits_per_byte": 0.7,
        "target_tokens": 90,
        "target_bytes": 300,
    }
    scored = replace(finished().evaluation, heldout=losses)
    head = card_of(replace(finished(), evaluation=scored)).partition("\n---\n")[0]
    assert "type: bits_per_byte" in head
    assert "target_" not in head


def test_a_run_that_measured_all() -> None:
    texts = {
        "recipe_score": Estimate(0.4, 0.3, 0.5, 8),
        "distinct_1": Estimate(0.2, None, None, 8),
    }
    start = {
        "event": "start", "step": 0, "flops_per_token": 1e6, "precision": "bf16", "ranks": 2,
        "parameters": {"total": 1000.0, "trainable": 10.0}, "hardware": {"device": "a GPU"},
    }  # fmt: skip
    history = RunHistory()
    for event in (
        start, SYSTEM, {"event": "evaluation", "step": 6, "seconds": 61.0},
        {"event": "end", "step": 6, "seconds": 140.0},
    ):  # fmt: skip
        history.take(event)
    run = finished(texts, history, [TaskScores("title", 3, 0.5, 1.6)])
    assert "word for word is not measured" in card_of(run)
    copied = Memorisation([SharedRun(31, 90, 7)], [SharedRun(28, 80, 5)], 80, 80)
    card = card_of(
        replace(run, evaluation=replace(run.evaluation, memorisation=copied)),
        "data.sources=[{path: 'a|b', licence: CC-BY-4.0}]",
    )
    assert "| a\\|b | CC-BY-4.0 | 2 | 100 | 90 |" in card
    assert "| recipe_score | 0.4 | 0.3 to 0.5 | 8 |" in card
    assert "| distinct_1 | 0.2 | not measured | 8 |" in card
    assert "| title_loss | 0.5 |" in card
    assert f"\n\n{copied}\n" in card
    assert "word for word is not measured" not in card
    assert "their recipe score is 0.40 of 1" in card
    assert "| FLOPs, by the model's shape | 5e+09 |" in card
    assert "| energy of the GPUs | 0.000833 kWh |" in card
    assert "| time of the evaluations between them | 1:01 |" in card
    assert "| time of the completed sessions | 2:20 |" in card


def test_what_auto_came_to_is_said() -> None:
    config = load_config(
        "recipe-t5-xl-lora", ["adapter.r=auto", "model.family=auto"]
    ).config
    model = model_of("llama")
    attach(model, AdapterConfig(dropout=0.0), base="a/base", seed=1)
    card = model_card(
        with_actual_values(config, model), RECIPES, manifest(), finished()
    )
    assert "| adapter | lora, r 16 |" in card
    assert ModelCard(card).data.tags == ["toque", "llama"]


@pytest.mark.parametrize("name", ["a: b", "x\n---\ny", "'", "#", "null", "- a", "ü %"])
def test_the_front_matter_is_whole_whatever_names_hold(name: str) -> None:
    """A dataset of the hub is named with its commit, and scores that are no numbers are not."""
    commit = "0123456789" * 4
    store = manifest(f"hf:org/soups@v1:main:train/{commit}/a.arrow")
    run = finished(
        {
            "bleu": Estimate(0.123456789, None, None, 8),
            "odd": Estimate(math.nan, 0, 0, 8),
        }
    )
    given = load_config("demo", []).config
    data = given.data.model_copy(update={"sources": (FilesConfig(path=name),) * 2})
    config = given.model_copy(update={"run_dir": f"runs/{name}", "data": data})
    card = model_card(config, RECIPES, store, run)
    head = ModelCard(card).data
    assert head.datasets == ["org/soups"]
    assert [(r.metric_type, r.metric_value) for r in head.eval_results] == [
        ("loss", 1.5),
        ("bleu", 0.123457),
    ]
    one = head.eval_results[0]
    place = (
        one.dataset_type,
        one.dataset_config,
        one.dataset_split,
        one.dataset_revision,
    )
    assert place == ("org/soups", "main", "train", commit)
    assert (head.license, head.base_model, head.library_name) == (
        None,
        None,
        "transformers",
    )
    assert f"| hf:org/soups@v1:main:train, commit {commit} |" in card


@pytest.mark.parametrize("form", ["recipes", "pairs", "documents", "gaps"])
def test_every_form_names_its_use_and_what_nobody_measured(form: str) -> None:
    card = card_of(finished(), record=Provenance(form=form, max_new_tokens=9))
    assert re.search(r"- Intended use: \w+", card)
    assert "- Not measured: whether" in card
    assert ("allergen" in card) is (form == "recipes")
