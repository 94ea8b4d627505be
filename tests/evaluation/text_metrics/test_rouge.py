from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.evaluation.text_metrics import lcs
from toque.evaluation.text_metrics.lcs import lcs_length, lcs_lengths
from toque.evaluation.text_metrics.ngram_overlap import MAX_PAIRS
from toque.evaluation.text_metrics.porter import porter_stem
from toque.evaluation.text_metrics.rouge import NAMES, rouge
from toque.evaluation.text_metrics.token_hashes import word_tokens

rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is the oracle")


def worst_difference(predictions, references, *, stem=False):
    ours = rouge(predictions, references, stem=stem)
    oracle = rouge_scorer.RougeScorer(list(NAMES), use_stemmer=stem)
    theirs = [oracle.score(r, p) for p, r in zip(predictions, references, strict=True)]
    return max(np.abs(ours[n] - np.array([scores[n] for scores in theirs])).max() for n in NAMES)


def test_a_case_by_hand():
    # Words: the cat sat on / the mat, against: the cat lay on / the mat.
    scores = rouge(["The cat sat on\nthe mat."], ["the cat lay on\nthe MAT"])
    assert scores["rouge1"].tolist() == [[5 / 6, 5 / 6, 5 / 6]]
    assert scores["rouge2"].tolist() == [[3 / 5, 3 / 5, 3 / 5]]
    assert scores["rougeL"].tolist() == [[5 / 6, 5 / 6, 5 / 6]]
    assert scores["rougeLsum"].tolist() == [[5 / 6, 5 / 6, 5 / 6]]


def test_real_pairs_score_as_rouge_score_says(real_pairs):
    predictions, references = real_pairs
    assert worst_difference(predictions[:40], references[:40]) < 1e-12
    assert worst_difference(predictions[40:60], references[40:60], stem=True) < 1e-12


@pytest.mark.slow
def test_a_thousand_real_pairs_score_as_rouge_score_says(real_pairs):
    assert worst_difference(*real_pairs) < 1e-12


def test_texts_that_are_empty_foreign_or_full_of_marks():
    odd = [
        "",
        "\n",
        "!!!",
        "Crème brûlée",
        "İçli köfte",
        "20 \u212a",
        "½ cup",
        "a\n\n\nb\n",
        "\ud800",
    ]
    pairs = [(a, b) for a in odd for b in odd]
    assert worst_difference(*map(list, zip(*pairs, strict=True))) < 1e-12


def test_other_letters_never_lower_to_a_letter_of_a_token():
    everything = [chr(c) for c in range(128, 0x20000) if not 0xD800 <= c < 0xE000]
    with_letters = [c for c in everything if any(x.isascii() for x in c.lower())]
    tokens = word_tokens(with_letters)
    assert (tokens.counts == 1).all()
    assert not word_tokens([c for c in everything if c not in with_letters]).counts.any()


@given(st.integers(0, 10**9))
def test_few_words_many_lines(seed):
    rng = random.Random(seed)

    def text() -> str:
        lines = [
            " ".join(rng.choices("abcde", k=rng.randrange(9))) for _ in range(rng.randrange(6))
        ]
        return "\n".join(lines)

    pairs = [(text(), text()) for _ in range(20)]
    assert worst_difference(*map(list, zip(*pairs, strict=True))) < 1e-12


@pytest.mark.parametrize("length", [62, 63, 64, 65, 127, 200])
def test_sentences_around_the_length_of_a_word_of_bits(length):
    rng = random.Random(length)
    texts = [" ".join(rng.choices("abcdefgh", k=length + i % 2)) for i in range(8)]
    assert worst_difference(texts[:4], texts[4:]) < 1e-12


def test_scores_do_not_depend_on_the_company(real_pairs):
    predictions, references = real_pairs
    together = rouge(predictions[:MAX_PAIRS], references[:MAX_PAIRS])
    alone = rouge(predictions[7:8], references[7:8])
    assert all((together[name][7] == alone[name][0]).all() for name in NAMES)


def test_lcs_length_of_lists():
    assert lcs_length([], []) == lcs_length([1], []) == 0
    assert lcs_length([1, 2, 3, 2, 1], [2, 1, 3, 1]) == 3


@pytest.mark.parametrize("longest", [1, 30, 4096])
def test_lengths_together_are_those_of_each(monkeypatch, longest):
    monkeypatch.setattr(lcs, "_LONGEST", longest)
    monkeypatch.setattr(lcs, "_TOGETHER", 4000)
    rng, n = random.Random(longest), 30
    references = [
        [9 * i + rng.randrange(9) for _ in range(rng.choice([0, 7, 8, 63, 90]))] for i in range(n)
    ]
    candidates = [rng.choices(words, k=rng.randrange(80)) if words else [] for words in references]
    sides = [
        (
            np.concatenate(list(map(np.array, texts))).astype(int),
            np.repeat(np.arange(n), [len(t) for t in texts]),
        )
        for texts in (references, candidates)
    ]
    expected = [lcs_length(a, b) for a, b in zip(references, candidates, strict=True)]
    assert lcs_lengths(*sides, n).tolist() == expected


def test_stems_are_nltks(real_pairs):
    nltk = pytest.importorskip("nltk.stem.porter").PorterStemmer()
    words = {word for text in real_pairs[1] for word in text.lower().split() if word.isascii()}
    words |= {"skies", "dying", "generalli", "hopefulli", "geologi", "ties", "cried", "agreed"}
    letters = {word for word in words if word.isalnum()}
    assert len(letters) > 3000
    assert {w: porter_stem(w) for w in letters} == {w: nltk.stem(w) for w in letters}
