"""Porter's stemmer (1980) with NLTK's extensions, as rouge-score's `use_stemmer=True` applies it.

A word of more than three letters loses its ending step by step. In each step the first rule whose
ending fits is taken, or the word stays when that rule's condition does not hold. "Measure" is m in
Porter's [C](VC)^m[V].
"""

from __future__ import annotations

import dataclasses
import re
from functools import lru_cache
from typing import Final

import numpy as np

from toque.evaluation.text_metrics.token_hashes import Tokens, word_tokens

SHORTEST: Final = 4
"""Letters from which on a word is stemmed."""
_IRREGULAR: Final = {
    "skies": "sky", "dying": "die", "lying": "lie", "tying": "tie", "innings": "inning",
    "outings": "outing", "cannings": "canning",
} | {w: w for w in "sky news inning outing canning howe proceed exceed succeed".split()}  # noqa: SIM905  # fmt: skip
_STEP_2: Final = (
    ("ational", "ate"), ("tional", "tion"), ("enci", "ence"), ("anci", "ance"), ("izer", "ize"),
    ("bli", "ble"), ("alli", "al"), ("entli", "ent"), ("eli", "e"), ("ousli", "ous"),
    ("ization", "ize"), ("ation", "ate"), ("ator", "ate"), ("alism", "al"), ("iveness", "ive"),
    ("fulness", "ful"), ("ousness", "ous"), ("aliti", "al"), ("iviti", "ive"), ("biliti", "ble"),
    ("fulli", "ful"), ("logi", "log"),
)  # fmt: skip
_STEP_3: Final = (
    ("icate", "ic"), ("ative", ""), ("alize", "al"), ("iciti", "ic"), ("ical", "ic"), ("ful", ""),
    ("ness", ""),
)  # fmt: skip
_STEP_4: Final = (
    "al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou",
    "ism", "ate", "iti", "ous", "ive", "ize",
)  # fmt: skip
_VOWEL_CONSONANT: Final = re.compile("v+c+")


@lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """The stem of a lower-case word of any length.

    >>> [porter_stem(word) for word in ("tomatoes", "chopped", "finely", "baking", "skies")]
    ['tomato', 'chop', 'fine', 'bake', 'sky']
    """
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _step_1b(_step_1a(word))
    if word.endswith("y") and len(word) > 2 and _shape(word)[-2] == "c":
        word = word[:-1] + "i"
    word = _step_4(_step_3(_step_2(word)))
    if word.endswith("e"):
        stem = word[:-1]
        if _measure(stem) > 1 or (_measure(stem) == 1 and not _ends_cvc(stem)):
            word = stem
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word


def stemmed(tokens: Tokens) -> Tokens:
    """The same tokens with the hashes of their stems."""
    distinct, first, which = np.unique(tokens.hashes, return_index=True, return_inverse=True)
    starts, ends = tokens.spans
    words = [tokens.data[starts[i] : ends[i]].decode() for i in first.tolist()]
    stems = [porter_stem(word) if len(word) >= SHORTEST else word for word in words]
    hashes = word_tokens(stems).hashes if len(distinct) else distinct
    return dataclasses.replace(tokens, hashes=hashes[which])


def _shape(word: str) -> str:
    """A "c" for each consonant and a "v" for each vowel; y after a consonant is a vowel."""
    shape = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and shape.endswith("c"))
        shape += "v" if vowel else "c"
    return shape


def _measure(word: str) -> int:
    return len(_VOWEL_CONSONANT.findall(_shape(word)))


def _ends_cvc(word: str) -> bool:
    shape = _shape(word)
    return (shape.endswith("cvc") and word[-1] not in "wxy") or shape == "vc"


def _step_1a(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _step_1b(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    ending = next((e for e in ("ed", "ing") if word.endswith(e)), None)
    stem = word[: -len(ending)] if ending else ""
    if "v" not in _shape(stem):
        return word
    if stem.endswith(("at", "bl", "iz")):
        return stem + "e"
    if len(stem) > 1 and stem[-1] == stem[-2] and _shape(stem)[-1] == "c":
        return stem if stem[-1] in "lsz" else stem[:-1]
    return stem + "e" if _measure(stem) == 1 and _ends_cvc(stem) else stem


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    for ending, new in _STEP_2:
        if word.endswith(ending):
            # The l of "logi" counts with the stem, so that "geology" is one too.
            kept = word[:-3] if ending == "logi" else word[: -len(ending)]
            return word[: -len(ending)] + new if _measure(kept) > 0 else word
    return word


def _step_3(word: str) -> str:
    for ending, new in _STEP_3:
        if word.endswith(ending):
            stem = word[: -len(ending)]
            return stem + new if _measure(stem) > 0 else word
    return word


def _step_4(word: str) -> str:
    for ending in _STEP_4:
        if word.endswith(ending):
            stem = word[: -len(ending)]
            fits = _measure(stem) > 1 and (ending != "ion" or stem[-1] in "st")
            return stem if fits else word
    return word
