"""Difficulty labels (easy, medium, hard) from counts, work, time and technique.

1. By bounds: easy up to 6 ingredients and 6 steps, medium up to 12 and 12, else hard.
2. One level harder if it needs two demanding techniques, or one and more than 2 hours.
3. Else easy if the product of ingredients, words of directions and minutes is at most 30,000
   (e.g. 8, 100 and 35). A demanding technique doubles the product.

The recipe states the minutes, or the minutes of its steps are summed, or half an hour is assumed.
The product approximates a logistic regression of Epicurious' tag "Quick & Easy" on the logarithms
of the three numbers. Their weights are nearly equal (0.9, 1.1, 1). The limit and the half hour
were chosen for the best agreement with the tag on one half of the recipes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from toque.cooking.durations import minutes_in_step
from toque.cooking.labels.features import Reading
from toque.cooking.recipe import DIFFICULTIES, Difficulty, difficulty_of

# Largest product of ingredients, words and minutes of an easy recipe.
LITTLE_WORK: Final = 30_000.0
UNSAID_MINUTES: Final = 30.0
# Factor for the work of a recipe with a demanding technique.
TECHNIQUE_WORK: Final = 2.0
LONG_MINUTES: Final = 120
MANY_TECHNIQUES: Final = 2

TECHNIQUES: Final[dict[str, str]] = {
    "knead": "knead kneaded kneading",
    "proof": "proof proofed doubled",
    "ferment": "ferment fermented fermenting",
    "pipe": "piping",
    "temper": "tempering",
    "caramelise": "caramelize caramelized caramelise caramelised",
    "whip to peaks": "peaks meringue meringues",
    "bain-marie": "marie",
    "custard": "custard hollandaise",
    "deep-fry": "fryer",
    "sous vide": "vide",
    "flambe": "flambe flambé ignite",
    "emulsify": "emulsify emulsified emulsifies",
    "deglaze": "deglaze deglazing",
    "roux": "roux bechamel béchamel",
    "braise": "braise braising",
    "blanch": "blanch blanching",
    "poach": "poach poaching",
    "bone": "debone deboning spatchcock truss",
    "smoke": "smoker",
    "can": "sterilize sterilise sterilized sterilised canning",
    "julienne": "julienne chiffonade brunoise mandoline",
    "roll out": "lattice crimp",
}  # demanding techniques, with words that mention them

_WORDS: Final = {
    word: name for name, words in TECHNIQUES.items() for word in words.split()
}
_PHRASES: Final = tuple(
    (name, re.compile(phrase))
    for name, phrase in (
        ("proof", r"(?:let|dough)\b.{0,40}\brise\b"),
        ("ferment", r"\bbrine (?:for|overnight)|\bcure (?:for|the)"),
        ("pipe", r"pastry bag|\bpipe (?:the|onto|into|rosettes)"),
        ("temper", r"candy thermometer|(?:soft|hard)[- ]ball|hard[- ]crack"),
        ("bain-marie", r"double boiler|water bath|over (?:\w+ )?simmering water"),
        ("deep-fry", r"deep[- ](?:fry|fried|fat|frying)"),
        ("blanch", r"ice bath"),
        ("bone", r"\bbutterfly the"),
        ("smoke", r"(?:wood|smoking) chips"),
        (
            "roll out",
            r"\broll (?:out|dough|pastry|the (?:dough|pastry)|.{0,30} out (?:on|to))",
        ),
    )
)  # phrases that mention them
_WORDS_OF_PHRASES: Final = frozenset(
    {
        "ball",
        "bath",
        "boiler",
        "brine",
        "butterfly",
        "chips",
        "crack",
        "cure",
        "deep",
        "ice",
    }
    | {"pastry", "pipe", "rise", "roll", "simmering", "thermometer"}
)  # each phrase contains one of these words; most recipes do not, so the search is 15 times faster


@dataclass(frozen=True, slots=True)
class DifficultyReport:
    """A difficulty level and its reasons."""

    level: Difficulty
    by_bounds: Difficulty
    minutes: float | None  # None if neither the recipe nor its steps state a time
    techniques: tuple[str, ...]  # names in the order of `TECHNIQUES`


def judged_difficulty(reading: Reading) -> DifficultyReport:
    """Return the level of a recipe with its reasons, without its own label."""
    recipe = reading.recipe
    bounds = difficulty_of(len(recipe.ingredients), len(recipe.steps))
    named = {_WORDS[word] for word in _WORDS.keys() & reading.different}
    if not _WORDS_OF_PHRASES.isdisjoint(reading.different):
        named |= {name for name, phrase in _PHRASES if phrase.search(reading.text)}
    techniques = tuple(name for name in TECHNIQUES if name in named)
    times = [] if recipe.minutes else minutes_in_step(reading.text)
    minutes = float(recipe.minutes or 0) or sum(times)
    work = (
        max(1, len(recipe.ingredients))
        * max(1, reading.n_tokens)
        * (minutes or UNSAID_MINUTES)
    )
    level = DIFFICULTIES.index(bounds)
    if len(techniques) >= MANY_TECHNIQUES or (techniques and minutes > LONG_MINUTES):
        level = min(level + 1, len(DIFFICULTIES) - 1)
    elif work * (TECHNIQUE_WORK if techniques else 1.0) <= LITTLE_WORK:
        level = 0
    stated = minutes if recipe.minutes or times else None
    return DifficultyReport(DIFFICULTIES[level], bounds, stated, techniques)
