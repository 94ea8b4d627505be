"""Shopping list of a recipe: its foods with amounts for a number of servings, equal foods added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.kitchen_amounts import write_amount
from toque.cooking.ingredients.names import one_name, stem
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.tokens import Range
from toque.cooking.labels.features import read
from toque.cooking.labels.nutrition import estimate
from toque.cooking.recipe import Recipe
from toque.cooking.text_keys import words_of

MOST_SERVINGS: Final = 1000
"""Most servings; more is a canteen's order, and no recipe scales to it."""
_ONE: Final = (1.0, 1.0)


@dataclass(frozen=True)
class Item:
    """One food to buy."""

    food: str
    amounts: tuple[str, ...]
    """Measures to be added, "1½ cups"; several where units differ, none where no line gives one."""
    note: str
    """ "to taste", "for dusting", "optional"; "" without."""


def shopping_list(lines: Sequence[str], *, factor: float) -> list[Item]:
    """The foods of ingredient lines with their amounts times `factor`, in order.

    >>> shopping_list(["2 eggs", "1 cup milk", "1 egg, beaten", "salt to taste"], factor=3.0)
    ... # doctest: +NORMALIZE_WHITESPACE
    [Item(food='eggs', amounts=('9',), note=''), Item(food='milk', amounts=('3 cups',), note=''),
     Item(food='salt', amounts=(), note='to taste')]
    """
    foods: dict[str, _Food] = {}
    for line in map(parse_line, lines):
        if name := one_name(line.name):
            key = " ".join(map(stem, words_of(name))) or name
            foods.setdefault(key, _Food(f"{line.size} {name}".strip())).add(line, factor)
    return [food.item() for food in foods.values()]


def estimated_servings(recipe: Recipe) -> int:
    """Servings that the recipe states, else an estimate from its content; see `labels.nutrition`.

    >>> estimated_servings(Recipe("Toast", ("4 slices bread",), ("Serves 2.",)))
    2
    """
    found = recipe.servings or estimate(read(recipe)).servings
    return max(1, round(found or 1))


@dataclass
class _Food:
    """One food with the amounts and notes of all its lines."""

    name: str
    measures: dict[tuple[str | None, str], Range] = field(default_factory=dict)
    """Amounts, keyed by unit and the size of one piece."""
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, line: IngredientLine, factor: float) -> None:
        """Add the amounts of a line."""
        for amount, each in _measures(line):
            low, high = amount.quantity or _ONE  # "pinch of salt"
            before = self.measures.get((amount.unit, each), (0.0, 0.0))
            scaled = (before[0] + low * factor, before[1] + high * factor)
            self.measures[amount.unit, each] = scaled
        if note := line.purpose or line.comment:
            self.notes[note] = None
        if line.optional:
            self.notes["optional"] = None

    def item(self) -> Item:
        """The food as an item of the list."""
        amounts = tuple(
            f"{write_amount(quantity, unit)}{each}"
            for (unit, each), quantity in self.measures.items()
        )
        return Item(self.name, amounts, ", ".join(self.notes))


def _measures(line: IngredientLine) -> list[tuple[Amount, str]]:
    """The measures that add up, each with the size of one piece, which does not scale.

    >>> _measures(parse_line("2 (14 ounce) cans tomatoes"))
    [(Amount(quantity=(2.0, 2.0), unit='can', role='whole'), ' of 14 ounces')]
    """
    found: list[tuple[Amount, str]] = []
    for amount in line.amounts:
        if amount.role in ("whole", "plus"):
            found.append((amount, ""))
        elif amount.role == "each" and found and amount.quantity and not found[-1][1]:
            size = write_amount(amount.quantity, amount.unit, keep_unit=True)
            found[-1] = (found[-1][0], f" of {size}")
    return found
