"""Recipe quality score in [0, 1], based on form and coherence, not on taste.

The score has these parts, each in [0, 1]:

* title: a name of 1 to 12 words with letters, neither in capitals nor a link.
* ingredients: share of lines that name a food; full from 2 lines.
* amounts: share of lines with an amount, or that need none ("salt to taste").
* steps: share of steps with a cooking verb.
* used: share of ingredients in the steps; "all ingredients" is 3/4 of a mention of each.
* length: 20 to 800 words of directions; reduced proportionally outside.
* unique: share of lines and steps that do not repeat.
* clean: share of texts without markup, links, adverts, broken characters.
* language: share of English words that the rules know among all words; full from 30 %.

score = 0.6 * weighted mean + 0.4 * the weakest part of `ESSENTIAL`. A good list of ingredients
cannot replace missing directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Final

from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.cooking.labels.features import Reading
from toque.cooking.text_keys import (
    ACTION_VERBS,
    VERB_FORMS,
    share,
    share_different,
    words_of,
)

WEIGHTS: Final[dict[str, float]] = {
    "title": 0.05, "ingredients": 0.15, "amounts": 0.15, "steps": 0.2, "used": 0.2,
    "length": 0.1, "unique": 0.05, "clean": 0.05, "language": 0.05,
}  # fmt: skip
ESSENTIAL: Final = (
    "ingredients",
    "steps",
    "used",
    "length",
    "unique",
    "clean",
    "language",
)
WEAKEST_SHARE: Final = 0.4

MIN_WORDS: Final = 20
MAX_WORDS: Final = 800
MAX_TITLE_WORDS: Final = 12
ENGLISH_SHARE: Final = 0.3
COLLECTIVE_CREDIT: Final = 0.75

_DIRT: Final = re.compile(
    r"<[a-z/!][^<>]*>|&[a-z]{2,8};|&#\d+;|https?:|www\.|\ufffd|[ÃÂ][\x80-\xbf€™©¢]|â€|"
    r"add all ingredients to (?:list|cart)|advertisement|click (?:here|the)|\bsubscribe\b|"
    r"all rights reserved|copyright|©|follow (?:us|me) on|\bfacebook\b|\binstagram\b|"
    r"pinterest|e-?mail (?:us|me|address)|print recipe|watch (?:the )?video|lorem ipsum|"
    r"read more|\bcookie policy\b|log ?in|sign up|\{\{|\}\}|\[/?\w+\]|\bnull\b|undefined",
    re.IGNORECASE,
)
_SUSPECT_SIGNS: Final = re.compile("[<&{}\\[\\]\ufffdÃÂâ©]")
_SUSPECT_WORDS: Final = frozenset(
    """
    http https www list cart advertisement click subscribe rights copyright follow facebook
    instagram pinterest email mail print watch lorem read policy log login sign null undefined
    """.split()  # noqa: SIM905
)
_COLLECTIVE: Final = re.compile(
    r"\b(?:all|every|remaining|other|rest of the|first \w+|dry|wet|the|your|of) (?:of )?(?:the )?"
    r"(?:\w+ )?ingredients|\beverything\b|\ball together\b|\bingredients (?:in|into|together)",
    re.IGNORECASE,
)
_FUNCTION_WORDS: Final = frozenset(
    """
    a about add after all an and are as at be before but by each for from have if in into is it its
    just let more no not of off on one or other out over per remaining so that the their them then
    there this to together until up using very when which while will with without you your well
    about inch degrees minutes minute hours hour oven pan bowl skillet heat pot saucepan medium
    large small high low hot cold warm top side sides aside mixture dish sheet seconds second
    """.split()  # noqa: SIM905
)
_ENGLISH: Final = _FUNCTION_WORDS | ACTION_VERBS | {word.lower() for word in SPELLINGS}
# A pattern that starts with a set is searched faster.
_SENTENCE_END: Final = re.compile(r"[.!?](?<![.!?][.!?])[.!?]*+\s+")


@dataclass(frozen=True, slots=True)
class Quality:
    """A quality score and its parts, all in [0, 1]."""

    score: float
    parts: Mapping[str, float]


def quality_of(reading: Reading) -> Quality:
    """Score a recipe."""
    recipe, lines = reading.recipe, reading.lines
    title = recipe.title
    n_tokens = reading.n_tokens
    words = reading.words

    named = bool(words_of(title)) and not _DIRT.search(title)
    too_long, shouted = (
        len(title.split()) > MAX_TITLE_WORDS,
        title.isupper() and len(title) > 3,
    )
    length = (
        MAX_WORDS / n_tokens if n_tokens > MAX_WORDS else min(1.0, n_tokens / MIN_WORDS)
    )
    sentences = _SENTENCE_END.sub("\n", "\n".join(recipe.steps)).split("\n")
    english = sum(map(_ENGLISH.__contains__, words)) / max(len(words), 1)

    parts = {
        "title": 1.0 - 0.5 * too_long - 0.25 * shouted if named else 0.0,
        "ingredients": share(line.is_named for line in lines)
        * min(1.0, len(lines) / 2.0),
        "amounts": share(line.has_amount for line in lines),
        "steps": share(
            not VERB_FORMS.isdisjoint(words) for words in reading.step_words
        ),
        "used": _used(reading),
        "length": length,
        "unique": min(
            share_different([line.words for line in lines]),
            share_different(
                [tuple(words_of(s)) for s in sentences if s.count(" ") > 2]
            ),
        ),
        "clean": _clean(reading),
        "language": min(1.0, english / ENGLISH_SHARE),
    }

    mean = sum(map(mul, WEIGHTS.values(), parts.values()))
    weakest = min(map(parts.__getitem__, ESSENTIAL))
    return Quality(
        round((1.0 - WEAKEST_SHARE) * mean + WEAKEST_SHARE * weakest, 4), parts
    )


def _used(reading: Reading) -> float:
    lines = reading.lines
    if not lines:
        return 0.0
    stems = set(map(stem, reading.different - _FUNCTION_WORDS))
    missing = sum(stems.isdisjoint(line.stems) for line in lines)
    taken_up = (
        COLLECTIVE_CREDIT if missing and _COLLECTIVE.search(reading.text) else 0.0
    )
    return (len(lines) - missing + taken_up * missing) / len(lines)


def _clean(reading: Reading) -> float:
    recipe = reading.recipe
    names = (recipe.title, *recipe.ingredients)
    texts = (*names, *recipe.steps)
    # The signs and words are nearly always absent, and ten times faster than the pattern.
    if (
        _SUSPECT_WORDS.isdisjoint(reading.different)
        and _SUSPECT_WORDS.isdisjoint(words_of("\n".join(names)))
        and not _SUSPECT_SIGNS.search("\n".join(texts))
    ):
        return 1.0
    return 1.0 - sum(_DIRT.search(text) is not None for text in texts) / len(texts)
