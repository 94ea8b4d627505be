"""The texts of an update are shown without reading the model's weights."""

from pathlib import Path

import pytest

import toque
from fixtures.kitchens import TINY, tiny_config
from fixtures.pairs import PAIRS, write_pairs
from toque.data.store.token_store import TokenStore
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.diagnosis.show_batch import show_batch


@pytest.mark.usefixtures("own_kitchen")
@pytest.mark.parametrize("adapter", [None, {"kind": "lora", "r": 2}])
def test_no_weight_is_read_and_the_batch_is_the_runs(adapter):
    run = toque.train(tiny_config())
    model = {"family": "auto", "start_from": str(run.model)}
    changes = {
        "model": model,
        "adapter": adapter,
        "data": TINY["data"] | {"store": "second"},
    }
    config = toque.configure(TINY | changes)
    toque.prepare(config)
    store = TokenStore.open(Path("second"))
    stream = build_stream(config, store, build_language_model(config, store))
    (run.model / "model.safetensors").unlink()
    shown = str(show_batch(config, max_examples=1000))
    batch = stream.at(Cursor()).batch
    rows = [row for packed in batch.example_ids for row in packed]
    assert shown.startswith(f"step 1: {len(rows)} examples in {batch.n_rows} rows")
    found = [
        int(line.split()[3].rstrip(","))
        for line in shown.splitlines()
        if "store row" in line
    ]
    assert found == rows


def test_pairs_are_counted_and_shown_whole(pairs_config):
    config = pairs_config()
    toque.prepare(config, data=PAIRS)
    shown = show_batch(config, max_examples=2)
    assert shown.heading.startswith("step 1: 8 pairs in ")
    assert shown.left == 6
    labels = [text.splitlines()[1].split(", ")[1] for text in shown.examples]
    assert labels == ["chosen", "rejected", "chosen", "rejected"]
    prompts = [text.splitlines()[2] for text in shown.examples]
    assert prompts[0] == prompts[1] != prompts[2]


@pytest.mark.parametrize("kind", ["grpo", "best_of"])
def test_a_run_with_rewards_shows_prompts_and_says_what_it_generates(
    kind, pairs_config, tmp_path
):
    objective = {"kind": kind, "samples": 4, "rewards": {"recipe_score": 0.5}}
    columns = {"prompt": "prompt", "target": "chosen"}
    path = write_pairs(tmp_path / "pairs.jsonl")
    config = pairs_config(
        objective=objective, sources=[{"path": path, "columns": columns}]
    )
    toque.prepare(config)
    shown = show_batch(config, max_examples=3)
    assert "8 prompts" in shown.heading
    assert "4 texts of at most" in shown.heading
    assert "32 in all" in shown.heading
    assert "recipe_score x 0.5" in shown.heading
    assert ("the best text of each prompt" in shown.heading) == (kind == "best_of")
    assert (len(shown.examples), shown.left) == (3, 5)
    answers = [pair["chosen"] for pair in PAIRS]
    assert not any(answer in str(shown) for answer in answers)
    assert all("What of rice, " in text for text in shown.examples)
