"""Difficulty labels (easy, medium, hard) from counts, work, time and technique.

1. The bounds give a first level: easy up to 6 ingredients and 6 steps, medium up to 12 of each,
   otherwise hard.
2. A recipe with two demanding techniques, or with one and more than 2 hours, is one level harder.
3. Any other recipe is easy if the product of its ingredients, words of directions and minutes is at
   most 30,000 (e.g. 8 * 100 * 35). A demanding technique doubles the product.

The minutes are the recipe's own, or the sum of the times in its steps, or 30. The product
approximates a logistic regression of Epicurious' tag "Quick & Easy" on the logarithms of the three
numbers. Their weights are nearly equal (0.9, 1.1, 1). The limit and the 30 minutes were chosen for
the best agreement with the tag on one half of the recipes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from toque.cooking.durations import minutes_in_step
from toque.cooking.labels.features import Reading
from toque.cooking.recipe import DIFFICULTIES, Difficulty, difficulty_of

LITTLE_WORK = 30_000.0
"""Largest product of the numbers of ingredients, words and minutes for an easy recipe."""
UNSAID_MINUTES = 30.0
"""Assumed minutes for a recipe that states no times."""
TECHNIQUE_WORK = 2.0
"""Factor on the product if a recipe has a demanding technique."""
LONG_MINUTES = 120
"""Minutes above which one demanding technique makes a recipe harder."""
MANY_TECHNIQUES = 2
"""Number of demanding techniques that make a recipe harder."""

TECHNIQUES: dict[str, str] = {
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
}
"""Demanding techniques, each with the words that mention it."""

_WORDS = {word: name for name, words in TECHNIQUES.items() for word in words.split()}
_PHRASES = tuple(
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
)
"""Names of techniques, each with patterns for the phrases that mention it."""
_WORDS_OF_PHRASES = frozenset(
    """
    ball bath boiler brine butterfly chips crack cure deep ice pastry pipe rise roll simmering
    thermometer
    """.split()  # noqa: SIM905
)
"""Words in the phrases, at least one per phrase. Most recipes contain none of these words, which
makes the search 15 times faster.
"""


@dataclass(frozen=True, slots=True)
class DifficultyReport:
    """A difficulty level and its reasons."""

    level: Difficulty
    by_bounds: Difficulty
    minutes: float | None  # None if neither the recipe nor its steps state a time
    techniques: tuple[str, ...]  # names in the order of `TECHNIQUES`


def estimate_difficulty(reading: Reading) -> DifficultyReport:
    """Estimate the level of a recipe with its reasons. The recipe's own label is ignored."""
    recipe = reading.recipe
    bounds = difficulty_of(len(recipe.ingredients), len(recipe.steps))
    techniques = _techniques_in(reading)
    minutes = _stated_minutes(reading)

    n_ingredients = max(1, len(recipe.ingredients))
    n_words = max(1, reading.n_tokens)
    work = n_ingredients * n_words * (minutes or UNSAID_MINUTES)
    if techniques:
        work *= TECHNIQUE_WORK

    is_long = minutes is not None and minutes > LONG_MINUTES
    level = DIFFICULTIES.index(bounds)
    if len(techniques) >= MANY_TECHNIQUES or (techniques and is_long):
        level = min(level + 1, len(DIFFICULTIES) - 1)
    elif work <= LITTLE_WORK:
        level = 0
    return DifficultyReport(DIFFICULTIES[level], bounds, minutes, techniques)


def _techniques_in(reading: Reading) -> tuple[str, ...]:
    """List the demanding techniques that the steps mention, in the order of `TECHNIQUES`."""
    mentioned = {_WORDS[word] for word in _WORDS.keys() & reading.distinct_words}
    if not _WORDS_OF_PHRASES.isdisjoint(reading.distinct_words):
        mentioned |= {name for name, phrase in _PHRASES if phrase.search(reading.text)}
    return tuple(name for name in TECHNIQUES if name in mentioned)


def _stated_minutes(reading: Reading) -> float | None:
    """Return the recipe's minutes, or the sum of the times in its steps, or None without any."""
    if reading.recipe.minutes:
        return float(reading.recipe.minutes)
    times = minutes_in_step(reading.text)
    return sum(times) if times else None
