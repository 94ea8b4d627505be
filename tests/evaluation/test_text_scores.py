import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from toque import configure
from toque.evaluation.bootstrap import PerText, TextTable, estimate_scores, sample_texts
from toque.evaluation.ngram_metrics import (
    distinct_share,
    hash_ngrams,
    hash_words,
    repetition,
)
from toque.evaluation.rouge import NAMES as ROUGE
from toque.evaluation.text_samples import Sample
from toque.evaluation.text_scores import PART, ScoresByTask, TextScores


def sample(
    text, reference="the reference text of four and more words", kind="a", **metrics
):
    return Sample("prompt", text, 1, reference, metrics, {"kind": kind})


def test_intervals_are_those_of_a_loop():
    rng = np.random.default_rng(3)
    values = rng.normal(size=57)
    values[5] = np.nan
    found = estimate_scores({"x": PerText.mean(values)}, resamples=200)["x"]
    assert (sample_texts(57, 4) != sample_texts(57, 5)).any()
    means = [np.nanmean(values[sample_texts(57, b)]) for b in range(200)]
    assert found.value == pytest.approx(np.nanmean(values))
    assert [found.low, found.high] == pytest.approx(
        np.quantile(means, [0.025, 0.975]).tolist()
    )
    assert found.n == 56


def test_one_text_has_no_interval_and_none_no_score():
    one = estimate_scores(
        {"x": PerText.mean(np.array([0.5])), "y": PerText.mean(np.array([np.nan]))}
    )
    assert list(one) == ["x"]
    assert (one["x"].value, one["x"].low) == (0.5, None)


def test_parts_score_as_the_whole():
    texts = [
        f"some text {i} of four and more words {i * 7 % 5}" for i in range(PART + 20)
    ]
    samples = [sample(text, good=i / 10) for i, text in enumerate(texts)]
    whole, single = TextScores(), TextScores()
    whole.add(samples)
    for one in samples:
        single.add([one])
    ways = [scores.result(resamples=20) for scores in (whole, single)]
    assert replace(ways[0], each={}) == replace(ways[1], each={})
    tables = [TextTable(way.keys, way.each).record() for way in ways]
    assert tables[0] == tables[1]


def test_texts_without_reference_or_score_are_left_out_and_counted():
    scores = TextScores()
    scores.add([sample("the reference text of four and more words", good=1.0)])
    scores.add(
        [
            sample("nothing like it at all", None),
            sample("and this neither really", late=0.5),
        ]
    )
    found = scores.result(resamples=10).overall
    assert (found["rouge1"].n, found["bleu"].n, found["good"].n, found["late"].n) == (
        2,
        2,
        1,
        1,
    )
    assert found["good"].value == 1.0
    assert found["repetition"].n == 3


def test_slices_are_scored_on_their_own_and_only_what_was_asked_for():
    scores = TextScores(groups=("rouge", "recipe"))
    scores.add([sample("x", kind="b", good=0.0), sample("y", kind="a", good=1.0)])
    scores.add([sample("z", kind="b", good=0.5)])
    found = scores.result(resamples=10)
    assert found.slices["kind"]["a"]["good"].value == 1.0
    assert found.slices["kind"]["b"]["good"].value == 0.25
    assert found.sizes == {"kind": {"a": 1, "b": 2}}
    assert set(found.overall) == {"good", *ROUGE}


def test_a_metric_of_the_user_that_raises_is_named_and_the_others_survive():
    def lengths(predictions, references):
        assert len(predictions) == len(references)
        return {"words": [len(p.split()) for p in predictions], "all": len(predictions)}

    def broken(*_texts):
        return {"x": 1 / 0}

    def shapeless(*_texts):
        return {"x": [1.0] * 7}

    def thief(*_texts):
        return {"rouge1": 1.0}

    def constant(*_texts):
        return {"correlation": float("nan"), "fine": 1.0}

    def endless(*_texts):
        return {"ratio": [1.0, float("inf")]}

    users = {
        "m:lengths": lengths,
        "m:broken": broken,
        "m:shapeless": shapeless,
        "m:thief": thief,
    }
    users |= {"m:constant": constant, "m:endless": endless}
    scores = TextScores(groups=("rouge",), user_metrics=users)
    scores.add([sample("one two"), sample("one two three four")])
    found = scores.result(resamples=50)
    assert found.overall["words"].value == 3.0
    assert 2.0 <= found.overall["words"].low <= 3.0
    assert (found.overall["all"].value, found.overall["all"].low) == (2.0, None)
    assert set(found.failed) == set(users) - {"m:lengths"}
    assert (
        found.failed["m:constant"]
        == "ValueError: correlation is infinite, or NaN for every text"
    )
    assert (
        found.failed["m:endless"]
        == "ValueError: ratio is infinite, or NaN for every text"
    )
    assert found.failed["m:broken"] == "ZeroDivisionError: division by zero"
    assert "rouge1" in found.overall


OWN_TASK = {"joke": {"prompt": "{a}", "target": "{b}", "metrics": ["own:of_task"]}}


@pytest.mark.parametrize(
    ("task", "name"),
    [("", n) for n in ("loss", "perplexity", "bits_per_byte", "texts", "target_tokens")]
    + [
        ("", "joke_loss"),
        ("joke", "loss"),
        ("joke", "choice_accuracy"),
        ("joke", "ece"),
    ],
)
def test_a_score_of_the_user_takes_no_name_of_a_held_out_examples_score(
    task, name, monkeypatch
):
    """The run would go by it in place of the held-out loss."""
    of_texts, of_task = (lambda *_: {name: 0.5}, lambda *_: 1.0)
    if task:
        of_texts, of_task = of_task, of_texts
    monkeypatch.setitem(
        sys.modules, "own", SimpleNamespace(of_all=of_texts, of_task=of_task)
    )
    config = configure(evaluation={"metrics": ["own:of_all"]}, data={"tasks": OWN_TASK})
    scores = ScoresByTask.from_settings(config.evaluation, config.data, {})
    scores.add([sample("one"), replace(sample("two"), task="joke")])
    found = scores.result(resamples=0)
    failing, other = (
        ("joke_own:of_task", "of_all") if task else ("own:of_all", "joke_of_task")
    )
    assert found.failed == {
        failing: f"ValueError: the name {name} is taken; give the score another name"
    }
    assert found.metrics == {other: 1.0}


def test_a_metric_of_the_user_may_change_the_lists_that_it_gets():
    def clears(predictions, references):
        predictions.clear()
        references.clear()
        return 1.0

    scores = TextScores(
        (), {"m:clears": clears, "m:counts": lambda p, r: len(p) + len(r)}
    )
    scores.add([sample("one"), sample("two")])
    found = scores.result()
    assert (found.metrics, found.failed) == ({"clears": 1.0, "counts": 4.0}, {})


def test_a_metric_of_the_user_is_not_asked_about_no_texts():
    scores = TextScores(
        user_metrics={"m:mean": lambda texts, _: sum(map(len, texts)) / len(texts)}
    )
    assert scores.result().failed == {}


def test_repetition_and_distinct_by_hand():
    found = repetition(
        hash_words(["a b c d e", "stir and stir and stir and stir and", "a b c", ""])
    )
    assert found[:2].tolist() == [0.0, 0.6]
    assert np.isnan(found[2:]).all()
    parts = [hash_words(["a b a b", "b a"]), hash_words(["a c"])]  # ab ba ab, ba; ac
    assert distinct_share([hash_ngrams(part, 2)[0] for part in parts]) == 3 / 5
    assert distinct_share([]) is None
