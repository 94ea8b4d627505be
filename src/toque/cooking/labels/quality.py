"""Recipe quality score in [0, 1], with its parts.

Each part is in [0, 1]:

* title: a name of 1 to 12 words, with letters, not shouted, no link.
* ingredients: share of lines that name a food; full from 2 lines on.
* amounts: share of lines with an amount, or that need none ("salt to taste").
* steps: share of steps that hold a cooking verb.
* used: share of ingredients that the steps mention. A step that takes up "all ingredients",
  "the dry ingredients" or "everything" counts as three quarters of a mention of each.
* length: directions of 20 words or more, up to 800; less in proportion outside.
* unique: share of lines and steps that do not repeat.
* clean: share of texts without markup, links, adverts, broken characters.
* language: share of English words the rules know among all words; full from 30 % on.

score = 0.6 * weighted mean + 0.4 * the weakest of the essential parts
(ingredients, steps, used, length, unique, clean, language): a fine list above missing
directions is no recipe. The score judges form and coherence; nobody has tasted anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Final

from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.cooking.labels.features import Reading
from toque.cooking.recipe import Recipe
from toque.cooking.text_keys import ACTION_VERBS, VERB_FORMS, share, share_different, words_of

WEIGHTS: Final[dict[str, float]] = {
    "title": 0.05,
    "ingredients": 0.15,
    "amounts": 0.15,
    "steps": 0.2,
    "used": 0.2,
    "length": 0.1,
    "unique": 0.05,
    "clean": 0.05,
    "language": 0.05,
}
ESSENTIAL: Final = ("ingredients", "steps", "used", "length", "unique", "clean", "language")
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
_SENTENCE_END: Final = re.compile(r"[.!?](?<![.!?][.!?])[.!?]*+\s+")  # a set first: searched faster


@dataclass(frozen=True, slots=True)
class Quality:
    """A score and its parts, all in [0, 1]."""

    score: float
    parts: Mapping[str, float]


def quality_of(reading: Reading) -> Quality:
    """Score a recipe.

    >>> from toque.cooking.labels.features import read
    >>> good = Recipe(
    ...     "Buttered Toast",
    ...     ("2 slices bread", "1 tablespoon butter"),
    ...     ("Toast the bread until golden on both sides.", "Spread with the butter, cut the toast "
    ...      "into triangles and serve at once while it is hot."),
    ... )
    >>> quality_of(read(good)).score
    1.0
    """
    recipe, lines = reading.recipe, reading.lines
    parts = {
        "title": _title(recipe.title),
        "ingredients": share(line.is_named for line in lines) * min(1.0, len(lines) / 2.0),
        "amounts": share(line.has_amount for line in lines),
        "steps": share(not VERB_FORMS.isdisjoint(words) for words in reading.step_words),
        "used": _used(reading),
        "length": _length(reading.n_tokens),
        "unique": min(share_different([line.words for line in lines]), _unique_sentences(recipe)),
        "clean": _clean(reading),
        "language": _language(reading.words),
    }
    mean = sum(map(mul, WEIGHTS.values(), parts.values()))
    weakest = min(map(parts.__getitem__, ESSENTIAL))
    return Quality(round((1.0 - WEAKEST_SHARE) * mean + WEAKEST_SHARE * weakest, 4), parts)


def _title(title: str) -> float:
    if not words_of(title) or _DIRT.search(title):
        return 0.0
    too_long = len(title.split()) > MAX_TITLE_WORDS
    shouted = title.isupper() and len(title) > 3
    return 1.0 - 0.5 * too_long - 0.25 * shouted


def _used(reading: Reading) -> float:
    lines = reading.lines
    if not lines:
        return 0.0
    stems = set(map(stem, reading.different - _FUNCTION_WORDS))
    missing = sum(stems.isdisjoint(line.stems) for line in lines)
    taken_up = COLLECTIVE_CREDIT if missing and _COLLECTIVE.search(reading.text) else 0.0
    return (len(lines) - missing + taken_up * missing) / len(lines)


def _length(n_words: int) -> float:
    if n_words > MAX_WORDS:
        return MAX_WORDS / n_words
    return min(1.0, n_words / MIN_WORDS)


def _unique_sentences(recipe: Recipe) -> float:
    """Share of sentences of more than three words that do not repeat."""
    sentences = _SENTENCE_END.sub("\n", "\n".join(recipe.steps)).split("\n")
    return share_different([tuple(words_of(s)) for s in sentences if len(s.split()) > 3])


def _clean(reading: Reading) -> float:
    recipe = reading.recipe
    names = (recipe.title, *recipe.ingredients)
    texts = (*names, *recipe.steps)
    # The signs and words are ten times faster than the pattern, and nearly always absent.
    if (
        _SUSPECT_WORDS.isdisjoint(reading.different)
        and _SUSPECT_WORDS.isdisjoint(words_of("\n".join(names)))
        and not _SUSPECT_SIGNS.search("\n".join(texts))
    ):
        return 1.0
    return 1.0 - sum(_DIRT.search(text) is not None for text in texts) / len(texts)


def _language(words: Sequence[str]) -> float:
    if not words:
        return 0.0
    return min(1.0, sum(map(_ENGLISH.__contains__, words)) / len(words) / ENGLISH_SHARE)
