"""How many people a recipe feeds, when it does not say so.

In order: the recipe's own `servings`; a step that divides the dish ("among 4 plates"); pieces
that are eaten whole (4 salmon fillets, 6 buns); else the energy of a portion, a power law of the
whole dish's energy and of what its foods usually bring to a serving. The law was fitted by least
squares on 3,200 Epicurious recipes whose energy per serving is known; its residual is a factor of
1.75 (one standard deviation): a guess, good for a traffic light.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from toque.cooking.foods import Food
from toque.cooking.ingredient_lines import IngredientLine
from toque.cooking.recipe import Recipe

_NUMBERS: Final = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16, "eighteen": 18, "twenty": 20,
}  # fmt: skip
_NUMBER: Final = rf"(\d{{1,2}}|{'|'.join(_NUMBERS)})"
_VESSELS: Final = (
    "plates|bowls|glasses|ramekins|cups|servings?|portions|dishes|wedges|mugs|flutes|goblets|slices"
    "|squares|tumblers|pieces|people|skewers|coupes|tartlets|molds"
)
_DIVIDED: Final = (
    re.compile(
        rf"\b(?:among|between|into|onto|in|on|to) (?:each of )?(?:the )?{_NUMBER} "
        rf"(?:[a-z-]+ ){{0,3}}(?:{_VESSELS})\b"
    ),
    re.compile(rf"\b(?:serves|makes|makes about) {_NUMBER}(?: servings| people|\W*$)"),
    re.compile(rf"\b{_NUMBER} (?:[a-z-]+ ){{0,2}}(?:servings|portions)\b"),
)
_EATEN_WHOLE: Final = frozenset(
    {"chicken", "chicken breast", "steak", "pork loin", "salmon", "cod", "tuna", "veal", "duck",
     "bun", "hot dog", "rabbit", "pita", "crab", "tortilla", "mackerel"}
)  # fmt: skip
_LAW_FACTOR: Final = 6.86
_LAW_WHOLE: Final = 0.265
_LAW_USUAL: Final = 0.32
_MOST: Final = 40.0


def servings_of(
    recipe: Recipe,
    read: Iterable[tuple[IngredientLine, Food]],
    *,
    energy_kcal: float,
    usual_kcal: float,
) -> float:
    """How many servings a recipe makes: stated, or guessed as the module says.

    Args:
        recipe: the recipe.
        read: its ingredient lines with their foods.
        energy_kcal: of the whole dish.
        usual_kcal: what the same foods bring to a serving of other dishes.
    """
    if recipe.servings:
        return float(recipe.servings)
    divided = _divided_by(recipe.steps)
    if divided is not None:
        return divided
    for line, food in read:
        whole = line.quantity[0] if line.quantity and line.unit is None else 0.0
        if food.name in _EATEN_WHOLE and 2.0 <= whole <= 12.0:
            return whole
    whole_kcal = max(energy_kcal, 30.0)
    portion_kcal = _LAW_FACTOR * whole_kcal**_LAW_WHOLE * max(usual_kcal, 20.0) ** _LAW_USUAL
    return float(min(max(whole_kcal / portion_kcal, 1.0), _MOST))


def _divided_by(steps: Iterable[str]) -> float | None:
    text = " ".join(steps).lower()
    for pattern in _DIVIDED:
        match = pattern.search(text)
        if match is not None:
            word = match.group(1)
            number = _NUMBERS.get(word) or int(word)
            if 1 <= number <= _MOST:
                return float(number)
    return None
