"""ROUGE is that of rouge-score 0.1.2, to the bit of a float, whatever the text."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.evaluation.rouge import NAMES, rouge_f1

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is the oracle")


def worst_difference(predictions, references):
    oracle = rouge_scorer.RougeScorer(list(NAMES))
    pairs = zip(predictions, references, strict=True)
    theirs = [[oracle.score(r, p)[name].fmeasure for name in NAMES] for p, r in pairs]
    return np.abs(rouge_f1(predictions, references) - np.array(theirs)).max()


def test_a_case_by_hand():
    # Words: the cat sat on / the mat, against: the cat lay on / the mat.
    scores = rouge_f1(["The cat sat on\nthe mat."], ["the cat lay on\nthe MAT"])
    assert scores.tolist() == [[5 / 6, 3 / 5, 5 / 6]]
    assert rouge_f1([], []).shape == (0, 3)


@pytest.mark.parametrize("n", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_real_pairs_score_as_rouge_score_says(n, real_pairs):
    predictions, references = real_pairs
    assert worst_difference(predictions[:n], references[:n]) < 1e-12


def test_texts_that_are_empty_foreign_or_full_of_marks():
    words = ("Crème brûlée", "İçli köfte", "20 \u212a", "½ cup", "a\n\n\nb\n", "\ud800")
    odd = ["", "\n", "!!!", *words]
    pairs = [(a, b) for a in odd for b in odd]
    assert worst_difference(*map(list, zip(*pairs, strict=True))) < 1e-12


@given(st.integers(0, 10**9))
def test_few_words_many_lines(seed):
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcde   \n", k=rng.randrange(60))) for _ in range(40)]
    assert worst_difference(texts[:20], texts[20:]) < 1e-12


@pytest.mark.parametrize("length", [62, 63, 64, 65, 127, 200])
def test_sentences_around_the_length_of_a_word_of_bits(length):
    rng = random.Random(length)
    texts = [" ".join(rng.choices("abcdefgh", k=length + i % 2)) for i in range(8)]
    assert worst_difference(texts[:4], texts[4:]) < 1e-12
