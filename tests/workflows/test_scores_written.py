"""Real runs leave scores by text whose sums are their scores."""

import json
from typing import Any

import pytest

import toque
from fixtures.kitchens import TINY
from tiny import shape_of
from toque.data.store.token_store import TokenStore
from toque.evaluation.bootstrap import FILE, estimate_scores, from_json
from toque.evaluation.memorisation import LONG, measure_memorisation
from toque.evaluation.text_samples import Sample


def copied_texts_are_found(recorded: dict[str, Any], store: TokenStore) -> None:
    """A training target is found whole in its own row, beside a reference that is none."""
    assert recorded["references"]["n"] == 2
    assert recorded["examples_read"] == recorded["examples"] == len(store.rows("train"))
    row, codec = int(store.rows("train")[-1]), store.codec()
    text = codec.decode(store.target(row))
    found = measure_memorisation([Sample("Soup?", text, 0, "so " * 40, {})], store)
    assert found is not None
    run = found.texts[0]
    assert run.tokens == run.length >= LONG
    assert codec.decode(store.target(run.example)) == text
    assert found.references[0].tokens == 0
    # What the prompt says is no matter of memory.
    found = measure_memorisation(
        [Sample(text, text, 0, None, {}), Sample("", "", 0, "Mix.", {})], store
    )
    assert found is not None
    assert [run.tokens for run in found.texts] == [0]
    assert measure_memorisation([Sample("Soup?", "Mix.", 0, None, {})], store) is None


@pytest.mark.parametrize(
    ("family", "pack"),
    [
        ("gpt2", True),
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        pytest.param("t5", True, marks=pytest.mark.slow),
    ],
)
def test_the_scores_by_text_are_those_of_the_run(own_kitchen, family, pack):
    config = toque.configure(
        TINY | {"model": {"family": family, "shape": shape_of(family, positions=512),
                          "tokenizer": "trained:512"}},
        run_dir="first",
        data={"store": "held", "validation_fraction": 0.2},
        train={"stop_after": "2 steps", "pack": pack},
        evaluation={"max_examples": 12, "generate": 2},
    )  # fmt: skip
    toque.train(config)
    scored = json.loads((own_kitchen / "first" / "evaluation.json").read_text())
    by_text = from_json((own_kitchen / "first" / FILE).read_bytes())
    losses = estimate_scores(by_text.examples.measures, resamples=0)
    assert losses["loss"].n >= 5
    assert losses["loss"].value == pytest.approx(scored["heldout"]["loss"], rel=1e-5)
    bits = scored["heldout"]["bits_per_byte"]
    assert losses["bits_per_byte"].value == pytest.approx(bits, rel=1e-5)
    for name, estimate in estimate_scores(by_text.texts.measures, resamples=0).items():
        assert estimate.value == pytest.approx(scored["generated"][name], abs=1e-5), (
            name
        )
    copied_texts_are_found(scored["memorisation"], TokenStore.open("held"))
    toque.train(toque.configure(config, run_dir="other", seed=9))
    found = toque.compare("first", "other")
    assert found.record["differences"]["other"]["loss"]["pairs"] == losses["loss"].n
    assert "seed" in found.record["settings"]
