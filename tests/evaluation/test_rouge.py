"""ROUGE equals rouge-score 0.1.2 for ASCII words, and reads the words of any script."""

import random
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.evaluation.rouge import NAMES, rouge_f1

rouge_scorer = pytest.importorskip(
    "rouge_score.rouge_scorer", reason="rouge-score is the oracle"
)


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
    # rouge-score splits "jalapeño" into "jalape" and "o".
    pairs = zip(predictions[:n], references[:n], strict=True)
    ascii_words = [
        pair for pair in pairs if not any(is_foreign(c) for text in pair for c in text)
    ]
    assert len(ascii_words) > n / 2
    assert worst_difference(*map(list, zip(*ascii_words, strict=True))) < 1e-12


def is_foreign(character):
    return character.isalpha() and not character.isascii()


SCRIPTS = {
    "Russian": "Нарежьте лук и обжарьте на масле",
    "Greek": "ΨΙΛΟΚΟΒΟΥΜΕ τα κρεμμύδια ΟΛΟΥΣ",
    "Hindi": "हिन्दी में नुस्खा लिखें",
    "Tamil": "வெங்காயத்தை நறுக்கி வதக்கவும்",
    "Arabic with marks": "الطَّبخُ السَّهل لذيذ",
    "Hebrew": "קוצצים בצל ומטגנים",
    "Korean": "김치를 잘게 썰어 볶는다",
    "Chinese": "把豆腐切成小块，加入酱油。",
    "Japanese": "豆腐を切ってスープに入れる",
    "Thai": "ใส่น้ำมันลงในกระทะ",
    "Lao": "ໃສ່ນ້ຳມັນ",
    "Khmer": "ចៀនខ្ទឹមបារាំង",
    "Burmese": "ကြက်သွန်ကိုလှီးပါ",
    "Tibetan": "བོད་ཡིག་ཟ་མ",
    "Turkish": "İçli köfte ve ılık su",
    "French": "Crème brûlée au café",
    "mixed": "豆腐 tofu и соевый соус 醤油",
}


@pytest.mark.parametrize("text", SCRIPTS.values(), ids=SCRIPTS)
def test_equal_texts_of_any_script_score_one(text):
    forms = [text, unicodedata.normalize("NFD", text), text.upper()]
    assert rouge_f1(forms[:2], [text] * 2).tolist() == [[1.0] * 3] * 2
    assert rouge_f1(["zzz yyy xxx"], [text])[0, 0] == 0
    if (
        text.upper().casefold() == text.casefold()
    ):  # not of Turkish, where "ı" and "I" differ
        assert rouge_f1(forms[2:], [text]).tolist() == [[1.0] * 3]


@pytest.mark.parametrize(
    ("prediction", "reference", "shared"),
    [
        ("лук соль", "лук перец", 1 / 2),
        ("हिन्दी किताब", "हिन्दी कहानी", 1 / 2),  # vowel signs do not split words
        ("豆腐スープ", "豆腐スタア", 3 / 5),
        ("豆腐 tofu 2", "豆腐 tofu 3", 3 / 4),
        ("น้ำ ปลา", "น้ำ ปู", 1 / 2),
        ("İstanbul kebabı", "istanbul kebabı", 1),
        ("350ºF", "350 f", 1),  # a sign, as in rouge-score
        ("1\ufe0f\u20e3 egg ❤\ufe0f", "1 egg", 1),
        ("¡½!", "!½¡", 0),
    ],
)
def test_words_of_other_scripts_by_hand(prediction, reference, shared):
    assert rouge_f1([prediction], [reference])[0, 0] == pytest.approx(shared)


def test_texts_that_are_empty_or_full_of_marks():
    words = ("20 \u212a", "½ cup", "350 ºF", "a\n\n\nb\n", "a \ud800")
    odd = ["", "\n", "!!!", *words]
    pairs = [(a, b) for a in odd for b in odd]
    assert worst_difference(*map(list, zip(*pairs, strict=True))) < 1e-12


def test_texts_without_words_score_one_if_they_are_equal():
    pairs = [
        ("🍅🍆", "🍅🍆\n"),
        ("🍅🍆", "🍅🍲"),
        ("🍅", "soup"),
        ("½", "¼"),
        ("\ud800", "\ud800"),
    ]
    assert rouge_f1(*map(list, zip(*pairs, strict=True)))[:, 0].tolist() == [
        1,
        0,
        0,
        0,
        1,
    ]


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
