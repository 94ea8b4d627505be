"""How good a recipe is as a recipe, in [0, 1], with the parts that made the score.

Each part is in [0, 1]:

* title: a name of 1 to 12 words, with letters, not shouted, no link.
* ingredients: share of lines that name a food; full from 2 lines on.
* amounts: share of lines with an amount, or that need none ("salt to taste").
* steps: share of steps that hold a cooking verb.
* used: share of ingredients that the steps mention. A step that takes up "all ingredients",
  "the dry ingredients" or "everything" counts as three quarters of a mention of each.
* length: directions of 20 words or more, up to 800; less in proportion outside.
* unique: share of lines and steps that are not there twice.
* clean: share of texts without markup, links, adverts, broken characters.
* language: share of English words the rules know among all words; full from 30 % on.

score = 0.6 * weighted mean + 0.4 * the weakest of the parts that a recipe cannot do without
(ingredients, steps, used, length, unique, clean, language): a fine list above missing
directions is no recipe. The score judges form and coherence; nobody has tasted anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from toque.cooking.foods import find_food
from toque.cooking.ingredient_lines import IngredientLine, parse_line
from toque.cooking.ingredients import stem
from toque.cooking.metrics import ACTION_VERBS, has_action_verb
from toque.cooking.recipe import Recipe
from toque.cooking.units_of_measure import SPELLINGS

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

_WORD: Final = re.compile(r"[^\W\d_]+")
_SUSPECT_MARKS: Final = re.compile("[<&\ufffdÃÂâ©{}\\[\\]]")
_SUSPECT_WORDS: Final = frozenset(
    """
    http https www list cart advertisement click subscribe rights copyright follow facebook
    instagram pinterest email mail print watch lorem read policy log login sign null undefined
    """.split()  # noqa: SIM905
)
_DIRT: Final = re.compile(
    r"<[a-z/!][^<>]*>|&[a-z]{2,8};|&#\d+;|https?:|www\.|\ufffd|[ÃÂ][\x80-\xbf€™©¢]|â€|"
    r"add all ingredients to (?:list|cart)|advertisement|click (?:here|the)|\bsubscribe\b|"
    r"all rights reserved|copyright|©|follow (?:us|me) on|\bfacebook\b|\binstagram\b|"
    r"pinterest|e-?mail (?:us|me|address)|print recipe|watch (?:the )?video|lorem ipsum|"
    r"read more|\bcookie policy\b|log ?in|sign up|\{\{|\}\}|\[/?\w+\]|\bnull\b|undefined",
    re.IGNORECASE,
)
_COLLECTIVE: Final = re.compile(
    r"\b(?:all|every|remaining|other|rest of the|first \w+|dry|wet|the|your|of) (?:of )?(?:the )?"
    r"(?:\w+ )?ingredients|\beverything\b|\ball together\b|\bingredients (?:in|into|together)",
    re.IGNORECASE,
)
_COLLECTIVE_WORDS: Final = frozenset({"ingredients", "everything", "together"})
_NEEDS_NO_AMOUNT: Final = re.compile(
    r"\bto (?:taste|serve|garnish|decorate|season|finish)\b|\bas (?:needed|required|desired)\b"
    r"|\bfor \w+ing\b|\bfor (?:the )?(?:pan|garnish|deep|serving)|optional|\bsalt\b|\bpepper\b"
    r"|\bcooking spray\b|\boil spray\b|\bwater\b",
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
_SENTENCE_END: Final = re.compile(r"[.!?]+\s+")


@dataclass(frozen=True, slots=True)
class Quality:
    """A score and its parts, all in [0, 1]."""

    score: float
    parts: Mapping[str, float]

    @property
    def weakest(self) -> str:
        """Name of the essential part that pulls the score down most."""
        return min(ESSENTIAL, key=lambda name: self.parts[name])


def quality_of(recipe: Recipe) -> Quality:
    """Score a recipe.

    >>> good = Recipe(
    ...     "Buttered Toast",
    ...     ("2 slices bread", "1 tablespoon butter"),
    ...     ("Toast the bread until golden on both sides.", "Spread with the butter, cut the toast "
    ...      "into triangles and serve at once while it is hot."),
    ... )
    >>> quality_of(good).score
    1.0
    """
    lines = [parse_line(line) for line in recipe.ingredients]
    text = " ".join(recipe.steps).lower()
    words = _WORD.findall(text)
    parts = {
        "title": _title(recipe.title),
        "ingredients": _ingredients(lines),
        "amounts": _amounts(recipe.ingredients, lines),
        "steps": _share([has_action_verb(step) for step in recipe.steps]),
        "used": _used(lines, text, words),
        "length": _length(recipe.steps),
        "unique": min(_unique(recipe.ingredients), _unique(_sentences(recipe.steps))),
        "clean": _clean((recipe.title, *recipe.ingredients, *recipe.steps)),
        "language": _language(words),
    }
    mean = sum(weight * parts[name] for name, weight in WEIGHTS.items())
    weakest = min(parts[name] for name in ESSENTIAL)
    return Quality(round((1.0 - WEAKEST_SHARE) * mean + WEAKEST_SHARE * weakest, 4), parts)


def _share(good: Sequence[bool]) -> float:
    return sum(good) / len(good) if good else 0.0


def _title(title: str) -> float:
    words = _WORD.findall(title)
    if not words or _DIRT.search(title):
        return 0.0
    too_long = len(title.split()) > MAX_TITLE_WORDS
    shouted = title.isupper() and len(title) > 3
    return 1.0 - 0.5 * too_long - 0.25 * shouted


def _ingredients(lines: Sequence[IngredientLine]) -> float:
    named = [find_food(line.name) is not None for line in lines]
    return _share(named) * min(1.0, len(lines) / 2.0)


def _amounts(texts: Sequence[str], lines: Sequence[IngredientLine]) -> float:
    return _share(
        [
            bool(line.amounts) or _NEEDS_NO_AMOUNT.search(text) is not None
            for text, line in zip(texts, lines, strict=True)
        ]
    )


def _used(lines: Sequence[IngredientLine], text: str, words: Sequence[str]) -> float:
    stems = {_stem(word) for word in set(words) - _FUNCTION_WORDS}
    taken_up = 0.0
    if not _COLLECTIVE_WORDS.isdisjoint(words) and _COLLECTIVE.search(text):
        taken_up = COLLECTIVE_CREDIT
    mentions = [1.0 if _is_mentioned(line.name, stems) else taken_up for line in lines]
    return sum(mentions) / len(mentions) if mentions else 0.0


@lru_cache(maxsize=1 << 16)
def _stem(word: str) -> str:
    return stem(word)


@lru_cache(maxsize=1 << 16)
def _name_stems(name: str) -> frozenset[str]:
    """Words by which steps may call an ingredient: its own, and its food's last."""
    words = {stem(word) for word in _WORD.findall(name.lower())}
    food = find_food(name)
    if food is not None:  # "spaghetti" is used by "cook the pasta"
        words.add(stem(food.name.rpartition(" ")[2]))
    return frozenset(words)


def _is_mentioned(name: str, stems: set[str]) -> bool:
    return not _name_stems(name).isdisjoint(stems)


def _length(steps: Sequence[str]) -> float:
    n_words = sum(len(step.split()) for step in steps)
    if n_words > MAX_WORDS:
        return MAX_WORDS / n_words
    return min(1.0, n_words / MIN_WORDS)


def _sentences(steps: Sequence[str]) -> list[str]:
    return [part for step in steps for part in _SENTENCE_END.split(step) if len(part.split()) > 3]


def _unique(texts: Sequence[str]) -> float:
    if not texts:
        return 1.0
    return len({" ".join(_WORD.findall(text.lower())) for text in texts}) / len(texts)


def _clean(texts: Sequence[str]) -> float:
    whole = "\n".join(texts).lower()
    if _SUSPECT_MARKS.search(whole) is None and _SUSPECT_WORDS.isdisjoint(_WORD.findall(whole)):
        return 1.0  # nearly always, and ten times faster than the pattern
    return _share([_DIRT.search(text) is None for text in texts])


def _language(words: Sequence[str]) -> float:
    if not words:
        return 0.0
    return min(1.0, sum(word in _ENGLISH for word in words) / len(words) / ENGLISH_SHARE)
