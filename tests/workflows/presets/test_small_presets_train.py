"""The small presets train: shapes, data and length smaller, everything else as their files say."""

import json
from pathlib import Path

import pytest

from tiny import shape_yaml
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 4
RECIPES = "data.sources=[{path: recipes.jsonl}]"
SHORT = (
    f"train.stop_after={STEPS} steps",
    "train.save_every=2 steps",
    "train.evaluate_every=2 steps",
    "train.compile=false",
    "evaluation.max_examples=8",
    "evaluation.generate=2",
    "evaluation.texts=1",
)
PRESETS = {
    "demo": ("model.tokenizer=trained:512", RECIPES),
    "agi2-small": (
        f"model.shape={shape_yaml('gpt2', positions=512)}",
        "model.tokenizer=trained:512",
        "data.sources=[{path: corpus.txt, format: text}]",
    ),
    "recipe-gpt2-small": (
        f"model.shape={shape_yaml('gpt2', positions=1024)}",
        "model.tokenizer=trained:512",
        RECIPES,
    ),
    "recipe-t5-small": (
        f"model.shape={shape_yaml('t5')}",
        "model.tokenizer=trained:512",
        RECIPES,
    ),
    # LoRA on FLAN-T5 base, here on the model that the preset before has made.
    "fast-iteration": ("model.start_from=runs/recipe-t5-small/model", RECIPES),
}


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("presets")
    write_cookbook(folder / "recipes.jsonl", n=160, seed=3)
    records = map(json.loads, (folder / "recipes.jsonl").read_text().splitlines())
    (folder / "corpus.txt").write_text(
        "\n\n".join(json.dumps(record) for record in records)
    )
    return folder


@pytest.mark.parametrize("name", list(PRESETS))
def test_a_small_preset_trains_evaluates_and_finishes(kitchen, monkeypatch, name):
    monkeypatch.chdir(kitchen)
    words = (
        f"run_dir=runs/{name}",
        f"data.store=stores/{name}",
        *PRESETS[name],
        *SHORT,
    )
    assert main(["train", name, *words]) == 0
    run = kitchen / "runs" / name
    lines = [
        json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert "end" in {line["event"] for line in lines}
    evaluations = [line for line in lines if line["event"] == "evaluation"]
    assert [line["step"] for line in evaluations] == [2, 4]
    assert all(line["metrics"]["bits_per_byte"] > 0 for line in evaluations)
    scored = json.loads((run / "evaluation.json").read_text())
    assert scored["step"] in (2, 4)
    assert (run / "model" / "README.md").is_file()
