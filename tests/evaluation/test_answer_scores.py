"""Scores of short answers, against what they are by hand."""

import numpy as np
import pytest

from toque.evaluation.answer_scores import (
    class_counts,
    macro_f1_of,
    token_f1,
    valid_json,
)
from toque.evaluation.classification import class_scores


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"a": [1, null]}', 1),
        (" 3 ", 1),
        ("{'a': 1}", 0),
        ("NaN", 0),
        ("", 0),
        ("[" * 99999, 0),
    ],
)
def test_json_is_one_value_of_the_standard(text: str, valid: int) -> None:
    assert valid_json(text) == valid


@pytest.mark.parametrize(
    ("text", "reference", "f1"),
    [
        ("a b b", "B a c", 2 / 3),
        ("", "", 1.0),
        ("?!", "a", 0.0),
        ("Crème.", "crème", 1.0),
        ("红茶。", "绿茶", 0.5),
        ("卵を焼く", "魚を焼く", 0.75),
        ("मीठी खीर", "फीकी खीर", 0.5),
        ("½ cup", "1/2 cup", 1.0),
        ("½ cup", "¼ cup", 2 / 3),
        ("🍅", "🍆", 0.0),
        ("🍅 ", "🍅", 1.0),
    ],
)
def test_token_f1_counts_common_words(text: str, reference: str, f1: float) -> None:
    assert token_f1(text, reference) == pytest.approx(f1)


def test_macro_f1_of_sums_is_that_of_the_confusion_table() -> None:
    draw, classes = np.random.default_rng(5), ["a", "b", "c", "d"]
    truths, answers = (draw.choice(classes[:n], 200).tolist() for n in (3, 4))
    sums = class_counts(answers, truths, classes).sum(axis=0)
    assert float(macro_f1_of(sums)) == class_scores(answers, truths, classes).macro_f1
    # An answer that is no class counts against the recall of its class alone.
    assert (
        float(macro_f1_of(class_counts(["a", "?"], ["a", "a"], classes).sum(axis=0)))
        == 2 / 3
    )
    assert np.isnan(macro_f1_of(np.zeros(12)))
