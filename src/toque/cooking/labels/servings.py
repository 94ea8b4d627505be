"""Servings of a recipe: stated, or estimated.

In order: the recipe's own `servings`; a step that divides the dish ("among 4 plates"); pieces
that are eaten whole (4 salmon fillets, 6 buns); else the energy of a portion, a power law of the
whole dish's energy and of its foods' usual share in a serving. The law was fitted by least
squares on 3,200 Epicurious recipes whose energy per serving is known; its residual is a factor of
1.75 (one standard deviation): a guess, good for a traffic light.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from toque.cooking.labels.ingredient_facts import LineFacts
from toque.cooking.labels.recipe_features import Reading

_NUMBERS: Final = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16, "eighteen": 18, "twenty": 20,
}  # fmt: skip
_NUMBER: Final = rf"(\d{{1,2}}|{'|'.join(_NUMBERS)})"
_VESSELS: Final = (
    "plates|bowls|glasses|ramekins|cups|servings?|portions|dishes|wedges|mugs|flutes|goblets|slices"
    "|squares|tumblers|pieces|people|skewers|coupes|tartlets|molds"
)
_EACH: Final = "(?:each of )?(?:the )?"
_UP_TO_3: Final = "(?:[a-z-]+ ){0,3}"
_DIVIDED: Final = tuple(
    (frozenset(needed.split()), re.compile(pattern))
    for needed, pattern in (
        (
            _VESSELS.replace("servings?", "serving|servings").replace("|", " "),
            rf"\b(?:among|between|into|onto|in|on|to) {_EACH}{_NUMBER} {_UP_TO_3}(?:{_VESSELS})\b",
        ),
        ("serves makes", rf"\b(?:serves|makes|makes about) {_NUMBER}(?: servings| people|\W*$)"),
        ("servings portions", rf"\b{_NUMBER} (?:[a-z-]+ ){{0,2}}(?:servings|portions)\b"),
    )
)
"""Words of which the steps must contain one, and the patterns they may match."""
_EATEN_WHOLE: Final = frozenset(
    {"chicken", "chicken breast", "steak", "pork loin", "salmon", "cod", "tuna", "veal", "duck",
     "bun", "hot dog", "rabbit", "pita", "crab", "tortilla", "mackerel"}
)  # fmt: skip
_LAW_FACTOR: Final = 6.86
_LAW_WHOLE: Final = 0.265
_LAW_USUAL: Final = 0.32
_MOST: Final = 40.0


def servings_of(
    reading: Reading,
    known: Iterable[LineFacts],
    *,
    energy_kcal: float,
    usual_kcal: float,
) -> float:
    """Servings of a recipe: stated, or estimated as described above.

    Args:
        reading: the recipe's features.
        known: its ingredient lines whose food is in the table.
        energy_kcal: of the whole dish.
        usual_kcal: what the same foods contribute to a serving of other dishes.
    """
    if reading.recipe.servings:
        return float(reading.recipe.servings)
    divided = _divided_by(reading)
    if divided is not None:
        return divided
    for facts in known:
        if facts.food is None or facts.food.name not in _EATEN_WHOLE:
            continue
        line = facts.line
        whole = line.quantity[0] if line.quantity and line.unit is None else 0.0
        if 2.0 <= whole <= 12.0:
            return whole
    whole_kcal = max(energy_kcal, 30.0)
    portion_kcal = _LAW_FACTOR * whole_kcal**_LAW_WHOLE * max(usual_kcal, 20.0) ** _LAW_USUAL
    return float(min(max(whole_kcal / portion_kcal, 1.0), _MOST))


def _divided_by(reading: Reading) -> float | None:
    for needed, pattern in _DIVIDED:
        if needed.isdisjoint(reading.different):
            continue
        match = pattern.search(reading.text)
        if match is not None:
            word = match.group(1)
            number = _NUMBERS.get(word) or int(word)
            if 1 <= number <= _MOST:
                return float(number)
    return None
