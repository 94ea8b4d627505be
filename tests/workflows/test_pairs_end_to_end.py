"""A person's pairs: the same store from a file and a program, a measured accuracy, and messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.kitchens import Notices
from fixtures.pairs import PAIRS, write_pairs
from store_checks import content
from toque.cli import main
from toque.config import RunConfig
from toque.config.dump import to_yaml
from toque.errors import ConfigError
from toque.evaluation.bootstrap import wilson_interval
from toque.workflows.prepare import prepare_store, save_rows
from toque.workflows.results import TrainedRun


def test_a_file_and_a_program_give_the_same_store(pairs_config, tmp_path):
    path = write_pairs(tmp_path / "pairs.jsonl")
    stores = {}
    for name, rows, sources in (
        ("file", None, [{"path": path}]),
        ("program", PAIRS, []),
    ):
        config = pairs_config(sources=sources, data={"store": str(tmp_path / name)})
        store = toque.prepare(config, data=rows).store
        assert len(store.pair_rows("train")) + len(store.pair_rows("validation")) == 100
        stores[name] = {
            file: data
            for file, data in content(tmp_path / name).items()
            # These have the name of the file, and the rows themselves.
            if not file.endswith((".json", "report", ".jsonl"))
        }
    assert stores["file"].keys() == stores["program"].keys()
    assert len(stores["file"]) > 5
    assert stores["file"] == stores["program"]


def test_the_accuracy_of_held_out_pairs_has_an_interval(pairs_config):
    notices = Notices()
    config = pairs_config(
        data={"validation_fraction": 0.3},
        evaluation={"max_examples": 100},
        train={"batch": "8 examples", "stop_after": "30 steps"},
    )
    run = toque.train(config, data=PAIRS, reporter=notices)
    n_pairs = len(toque.prepare(config, data=PAIRS).store.pair_rows("validation"))
    assert n_pairs > 10
    record = json.loads((run.folder / "evaluation.json").read_text())
    accuracy = record["heldout"]["rewards/accuracies"]
    assert record["heldout"]["pairs"] == n_pairs
    low, high = run.intervals["rewards/accuracies"]
    assert low < accuracy <= high
    assert (low, high) == pytest.approx(wilson_interval(accuracy, n_pairs), abs=1e-6)
    assert record["applies_to"]["rewards/accuracies"] == n_pairs
    assert "Wilson" in record["method"]["rewards/accuracies"]
    said = " ".join(notices.notices)
    assert f"preferred in {accuracy:.1%} of {n_pairs} pairs (95 % interval: " in said
    # The scores by text, for comparisons, are of the chosen answers.
    by_text = json.loads((run.folder / "scores_by_text.json").read_text())
    assert len(by_text["examples"]["keys"]) == n_pairs
    assert TrainedRun(run.folder, 0, "").intervals == run.intervals


def test_an_interval_of_all_pairs_has_a_width():
    low, high = wilson_interval(1.0, 20)
    assert high == 1.0
    assert low == pytest.approx(0.839, abs=1e-3)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 1.0 - low))


OTHER_FILES = {
    "no-rejected": [{"prompt": p["prompt"], "chosen": p["chosen"]} for p in PAIRS],
    "other-names": [
        {"question": p["prompt"], "best": p["chosen"], "worst": p["rejected"]}
        for p in PAIRS
    ],
    "answers": [{"prompt": p["prompt"], "completion": p["chosen"]} for p in PAIRS],
}


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_file_without_pairs_names_the_three_columns(
    name, pairs_config, tmp_path, capsys
):
    path = write_pairs(tmp_path / f"{name}.jsonl", OTHER_FILES[name])
    config = pairs_config(sources=[{"path": path}])
    code = (
        2 if name == "answers" else 3
    )  # readable for another objective, or not at all
    assert prepare(config, tmp_path) == code
    error = " ".join(capsys.readouterr().err.split())
    assert f"{name}.jsonl has no preference pairs" in error
    assert "columns: {prompt: NAME, chosen: NAME, rejected: NAME}" in error
    assert "ingredients" not in error
    if name != "answers":
        assert ", ".join(map(repr, OTHER_FILES[name][0])) in error
    assert not (tmp_path / "store").exists()


def test_pairs_with_equal_answers_leave_nothing_to_use(pairs_config, tmp_path, capsys):
    rows = [pair | {"rejected": pair["chosen"]} for pair in PAIRS]
    path = write_pairs(tmp_path / "equal.jsonl", rows)
    assert prepare(pairs_config(sources=[{"path": path}]), tmp_path) == 3
    error = " ".join(capsys.readouterr().err.split())
    assert "100 of the 100 records" in error
    assert "chosen and rejected are equal" in error
    assert "0 good records" not in error


def test_pairs_without_held_out_pairs_are_refused_before_they_are_prepared(
    pairs_config, tmp_path
):
    path = write_pairs(tmp_path / "pairs.jsonl")
    with pytest.raises(ConfigError, match="dpo is evaluated on held-out examples"):
        pairs_config(sources=[{"path": path}], data={"validation_fraction": 0.0})
    config = pairs_config(data={"validation_fraction": 0.0})
    with pytest.raises(ConfigError, match="name held-out files"):
        toque.train(config, data=PAIRS)
    assert not list((tmp_path / "store").glob("*.json"))
    result = toque.prepare(config, data=PAIRS[:50], validation=PAIRS[50:])
    assert len(result.store.pair_rows("validation")) == 50


def test_a_filter_of_recipes_is_refused_for_pairs(pairs_config):
    stages = [{"from": "0 %", "max_difficulty": "easy"}, {"from": "50 %"}]
    config = pairs_config(curriculum={"stages": stages})
    with pytest.raises(ConfigError, match="only recipes have these values") as caught:
        toque.prepare(config, data=PAIRS)
    assert "difficulty up to easy" in str(caught.value)
    assert "preferred" not in str(caught.value)


@pytest.mark.parametrize("tokenizer", ["trained:512", "other"])
@pytest.mark.parametrize("kind", ["dpo", "grpo"])
def test_another_tokenizer_than_that_of_the_start_model_is_refused(
    kind, tokenizer, pairs_config, pair_base, tokenizers_at
):
    objective: dict[str, Any] = {"kind": kind}
    if kind == "grpo":
        objective |= {"rewards": {"recipe_score": 1.0}}
    if tokenizer == "other":
        tokenizer = str(tokenizers_at["encoder-decoder"])
    model = {"family": "auto", "start_from": str(pair_base), "tokenizer": tokenizer}
    config = pairs_config(objective=objective, model=model)
    with pytest.raises(
        ConfigError, match=r"differs from the tokenizer of model\.start_from"
    ):
        toque.prepare(config, data=PAIRS)
    same = model | {"tokenizer": str(tokenizers_at["decoder"])}
    if kind == "dpo":
        toque.prepare(pairs_config(model=same), data=PAIRS)


def test_an_earlier_store_with_another_tokenizer_is_refused(
    pairs_config, pair_base, tokenizers_at
):
    tokenizer = str(tokenizers_at["encoder-decoder"])
    model = {"family": "auto", "start_from": str(pair_base), "tokenizer": tokenizer}
    config = pairs_config(objective={"kind": "sft"}, model=model)
    with save_rows(config, PAIRS, None, None) as settings:
        prepare_store(settings)
    with pytest.raises(ConfigError, match="The objective dpo uses"):
        toque.train(pairs_config(model=model), data=PAIRS)


def test_one_sample_is_refused(pairs_config):
    with pytest.raises(ConfigError) as caught:
        pairs_config(
            objective={"kind": "grpo", "rewards": {"recipe_score": 1.0}, "samples": 1}
        )
    assert "objective.samples" in str(caught.value)


def prepare(config: RunConfig, folder: Path) -> int:
    """The exit code of `toque prepare`."""
    (folder / "my.yaml").write_text(to_yaml(config))
    return main(["prepare", str(folder / "my.yaml")])
