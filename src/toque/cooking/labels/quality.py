"""Recipe quality score in [0, 1], based on form and coherence, not on taste.

The score has these parts, each in [0, 1]:

* title: 1 for a name of at most 12 words, less for a longer one or for capitals, 0 for a link.
* ingredients: fraction of lines that name a food. A recipe with one line gets half of it.
* amounts: fraction of lines with an amount, or that need none ("salt to taste").
* steps: fraction of steps with a cooking verb.
* used: fraction of ingredients in the steps. "All ingredients" counts 3/4 of a mention of each.
* length: 1 for 20 to 800 words of directions, proportionally less outside of these limits.
* unique: fraction of distinct ingredient lines or of distinct sentences, whichever is lower.
* clean: fraction of texts without markup, links, adverts and broken characters.
* language: fraction of known English words, divided by 30 % and at most 1.

score = 0.6 * weighted mean + 0.4 * the lowest part of `ESSENTIAL`. A good list of ingredients
cannot compensate for missing directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul

from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.cooking.labels.features import Reading
from toque.cooking.normalised_words import (
    ACTION_VERBS,
    VERB_FORMS,
    share_distinct,
    share_true,
    words_of,
)

WEIGHTS: dict[str, float] = {
    "title": 0.05, "ingredients": 0.15, "amounts": 0.15, "steps": 0.2, "used": 0.2,
    "length": 0.1, "unique": 0.05, "clean": 0.05, "language": 0.05,
}  # fmt: skip
ESSENTIAL = (
    "ingredients",
    "steps",
    "used",
    "length",
    "unique",
    "clean",
    "language",
)
"""Essential parts of the score. The lowest of them has the weight `WEAKEST_SHARE`."""
WEAKEST_SHARE = 0.4

MIN_WORDS = 20
MAX_WORDS = 800
MAX_TITLE_WORDS = 12
ENGLISH_SHARE = 0.3
COLLECTIVE_CREDIT = 0.75
"""Credit for each ingredient that the steps mention only as one of "all ingredients"."""

_DIRT = re.compile(
    r"<[a-z/!][^<>]*>|&[a-z]{2,8};|&#\d+;|https?:|www\.|\ufffd|[ÃÂ][\x80-\xbf€™©¢]|â€|"
    r"add all ingredients to (?:list|cart)|advertisement|click (?:here|the)|\bsubscribe\b|"
    r"all rights reserved|copyright|©|follow (?:us|me) on|\bfacebook\b|\binstagram\b|"
    r"pinterest|e-?mail (?:us|me|address)|print recipe|watch (?:the )?video|lorem ipsum|"
    r"read more|\bcookie policy\b|log ?in|sign up|\{\{|\}\}|\[/?\w+\]|\bnull\b|undefined",
    re.IGNORECASE,
)
_SUSPECT_SIGNS = re.compile("[<&{}\\[\\]\ufffdÃÂâ©]")
_SUSPECT_WORDS = frozenset(
    """
    http https www list cart advertisement click subscribe rights copyright follow facebook
    instagram pinterest email mail print watch lorem read policy log login sign null undefined
    """.split()  # noqa: SIM905
)
_COLLECTIVE = re.compile(
    r"\b(?:all|every|remaining|other|rest of the|first \w+|dry|wet|the|your|of) (?:of )?(?:the )?"
    r"(?:\w+ )?ingredients|\beverything\b|\ball together\b|\bingredients (?:in|into|together)",
    re.IGNORECASE,
)
_FUNCTION_WORDS = frozenset(
    """
    a about add after all an and are as at be before but by each for from have if in into is it its
    just let more no not of off on one or other out over per remaining so that the their them then
    there this to together until up using very when which while will with without you your well
    about inch degrees minutes minute hours hour oven pan bowl skillet heat pot saucepan medium
    large small high low hot cold warm top side sides aside mixture dish sheet seconds second
    """.split()  # noqa: SIM905
)
_ENGLISH = _FUNCTION_WORDS | ACTION_VERBS | {word.lower() for word in SPELLINGS}
# A pattern that starts with a set is searched faster.
_SENTENCE_END = re.compile(r"[.!?](?<![.!?][.!?])[.!?]*+\s+")


@dataclass(frozen=True, slots=True)
class Quality:
    """A quality score and its parts, all in [0, 1]."""

    score: float
    parts: Mapping[str, float]


def quality_of(reading: Reading) -> Quality:
    """Score a recipe."""
    lines = reading.lines
    named_share = share_true(line.is_named for line in lines)
    has_verb = (not VERB_FORMS.isdisjoint(words) for words in reading.step_words)
    parts = {
        "title": _title_score(reading.recipe.title),
        "ingredients": named_share * min(1.0, len(lines) / 2.0),
        "amounts": share_true(line.has_amount for line in lines),
        "steps": share_true(has_verb),
        "used": _used_share(reading),
        "length": _length_score(reading.n_tokens),
        "unique": _distinct_share(reading),
        "clean": _clean_share(reading),
        "language": _language_score(reading.words),
    }
    mean = sum(map(mul, WEIGHTS.values(), parts.values()))
    weakest = min(parts[name] for name in ESSENTIAL)
    score = (1.0 - WEAKEST_SHARE) * mean + WEAKEST_SHARE * weakest
    return Quality(round(score, 4), parts)


def _title_score(title: str) -> float:
    """Score the form of a title: 0.0 for a title without words or with markup or a link."""
    if not words_of(title) or _DIRT.search(title):
        return 0.0
    is_too_long = len(title.split()) > MAX_TITLE_WORDS
    is_in_capitals = title.isupper() and len(title) > 3  # "BLT" is a usual title
    return 1.0 - 0.5 * is_too_long - 0.25 * is_in_capitals


def _used_share(reading: Reading) -> float:
    """Return the fraction of ingredients that the steps mention by name or as "all ingredients"."""
    lines = reading.lines
    if not lines:
        return 0.0
    stems = set(map(stem, reading.distinct_words - _FUNCTION_WORDS))
    n_missing = sum(stems.isdisjoint(line.stems) for line in lines)
    credit = 0.0
    if n_missing and _COLLECTIVE.search(reading.text):
        credit = COLLECTIVE_CREDIT
    return (len(lines) - n_missing + credit * n_missing) / len(lines)


def _length_score(n_words: int) -> float:
    if n_words > MAX_WORDS:
        return MAX_WORDS / n_words
    return min(1.0, n_words / MIN_WORDS)


def _distinct_share(reading: Reading) -> float:
    """Return the lower fraction of distinct ingredient lines and of distinct sentences."""
    sentences = _SENTENCE_END.sub("\n", "\n".join(reading.recipe.steps)).split("\n")
    # Short sentences such as "Stir again" may repeat.
    long_sentences = [text for text in sentences if text.count(" ") > 2]
    return min(
        share_distinct([line.words for line in reading.lines]),
        share_distinct([tuple(words_of(text)) for text in long_sentences]),
    )


def _clean_share(reading: Reading) -> float:
    """Return the fraction of title, lines and steps without markup, links and adverts."""
    recipe = reading.recipe
    names = (recipe.title, *recipe.ingredients)
    texts = (*names, *recipe.steps)
    # Nearly all recipes have neither such words nor signs, which are ten times faster to find.
    if (
        _SUSPECT_WORDS.isdisjoint(reading.distinct_words)
        and _SUSPECT_WORDS.isdisjoint(words_of("\n".join(names)))
        and not _SUSPECT_SIGNS.search("\n".join(texts))
    ):
        return 1.0
    n_unclean = sum(_DIRT.search(text) is not None for text in texts)
    return 1.0 - n_unclean / len(texts)


def _language_score(words: list[str]) -> float:
    english_share = sum(map(_ENGLISH.__contains__, words)) / max(len(words), 1)
    return min(1.0, english_share / ENGLISH_SHARE)
