"""Nutrition classes (Healthy, Moderate, Indulgent) from stated or estimated traffic lights.

The lights follow the UK's front-of-pack guidance (Food Standards Agency and Department of
Health, "Guide to creating a front of pack nutrition label", 2016): green and red per 100 g, and red
per serving. Without the weight of a serving, only red and not red are known.

The class is defined here: *Healthy* if no light is red, *Indulgent* if more than half of the known
lights are red, else *Moderate*. A small serving turns no light red. Therefore a dish with more than
half sugar, fat, sweets or alcohol is Moderate at best: see `mostly_refined`.

The number of servings is the first one available:

1. the recipe's own number;
2. the number in a step that divides the dish ("among 4 plates");
3. the number of pieces that are eaten whole (4 salmon fillets);
4. the energy of the dish divided by the energy of a portion.

The energy of a portion is a power law of the dish's energy and its foods' usual share per serving.
It was fitted by least squares on 3,200 Epicurious recipes. Its residual is a factor of 1.75 (one
standard deviation).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from toque.cooking.labels.features import (
    TAKEN_UP,
    LineFacts,
    Nutrients,
    Reading,
    scaled,
)
from toque.cooking.labels.foods import NUTRIENTS, foods
from toque.cooking.recipe import NutritionClass

Light = Literal["green", "amber", "red"]

GREEN_PER_100_G: Final = {
    "fat_g": 3.0,
    "saturated_fat_g": 1.5,
    "sugar_g": 5.0,
    "salt_g": 0.3,
}
RED_PER_100_G: Final = {
    "fat_g": 17.5,
    "saturated_fat_g": 5.0,
    "sugar_g": 22.5,
    "salt_g": 1.5,
}
RED_PER_SERVING: Final = {
    "fat_g": 21.0,
    "saturated_fat_g": 6.0,
    "sugar_g": 27.0,
    "salt_g": 1.8,
}
SALT_PER_SODIUM: Final = 2.5
# Minimum known lights; with fewer stated nutrients the class is estimated.
MIN_LIGHTS: Final = 2

# Grams per serving of a food that is neither measured nor in the table.
_UNKNOWN_G: Final = 40.0
_ENERGY: Final = NUTRIENTS.index("energy_kcal")
_FAT, _SUGAR = NUTRIENTS.index("fat_g"), NUTRIENTS.index("sugar_g")
_PROTEIN, _CARBOHYDRATE = (
    NUTRIENTS.index("protein_g"),
    NUTRIENTS.index("carbohydrate_g"),
)
# Largest refined share of a Healthy dish by weight without water.
_MOST_REFINED: Final = 0.5
# Minimum refined grams that count; less sweetens a pot of tea.
_LEAST_REFINED_G: Final = 15.0
_MOST_REFINED_NAMES: Final = 0.6
# Minimum grams per serving of a food, to exclude seasonings.
_LEAST_SERVING: Final = 2.0
# Minimum share of fat and sugar in a refined dish's stated energy.
_REFINED_ENERGY: Final = 0.6
# Minimum fat and sugar, and maximum protein, in grams per 100 g.
_REFINED: Final = (
    (25.0, 0.5),
    (45.0, 2.0),
    (70.0, 6.0),
)
_DRIED_FRUIT: Final = frozenset({"raisin", "dried cranberry", "date"})
_FRIED: Final = re.compile(r"\bfry|\bfried\b|\bfries\b", re.IGNORECASE)
_LIMITS: Final = {
    **RED_PER_SERVING,
    "sodium_mg": RED_PER_SERVING["salt_g"] * 1000 / SALT_PER_SODIUM,
}
_FATS: Final = ("fat_g", "saturated_fat_g")
_CLAIMS: Final[dict[str, tuple[str, ...]]] = {
    "low-fat": _FATS, "fat-free": _FATS, "low-saturated-fat": _FATS, "low-calorie": ("fat_g",),
    **dict.fromkeys(("low-sodium", "low-salt"), ("sodium_mg",)),
    **dict.fromkeys(("low-carb", "very-low-carbs", "diabetic", "sugar-free"), ("sugar_g",)),
}  # fmt: skip
"""Tags for a dish low in a nutrient, with the estimates that they cap just below red."""


@dataclass(frozen=True, slots=True)
class Nutrition:
    """Nutrients of a serving and its class."""

    klass: NutritionClass | None  # None without stated nutrients or known ingredients
    per_serving: Mapping[str, float]
    lights: Mapping[str, Light]  # known lights of fat, saturates, sugar and salt
    estimated: bool
    coverage: float
    """1.0 for stated nutrients. For estimates, the share of the ingredients' weight that the recipe
    measures and the food table contains, or 0.0 if the recipe gives names only."""
    # Number of servings in the estimate; None for stated nutrients.
    servings: float | None


def nutrition_of(reading: Reading) -> Nutrition:
    """Return the nutrition from a recipe's stated nutrients, else estimate it from ingredients."""
    if nutrients := reading.recipe.nutrition:
        lights = traffic_lights(nutrients)
        if len(lights) >= MIN_LIGHTS:
            matched_lines = [
                line for line in reading.lines if line.is_food and line.food is not None
            ]
            # Most of the stated energy must come from fat and sugar.
            energy = nutrients.get("energy_kcal", 0.0)
            of_both = 9.0 * nutrients.get("fat_g", 0.0) + 4.0 * nutrients.get(
                "sugar_g", 0.0
            )
            rich = energy > 0.0 and of_both >= _REFINED_ENERGY * energy
            klass = _at_best(
                class_of(lights), refined=rich and mostly_refined(matched_lines)
            )
            return Nutrition(klass, dict(nutrients), lights, False, 1.0, None)
    return estimate(reading)


def traffic_lights(per_serving: Mapping[str, float]) -> dict[str, Light]:
    """Return the lights of a serving. Without `serving_g`, a light is red or amber."""
    nutrients = dict(per_serving)
    if "salt_g" not in nutrients and "sodium_mg" in nutrients:
        nutrients["salt_g"] = nutrients["sodium_mg"] / 1000.0 * SALT_PER_SODIUM
    weight = nutrients.get("serving_g", 0.0)
    lights: dict[str, Light] = {}
    for name, red in RED_PER_SERVING.items():
        if name not in nutrients:
            continue
        lights[name] = "red" if nutrients[name] > red else "amber"
        if weight > 0.0:
            share = nutrients[name] * 100.0 / weight
            if share > RED_PER_100_G[name]:
                lights[name] = "red"
            elif share <= GREEN_PER_100_G[name] and lights[name] != "red":
                lights[name] = "green"
    return lights


def class_of(lights: Mapping[str, Light]) -> NutritionClass | None:
    """Return the class for these lights, or None without lights.

    No red light is Healthy. More than half red is Indulgent. The rest is Moderate.
    """
    if not lights:
        return None
    red = sum(light == "red" for light in lights.values())
    if red == 0:
        return "Healthy"
    return "Indulgent" if 2 * red > len(lights) else "Moderate"


@cache
def _refined_names() -> frozenset[str]:
    """Return the names of foods that are a sugar, a fat, a sweet or an alcoholic drink."""
    names: set[str] = set()
    for food in foods():
        energy, fat, sugar = (food.per_100_g[i] for i in (_ENERGY, _FAT, _SUGAR))
        protein, carbohydrate = food.per_100_g[_PROTEIN], food.per_100_g[_CARBOHYDRATE]
        alcohol = energy - 9.0 * fat - 4.0 * (carbohydrate + protein)
        sweet_and_fat = any(
            fat + sugar >= min_fat_and_sugar and protein < max_protein
            for min_fat_and_sugar, max_protein in _REFINED
        )
        if sugar >= 45.0 or sweet_and_fat or alcohol > max(20.0, 0.4 * energy):
            names.add(food.name)
    return frozenset(names - _DRIED_FRUIT)


def mostly_refined(matched_lines: Iterable[LineFacts]) -> bool:
    """Return whether most foods are refined, by weight without water, else by name."""
    weights = [
        (line.grams, line.food) for line in matched_lines if line.food is not None
    ]
    if any(grams for grams, _ in weights):
        total_g = sum(grams for grams, food in weights if food.name != "water")
        refined = sum(grams for grams, food in weights if food.name in _refined_names())
        return refined > max(_MOST_REFINED * total_g, _LEAST_REFINED_G)
    names = {
        food.name: food.name in _refined_names()
        for _, food in weights
        if food.serving_g >= _LEAST_SERVING
    }
    return sum(names.values()) > _MOST_REFINED_NAMES * len(names)


def _at_best(klass: NutritionClass | None, *, refined: bool) -> NutritionClass | None:
    return "Moderate" if refined and klass == "Healthy" else klass


def estimate(reading: Reading) -> Nutrition:
    """Estimate nutrition from the food table, without the recipe's stated nutrients."""
    recipe = reading.recipe
    lines = [line for line in reading.lines if line.is_food]
    matched_lines = [line for line in lines if line.food is not None]
    if not matched_lines:
        return Nutrition(None, {}, {}, estimated=True, coverage=0.0, servings=None)
    matched_lines = _without_frying_fat(matched_lines, recipe.steps)
    measured = [line for line in matched_lines if line.grams > 0.0]
    if measured:
        total_nutrients = _sum([line.nutrients for line in measured])
        usual_kcal = sum([line.usual[_ENERGY] for line in matched_lines])
        servings = servings_of(
            reading,
            matched_lines,
            energy_kcal=total_nutrients[_ENERGY],
            usual_kcal=usual_kcal,
        )
        figures = [value / servings for value in total_nutrients]
    else:
        servings, figures = 1.0, _sum([line.usual for line in matched_lines])
    per_serving = dict(zip(NUTRIENTS, figures, strict=True))
    known_g = sum([line.grams for line in measured]) / servings
    loose_g = sum(
        [
            line.food.serving_g
            for line in matched_lines
            if line.food and not line.line.amounts
        ]
    )
    weight_g = known_g + loose_g + _UNKNOWN_G * (len(lines) - len(matched_lines))
    for tag in recipe.tags:
        for name in _CLAIMS.get(tag.lower().replace(" ", "-"), ()):
            per_serving[name] = min(per_serving[name], _LIMITS[name])
    lights = traffic_lights(per_serving)
    return Nutrition(
        klass=_at_best(class_of(lights), refined=mostly_refined(matched_lines)),
        per_serving=per_serving,
        lights=lights,
        estimated=True,
        coverage=known_g / weight_g if weight_g else 0.0,
        servings=servings if measured else None,
    )


def _without_frying_fat(
    lines: list[LineFacts], steps: Iterable[str]
) -> list[LineFacts]:
    """Return the lines with frying fat reduced to its absorbed share."""
    if not any(line.is_frying_fat for line in lines) or not any(
        map(_FRIED.search, steps)
    ):
        return lines
    return [
        line._replace(
            grams=TAKEN_UP * line.grams,
            nutrients=scaled(line.food, TAKEN_UP * line.grams),
        )
        if line.is_frying_fat and line.food is not None
        else line
        for line in lines
    ]


def _sum(nutrients: Iterable[Nutrients]) -> list[float]:
    return [sum(figures) for figures in zip(*nutrients, strict=True)]


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
    (frozenset(words.split("|")), re.compile(pattern))
    for words, pattern in (
        (
            _VESSELS.replace("servings?", "serving|servings"),
            rf"\b(?:among|between|into|onto|in|on|to) {_EACH}{_NUMBER} {_UP_TO_3}(?:{_VESSELS})\b",
        ),
        (
            "serves|makes",
            rf"\b(?:serves|makes|makes about) {_NUMBER}(?: servings| people|\W*$)",
        ),
        (
            "servings|portions",
            rf"\b{_NUMBER} (?:[a-z-]+ ){{0,2}}(?:servings|portions)\b",
        ),
    )
)  # sentences that divide a dish, with words that make the search ten times faster
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
    matched_lines: Iterable[LineFacts],
    *,
    energy_kcal: float,
    usual_kcal: float,
) -> float:
    """Return the stated or estimated servings.

    `usual_kcal` is the usual energy of these foods per serving of other dishes.
    """
    if reading.recipe.servings:
        return float(reading.recipe.servings)
    for words, pattern in _DIVIDED:
        match = (
            None
            if words.isdisjoint(reading.different)
            else pattern.search(reading.text)
        )
        if match and 1 <= (number := _NUMBERS.get(match[1]) or int(match[1])) <= _MOST:
            return float(number)
    for facts in matched_lines:
        if facts.food is None or facts.food.name not in _EATEN_WHOLE:
            continue
        line = facts.line
        piece_count = line.quantity[0] if line.quantity and line.unit is None else 0.0
        if 2.0 <= piece_count <= 12.0:
            return piece_count
    whole_kcal = max(energy_kcal, 30.0)
    portion_kcal = (
        _LAW_FACTOR * whole_kcal**_LAW_WHOLE * max(usual_kcal, 20.0) ** _LAW_USUAL
    )
    return float(min(max(whole_kcal / portion_kcal, 1.0), _MOST))
