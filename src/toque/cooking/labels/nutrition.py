"""Nutrition classes (Healthy, Moderate, Indulgent) from stated or estimated traffic lights.

The lights follow the UK's front-of-pack guidance (Food Standards Agency and Department of
Health, "Guide to creating a front of pack nutrition label", 2016): green and red per 100 g, and red
per serving. Without the weight of a serving, only red and not red are known.

This module defines the classes. A dish is *Healthy* if no light is red, *Indulgent* if more than
half of the known lights are red, and *Moderate* otherwise. A small serving turns no light red.
Therefore a dish that is mostly sugar, fat, sweets or alcohol is at best Moderate, see
`mostly_refined`.

The number of servings is the first available of:

1. the recipe's own number
2. the number in a step that divides the dish ("among 4 plates")
3. the number of pieces that are eaten whole (4 salmon fillets)
4. the energy of the dish divided by the energy of a portion

The energy of a portion is a power law of the dish's energy and of its foods' usual energy per
serving. It was fitted by least squares on 3,200 Epicurious recipes. The residual's standard
deviation is a factor of 1.75.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from toque.cooking.labels.features import (
    TAKEN_UP,
    LineFacts,
    Nutrients,
    Reading,
    nutrients_in,
)
from toque.cooking.labels.foods import NUTRIENTS, Food, foods
from toque.cooking.recipe import NutritionClass

Light = Literal["green", "amber", "red"]

GREEN_PER_100_G = {
    "fat_g": 3.0,
    "saturated_fat_g": 1.5,
    "sugar_g": 5.0,
    "salt_g": 0.3,
}
RED_PER_100_G = {
    "fat_g": 17.5,
    "saturated_fat_g": 5.0,
    "sugar_g": 22.5,
    "salt_g": 1.5,
}
RED_PER_SERVING = {
    "fat_g": 21.0,
    "saturated_fat_g": 6.0,
    "sugar_g": 27.0,
    "salt_g": 1.8,
}
SALT_PER_SODIUM = 2.5
MIN_LIGHTS = 2
"""Minimum number of known traffic lights. If fewer nutrients are stated, the class is estimated."""

_UNKNOWN_G = 40.0
"""Assumed grams per serving of a food that is neither measured nor in the table."""
_ENERGY = NUTRIENTS.index("energy_kcal")
_FAT, _SUGAR = NUTRIENTS.index("fat_g"), NUTRIENTS.index("sugar_g")
_PROTEIN, _CARBOHYDRATE = (
    NUTRIENTS.index("protein_g"),
    NUTRIENTS.index("carbohydrate_g"),
)
_MAX_REFINED_SHARE = 0.5
"""Largest fraction of refined foods in a Healthy dish, by weight without water."""
_MIN_REFINED_G = 15.0
"""Largest weight of refined foods that never counts, such as the sugar in a pot of tea."""
_MAX_REFINED_NAMES = 0.6
"""Largest fraction of refined foods in a Healthy dish without weights, by number of foods."""
_MIN_SERVING_G = 2.0
"""Minimum grams per serving of a counted food, which excludes seasonings."""
_REFINED_ENERGY = 0.6
"""Minimum fraction of fat and sugar in a refined dish's stated energy."""
_REFINED = ((25.0, 0.5), (45.0, 2.0), (70.0, 6.0))
"""Minimum fat and sugar, and maximum protein, of a refined food in grams per 100 g."""
_FAT_KCAL = 9.0
"""Energy per gram of fat."""
_OTHER_KCAL = 4.0
"""Energy per gram of carbohydrate, including sugar, or of protein."""
_DRIED_FRUIT = frozenset({"raisin", "dried cranberry", "date"})
_FRIED = re.compile(r"\bfry|\bfried\b|\bfries\b", re.IGNORECASE)
_LIMITS = {
    **RED_PER_SERVING,
    "sodium_mg": RED_PER_SERVING["salt_g"] * 1000 / SALT_PER_SODIUM,
}
_FATS = ("fat_g", "saturated_fat_g")
_CLAIMS: dict[str, tuple[str, ...]] = {
    "low-fat": _FATS, "fat-free": _FATS, "low-saturated-fat": _FATS, "low-calorie": ("fat_g",),
    **dict.fromkeys(("low-sodium", "low-salt"), ("sodium_mg",)),
    **dict.fromkeys(("low-carb", "very-low-carbs", "diabetic", "sugar-free"), ("sugar_g",)),
}  # fmt: skip
"""Tags for a dish that is low in a nutrient, each with the estimate that it caps just below red."""


@dataclass(frozen=True, slots=True)
class Nutrition:
    """Nutrients of a serving and its class."""

    klass: NutritionClass | None  # None without stated nutrients or known ingredients
    per_serving: Mapping[str, float]
    lights: Mapping[str, Light]  # known lights of fat, saturates, sugar and salt
    estimated: bool
    coverage: float
    """1.0 for stated nutrients. For estimates, the fraction of the ingredient weight that the
    recipe measures and the food table contains, or 0.0 if the recipe gives names only."""
    # Number of servings in the estimate; None for stated nutrients.
    servings: float | None


def nutrition_of(reading: Reading) -> Nutrition:
    """Return the nutrition from a recipe's stated nutrients, or estimate it from ingredients."""
    nutrients = reading.recipe.nutrition or {}
    lights = traffic_lights(nutrients)
    if len(lights) < MIN_LIGHTS:
        return estimate_nutrition(reading)

    is_refined = False
    energy = nutrients.get("energy_kcal", 0.0)
    fat_energy = _FAT_KCAL * nutrients.get("fat_g", 0.0)
    sugar_energy = _OTHER_KCAL * nutrients.get("sugar_g", 0.0)
    if energy > 0.0 and fat_energy + sugar_energy >= _REFINED_ENERGY * energy:
        is_refined = mostly_refined(
            line for line in reading.lines if line.is_food and line.food is not None
        )
    klass = _cap_class(class_of(lights), is_refined=is_refined)
    return Nutrition(klass, dict(nutrients), lights, False, 1.0, None)


def traffic_lights(per_serving: Mapping[str, float]) -> dict[str, Light]:
    """Return the lights of a serving's known nutrients.

    Without the weight `serving_g`, a light is red or amber.
    """
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
            per_100_g = nutrients[name] * 100.0 / weight
            if per_100_g > RED_PER_100_G[name]:
                lights[name] = "red"
            elif per_100_g <= GREEN_PER_100_G[name] and lights[name] != "red":
                lights[name] = "green"
    return lights


def class_of(lights: Mapping[str, Light]) -> NutritionClass | None:
    """Return the class for these lights, or None without lights.

    A dish without a red light is Healthy. A dish with more than half red lights is Indulgent. Any
    other dish is Moderate.
    """
    if not lights:
        return None
    n_red = sum(light == "red" for light in lights.values())
    if n_red == 0:
        return "Healthy"
    return "Indulgent" if n_red > len(lights) / 2 else "Moderate"


@cache
def _refined_names() -> frozenset[str]:
    """Return the names of foods that are a sugar, a fat, a sweet or an alcoholic drink."""
    names = {food.name for food in foods() if _is_refined(food)}
    return frozenset(names - _DRIED_FRUIT)


def _is_refined(food: Food) -> bool:
    """Check whether a food is mostly sugar, fat or alcohol, with little protein."""
    energy, fat, sugar = (food.per_100_g[i] for i in (_ENERGY, _FAT, _SUGAR))
    protein, carbohydrate = food.per_100_g[_PROTEIN], food.per_100_g[_CARBOHYDRATE]
    if sugar >= 45.0:
        return True
    for min_fat_and_sugar, max_protein in _REFINED:
        if fat + sugar >= min_fat_and_sugar and protein < max_protein:
            return True
    # The table has no alcohol column, so count energy that no other nutrient accounts for as
    # alcohol.
    alcohol_kcal = energy - _FAT_KCAL * fat - _OTHER_KCAL * (carbohydrate + protein)
    return alcohol_kcal > max(20.0, 0.4 * energy)


def mostly_refined(matched_lines: Iterable[LineFacts]) -> bool:
    """Check whether most foods are refined, by weight without water, or by number of foods."""
    refined_names = _refined_names()
    weights = [
        (line.grams, line.food) for line in matched_lines if line.food is not None
    ]
    if any(grams for grams, _ in weights):
        total_g = sum(grams for grams, food in weights if food.name != "water")
        refined_g = sum(grams for grams, food in weights if food.name in refined_names)
        return refined_g > max(_MAX_REFINED_SHARE * total_g, _MIN_REFINED_G)
    names = {food.name for _, food in weights if food.serving_g >= _MIN_SERVING_G}
    return len(names & refined_names) > _MAX_REFINED_NAMES * len(names)


def _cap_class(
    klass: NutritionClass | None, *, is_refined: bool
) -> NutritionClass | None:
    """Return Moderate instead of Healthy for a refined dish."""
    return "Moderate" if is_refined and klass == "Healthy" else klass


def estimate_nutrition(reading: Reading) -> Nutrition:
    """Estimate nutrition from the food table, without the recipe's stated nutrients."""
    recipe = reading.recipe
    lines = [line for line in reading.lines if line.is_food]
    matched_lines = [line for line in lines if line.food is not None]
    if not matched_lines:
        return Nutrition(None, {}, {}, estimated=True, coverage=0.0, servings=None)
    has_frying_fat = any(line.is_frying_fat for line in matched_lines)
    if has_frying_fat and any(map(_FRIED.search, recipe.steps)):
        matched_lines = list(map(_reduce_frying_fat, matched_lines))

    measured_lines = [line for line in matched_lines if line.grams > 0.0]
    servings = 1.0
    if measured_lines:
        total_nutrients = _sum_nutrients(line.nutrients for line in measured_lines)
        servings = servings_of(
            reading,
            matched_lines,
            energy_kcal=total_nutrients[_ENERGY],
            usual_kcal=sum([line.usual[_ENERGY] for line in matched_lines]),
        )
        values = [value / servings for value in total_nutrients]
    else:
        values = _sum_nutrients(line.usual for line in matched_lines)
    per_serving = dict(zip(NUTRIENTS, values, strict=True))
    _apply_claims(per_serving, recipe.tags)

    measured_g = sum([line.grams for line in measured_lines]) / servings
    unmeasured_g = sum([_unmeasured_grams(line) for line in matched_lines])
    unknown_g = _UNKNOWN_G * (len(lines) - len(matched_lines))
    weight_g = measured_g + unmeasured_g + unknown_g

    lights = traffic_lights(per_serving)
    is_refined = mostly_refined(matched_lines)
    return Nutrition(
        klass=_cap_class(class_of(lights), is_refined=is_refined),
        per_serving=per_serving,
        lights=lights,
        estimated=True,
        coverage=measured_g / weight_g if weight_g else 0.0,
        servings=servings if measured_lines else None,
    )


def _unmeasured_grams(line: LineFacts) -> float:
    """Return the usual grams per serving of a food without an amount, and 0.0 for other foods."""
    if line.food is None or line.line.amounts:
        return 0.0
    return line.food.serving_g


def _reduce_frying_fat(line: LineFacts) -> LineFacts:
    """Reduce frying fat to the fraction that is absorbed. Return any other line unchanged."""
    if not line.is_frying_fat or line.food is None:
        return line
    grams = TAKEN_UP * line.grams
    return line._replace(grams=grams, nutrients=nutrients_in(line.food, grams))


def _sum_nutrients(nutrients: Iterable[Nutrients]) -> list[float]:
    return [sum(values) for values in zip(*nutrients, strict=True)]


def _apply_claims(per_serving: dict[str, float], tags: Iterable[str]) -> None:
    """Cap nutrients in place at the limits that tags such as "low-fat" promise."""
    for tag in tags:
        for name in _CLAIMS.get(tag.lower().replace(" ", "-"), ()):
            per_serving[name] = min(per_serving[name], _LIMITS[name])


_NUMBERS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16, "eighteen": 18, "twenty": 20,
}  # fmt: skip
_NUMBER = rf"(\d{{1,2}}|{'|'.join(_NUMBERS)})"
_VESSELS = (
    "plates|bowls|glasses|ramekins|cups|servings?|portions|dishes|wedges|mugs|flutes|goblets|slices"
    "|squares|tumblers|pieces|people|skewers|coupes|tartlets|molds"
)
_EACH = "(?:each of )?(?:the )?"
_UP_TO_3 = "(?:[a-z-]+ ){0,3}"
_DIVIDED = tuple(
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
)
"""Patterns for sentences that divide a dish, each with words that such a sentence contains.
Searching for these words first is ten times faster.
"""
_EATEN_WHOLE = frozenset(
    {"chicken", "chicken breast", "steak", "pork loin", "salmon", "cod", "tuna", "veal", "duck",
     "bun", "hot dog", "rabbit", "pita", "crab", "tortilla", "mackerel"}
)  # fmt: skip
"""Foods that are usually served by the piece."""
_LAW_FACTOR = 6.86
_LAW_WHOLE = 0.265
_LAW_USUAL = 0.32
"""Factor and exponents of the power law for the energy of a portion."""
_MAX_SERVINGS = 40.0


def servings_of(
    reading: Reading,
    matched_lines: Iterable[LineFacts],
    *,
    energy_kcal: float,
    usual_kcal: float,
) -> float:
    """Return the stated or estimated servings.

    Args:
        reading: Features of the recipe.
        matched_lines: Lines with a food of the table.
        energy_kcal: Energy of the dish.
        usual_kcal: Sum of the foods' usual energy per serving of other dishes.
    """
    if reading.recipe.servings:
        return float(reading.recipe.servings)
    servings = _servings_in_steps(reading) or _pieces_eaten_whole(matched_lines)
    if servings is not None:
        return servings
    # The minimum energies keep the estimate finite for dishes such as tea.
    dish_kcal = max(energy_kcal, 30.0)
    usual_factor = max(usual_kcal, 20.0) ** _LAW_USUAL
    portion_kcal = _LAW_FACTOR * dish_kcal**_LAW_WHOLE * usual_factor
    return float(min(max(dish_kcal / portion_kcal, 1.0), _MAX_SERVINGS))


def _servings_in_steps(reading: Reading) -> float | None:
    """Return the number in a step that divides the dish, or None without such a step."""
    for words, pattern in _DIVIDED:
        if words.isdisjoint(reading.distinct_words):
            continue
        if match := pattern.search(reading.text):
            number = _NUMBERS.get(match[1]) or int(match[1])
            if 1 <= number <= _MAX_SERVINGS:
                return float(number)
    return None


def _pieces_eaten_whole(matched_lines: Iterable[LineFacts]) -> float | None:
    """Return the number of pieces of a food that is eaten whole, or None without such a food."""
    for facts in matched_lines:
        if facts.food is None or facts.food.name not in _EATEN_WHOLE:
            continue
        line = facts.line
        n_pieces = line.quantity[0] if line.quantity and line.unit is None else 0.0
        if 2.0 <= n_pieces <= 12.0:
            return n_pieces
    return None
