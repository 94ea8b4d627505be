"""Healthy, Moderate or Indulgent: traffic lights of a serving, given or estimated.

Lights are those of the UK's front-of-pack guidance (Food Standards Agency and Department of
Health, "Guide to creating a front of pack nutrition label", 2016): per 100 g green up to
3 g fat, 1.5 g saturates, 5 g sugars, 0.3 g salt; red above 17.5, 5, 22.5 and 1.5 g; and red when
a serving holds more than 21 g fat, 6 g saturates, 27 g sugars or 1.8 g salt. The lights per 100 g
are used when the weight of a serving is stated; a recipe rarely says it, and then the guidance
only tells red from not red.

The class is ours: *Healthy* when no light is red, *Indulgent* when more than half of the known
lights are red, *Moderate* otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from toque.cooking.foods import NUTRIENTS, Food, find_food, is_food
from toque.cooking.ingredient_lines import IngredientLine, parse_line
from toque.cooking.portions import servings_of
from toque.cooking.recipe import NutritionClass, Recipe
from toque.cooking.weights import grams_of

Light = Literal["green", "amber", "red"]

GREEN_PER_100_G: Final = {"fat_g": 3.0, "saturated_fat_g": 1.5, "sugar_g": 5.0, "salt_g": 0.3}
RED_PER_100_G: Final = {"fat_g": 17.5, "saturated_fat_g": 5.0, "sugar_g": 22.5, "salt_g": 1.5}
RED_PER_SERVING: Final = {"fat_g": 21.0, "saturated_fat_g": 6.0, "sugar_g": 27.0, "salt_g": 1.8}
SALT_PER_SODIUM: Final = 2.5
MIN_LIGHTS: Final = 2
"""Fewer given nutrients than this say nothing of a dish: it is estimated."""

_UNKNOWN_G: Final = 40.0
"""Weight in a serving of an ingredient that is neither measured nor in the table."""
_FAT: Final = NUTRIENTS.index("fat_g")
_SODIUM: Final = NUTRIENTS.index("sodium_mg")
_PURE_FAT: Final = 95.0
_PURE_SALT: Final = 30_000.0
_FRYING_FAT_G: Final = 180.0
_BRINE_SALT_G: Final = 50.0
_TAKEN_UP: Final = 0.1
"""Share of frying fat, and of the salt of a brine or a crust, that is eaten: a usual guess."""
_FRIED: Final = re.compile(r"\bfry|\bfried\b|\bfries\b", re.IGNORECASE)
_CLAIMS: Final[dict[str, tuple[str, ...]]] = {
    "low-fat": ("fat_g", "saturated_fat_g"),
    "fat-free": ("fat_g", "saturated_fat_g"),
    "low-calorie": ("fat_g",),
    "low-saturated-fat": ("fat_g", "saturated_fat_g"),
    "low-sodium": ("sodium_mg",),
    "low-salt": ("sodium_mg",),
    "low-carb": ("sugar_g",),
    "very-low-carbs": ("sugar_g",),
    "diabetic": ("sugar_g",),
    "sugar-free": ("sugar_g",),
}
"""Tags that state what a dish is low in, and the estimates they cap just below red."""


@dataclass(frozen=True, slots=True)
class Nutrition:
    """What a serving holds and its class."""

    klass: NutritionClass | None
    """None when nothing is known: no nutrients given and no ingredient found."""
    per_serving: Mapping[str, float]
    lights: Mapping[str, Light]
    """Of fat, saturates, sugar and salt, those known."""
    estimated: bool
    coverage: float
    """1.0 when given. Estimated: the share of the ingredients' weight that is both measured by
    the recipe and found in the table of foods; 0.0 when the recipe gives names only."""
    servings: float | None
    """Servings the estimate divided by; None when the nutrients were given."""


def nutrition_of(recipe: Recipe) -> Nutrition:
    """The nutrition of a recipe: from its own figures, else estimated from its ingredients.

    >>> given = {"fat_g": 30.0, "saturated_fat_g": 4.0, "sugar_g": 3.0, "sodium_mg": 300.0}
    >>> nutrition_of(Recipe("Salad", ("oil",), ("Toss.",), nutrition=given)).klass
    'Moderate'
    """
    if recipe.nutrition:
        lights = traffic_lights(recipe.nutrition)
        if len(lights) >= MIN_LIGHTS:
            return Nutrition(
                klass=class_of(lights),
                per_serving=dict(recipe.nutrition),
                lights=lights,
                estimated=False,
                coverage=1.0,
                servings=None,
            )
    return estimate(recipe)


def traffic_lights(per_serving: Mapping[str, float]) -> dict[str, Light]:
    """Lights of a serving; `serving_g`, when it is there, gives the lights per 100 g too.

    Without it, green is told from amber by nothing, and what is not red is amber.
    """
    known = dict(per_serving)
    if "salt_g" not in known and "sodium_mg" in known:
        known["salt_g"] = known["sodium_mg"] / 1000.0 * SALT_PER_SODIUM
    weight = known.get("serving_g", 0.0)
    lights: dict[str, Light] = {}
    for name, red in RED_PER_SERVING.items():
        if name not in known:
            continue
        lights[name] = "red" if known[name] > red else "amber"
        if weight > 0.0:
            share = known[name] * 100.0 / weight
            if share > RED_PER_100_G[name]:
                lights[name] = "red"
            elif share <= GREEN_PER_100_G[name] and lights[name] != "red":
                lights[name] = "green"
    return lights


def class_of(lights: Mapping[str, Light]) -> NutritionClass | None:
    """No red light: Healthy; more than half red: Indulgent; else Moderate; none known: None."""
    if not lights:
        return None
    red = sum(light == "red" for light in lights.values())
    if red == 0:
        return "Healthy"
    return "Indulgent" if 2 * red > len(lights) else "Moderate"


def estimate(recipe: Recipe) -> Nutrition:
    """Nutrition by the table of foods, whatever figures the recipe carries."""
    lines = [line for line in map(parse_line, recipe.ingredients) if is_food(line.name)]
    read = [(line, food) for line in lines if (food := find_food(line.name)) is not None]
    if not read:
        return Nutrition(None, {}, {}, estimated=True, coverage=0.0, servings=None)
    fried = any(_FRIED.search(step) for step in recipe.steps)
    measured = [(food, g) for line, food in read if (g := _eaten(line, food, fried=fried)) > 0.0]
    whole = _sum(measured)
    usual = [(food, food.serving_g) for _, food in read]
    if measured:
        energy, usual_energy = whole["energy_kcal"], _sum(usual)["energy_kcal"]
        servings = servings_of(recipe, read, energy_kcal=energy, usual_kcal=usual_energy)
        per_serving = {name: value / servings for name, value in whole.items()}
    else:
        servings, per_serving = 1.0, _sum(usual)
    known_g = sum(grams for _, grams in measured) / servings
    unmeasured = len(lines) - len(read)
    loose_g = sum(food.serving_g for line, food in read if not line.amounts)
    weight_g = known_g + loose_g + _UNKNOWN_G * unmeasured
    _respect_claims(per_serving, recipe.tags)
    lights = traffic_lights(per_serving)
    return Nutrition(
        klass=class_of(lights),
        per_serving=per_serving,
        lights=lights,
        estimated=True,
        coverage=known_g / weight_g if weight_g else 0.0,
        servings=servings if measured else None,
    )


def _sum(weighed: Iterable[tuple[Food, float]]) -> dict[str, float]:
    total = [0.0] * len(NUTRIENTS)
    for food, grams in weighed:
        share = grams / 100.0
        total = [have + share * more for have, more in zip(total, food.per_100_g, strict=True)]
    return dict(zip(NUTRIENTS, total, strict=True))


def _eaten(line: IngredientLine, food: Food, *, fried: bool) -> float:
    """Grams of a line that end on the plates; 0.0 when the line gives no amount."""
    grams = (grams_of(line, food) if line.amounts else None) or 0.0
    fat, sodium = food.per_100_g[_FAT], food.per_100_g[_SODIUM]
    if fat >= _PURE_FAT and grams > _FRYING_FAT_G and (fried or "fry" in line.purpose):
        return _TAKEN_UP * grams
    if sodium >= _PURE_SALT and grams > _BRINE_SALT_G:
        return _TAKEN_UP * grams
    return grams


def _respect_claims(per_serving: dict[str, float], tags: Iterable[str]) -> None:
    """Cap estimates at the red limit where the recipe states that it is low in something."""
    limits = {**RED_PER_SERVING, "sodium_mg": RED_PER_SERVING["salt_g"] * 1000 / SALT_PER_SODIUM}
    for tag in tags:
        for name in _CLAIMS.get(tag.lower().replace(" ", "-"), ()):
            per_serving[name] = min(per_serving[name], limits[name])
