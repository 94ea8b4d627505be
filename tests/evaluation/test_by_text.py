"""Scores by text: kept, read back, and compared over the same texts."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from tiny import EVERY_KIND, examples, make, pack
from toque.evaluation.bootstrap import (
    PerText,
    TextTable,
    estimate_scores,
    from_json,
    losses_table,
    subtract_scores,
    to_json,
)
from toque.evaluation.text_samples import Sample
from toque.evaluation.text_scores import TextScores
from toque.models.forward.example_losses import nats_by_example
from toque.models.forward.loss import loss_sum


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_loss_of_each_example_is_that_of_it_alone(kind):
    model, some = make(kind), examples(5)
    with torch.no_grad():
        packed = pack(kind, [some[:3], some[3:]])
        found = nats_by_example(model, packed)
        alone = [float(loss_sum(model, pack(kind, [[one]]))) for one in some]
    assert [len(row) for row in found] == [3, 2]
    assert [loss for row in found for loss in row] == pytest.approx(alone, rel=1e-5)


def table_of(texts: list[tuple[str, str, str]]) -> tuple[TextTable, TextScores]:
    scores = TextScores()
    scores.add(
        Sample(prompt, text, 3, reference, {"recipe_score": len(text) / 100})
        for prompt, text, reference in texts
    )
    result = scores.result(resamples=0)
    return TextTable(result.keys, result.each), scores


def test_a_score_of_the_user_is_read_back():
    own = TextTable(
        ["a", "b", "c"], {"mine": PerText.mean(np.array([0.5, np.nan, 0.25]))}
    )
    (read,) = from_json(
        to_json(examples=own, texts=own, step=7).encode()
    ).texts.measures.values()
    assert read.values[:, 0].tolist() == [0.5, 0.0, 0.25]


TEXTS = [
    (f"dish {i}", f"cut {i} carrots and cook them", f"cut {i + 1} carrots")
    for i in range(9)
]


def test_what_is_read_back_scores_as_before():
    texts, scores = table_of(TEXTS)
    steps = np.arange(4.0)
    losses = losses_table(
        [f"k{i}" for i in range(4)], 10 + steps, np.full(4, 5.0), 20 + steps
    )
    read = from_json(to_json(examples=losses, texts=texts, step=7).encode())
    assert read.step == 7
    assert list(read.texts.keys) == list(texts.keys)
    before = scores.result().overall
    after = estimate_scores(read.texts.measures)
    assert set(after) == set(before) - {"distinct_1", "distinct_2"}
    for name, estimate in after.items():
        assert asdict(estimate) == pytest.approx(asdict(before[name]), abs=1e-6), name
    loss = estimate_scores(read.examples.measures)["loss"].value
    assert loss == pytest.approx((10 + 11 + 12 + 13) / 20)


@pytest.mark.parametrize(
    "damage",
    [
        {"form": 2},
        {"examples": {"keys": ["a"], "measures": {"loss": [[1.0, 2.0], [1.0]]}}},
        {"examples": {"keys": ["a"], "measures": {"loss": [[1.0]]}}},
        {"texts": {"keys": ["a"], "measures": {"bleu": [[1.0, 2.0, 3.0]]}}},
        {"texts": 3},
        {"examples": {"keys": ["a", "b"], "measures": {"loss": [[1.0, 2.0]]}}},
    ],
)
def test_a_damaged_file_is_refused(damage):
    whole = {"form": 1, "step": 1, "examples": {"keys": [], "measures": {}},
             "texts": {"keys": [], "measures": {}}}  # fmt: skip
    from_json(json.dumps(whole).encode())
    with pytest.raises(ValueError):
        from_json(json.dumps({**whole, **damage}).encode())


def test_pairing_sees_what_two_intervals_apart_do_not():
    drawn = np.random.default_rng(1)
    hard = drawn.normal(0.0, 1.0, 200)  # what makes a text hard is the same for both
    first, other = (
        PerText.mean(hard),
        PerText.mean(hard + 0.05 + drawn.normal(0, 0.1, 200)),
    )
    apart = estimate_scores({"a": first, "b": other})
    assert apart["b"].low < apart["a"].high
    found = subtract_scores(other, first)
    assert found.decided
    assert found.low < 0.05 < found.high
    assert not subtract_scores(first, PerText.mean(hard[::-1].copy())).decided


def test_only_texts_that_count_for_both_are_compared():
    first = PerText.mean(np.array([1.0, np.nan, 3.0, 4.0]))
    other = PerText.mean(np.array([2.0, 100.0, np.nan, 6.0]))
    assert subtract_scores(other, first).mean == 1.5
    assert subtract_scores(other, first).pairs == 2
    assert subtract_scores(other, PerText.mean(np.full(4, np.nan))) is None
