"""Real runs leave scores by text whose sums are their scores."""

from __future__ import annotations

import json

import pytest

import toque
from tiny import shape_yaml
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook
from toque.evaluation.bootstrap import FILE, estimates, from_json

CONFIG = """
run_dir: first
model: {{family: {family}, tokenizer: "trained:512", shape: {shape}}}
data: {{sources: [{{path: recipes.jsonl}}], store: store, max_prompt_tokens: 64,
  max_target_tokens: 200}}
optim: {{warmup: "1 steps"}}
train: {{stop_after: "2 steps", batch: "1024 tokens", precision: float32, pack: {pack}}}
evaluation: {{max_examples: 12, generate: 2}}
"""


@pytest.mark.parametrize(
    ("family", "pack"),
    [
        ("gpt2", "true"),
        pytest.param("gpt2", "false", marks=pytest.mark.slow),
        pytest.param("t5", "true", marks=pytest.mark.slow),
    ],
)
def test_the_scores_by_text_are_those_of_the_run(tmp_path, monkeypatch, family, pack):
    monkeypatch.chdir(tmp_path)
    write_cookbook(tmp_path / "recipes.jsonl", n=150, seed=2)
    shape = shape_yaml(family, positions=512)
    (tmp_path / "my.yaml").write_text(CONFIG.format(family=family, shape=shape, pack=pack))
    assert main(["train", "my.yaml"]) == 0
    scored = json.loads((tmp_path / "first" / "evaluation.json").read_text())
    by_text = from_json((tmp_path / "first" / FILE).read_bytes())
    losses = estimates(by_text.examples.measures, resamples=0)
    assert losses["loss"].n >= 5
    assert losses["loss"].value == pytest.approx(scored["heldout"]["loss"], rel=1e-5)
    bits = scored["heldout"]["bits_per_byte"]
    assert losses["bits_per_byte"].value == pytest.approx(bits, rel=1e-5)
    for name, estimate in estimates(by_text.texts.measures, resamples=0).items():
        assert estimate.value == pytest.approx(scored["generated"][name], abs=1e-5), name
    assert main(["train", "my.yaml", "run_dir=other", "seed=9"]) == 0
    found = toque.compare("first", "other")
    assert found.record["differences"]["other"]["loss"]["pairs"] == losses["loss"].n
    assert "seed" in found.record["settings"]
