"""Agreement of the estimated nutrition class with the class of the source's own nutrients.

    python bench/quality/nutrition.py epicurious_nutrition.jsonl.gz foodcom_RAW_recipes.csv ...

Files: JSON lines with per-serving figures (calories, fat_g, sodium_mg, ...), or Food.com's
`RAW_recipes.csv` (names of ingredients only; nutrition in % of daily values). Estimates see the
ingredients, steps, title, tags and servings, never the figures; both classes use the lights whose
figures the source has. "names_only" drops every amount: what is left to go by in Food.com's file.
`source_then_estimated` is the confusion table, its columns `details.columns`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import labelled_recipes

from toque.cooking.ingredients.parser import parse_line
from toque.cooking.labels.features import read
from toque.cooking.labels.nutrition import class_of, estimate, traffic_lights
from toque.cooking.recipe import NUTRITION_CLASSES, Recipe

FILES = ("epicurious_nutrition.jsonl.gz", "foodcom_RAW_recipes.csv")
# Food.com's order, and what 100 % is there. Its sugar base is 25 g: with 50 g, a third of its
# recipes would hold more sugar than carbohydrate.
_FOODCOM = (
    ("fat_g", 0.65), ("sugar_g", 0.25), ("sodium_mg", 24.0), ("protein_g", 0.5),
    ("saturated_fat_g", 0.2), ("carbohydrate_g", 3.0),
)  # fmt: skip
_FIGURES = {
    "calories": "energy_kcal", "fat_g": "fat_g", "sodium_mg": "sodium_mg", "fat": "fat_g",
    "protein_g": "protein_g", "sugar_g": "sugar_g", "saturated_fat_g": "saturated_fat_g",
}  # fmt: skip


def recipe_of(record: dict[str, Any]) -> Recipe:
    """A recipe with its nutrition per serving."""
    if "daily_values" in record:
        energy, *shares = record["daily_values"]
        figures = {name: s * base for (name, base), s in zip(_FOODCOM, shares, strict=True)}
        figures["energy_kcal"] = energy
    else:
        named = {ours: record.get(theirs) for theirs, ours in _FIGURES.items() if theirs in record}
        figures = {name: value for name, value in named.items() if value is not None}
    return Recipe(
        record["title"],
        tuple(text for text in record["ingredients"] if text),
        tuple(record["directions"]),
        tags=tuple(record.get("tags") or ()),
        minutes=record.get("minutes") if "daily_values" in record else None,
        servings=record.get("servings"),
        nutrition=figures,
    )


def names_only(recipe: Recipe) -> Recipe:
    """A recipe without its amounts."""
    return replace(recipe, ingredients=tuple(parse_line(x).name for x in recipe.ingredients))


def compare(recipe: Recipe) -> tuple[str, str] | None:
    """The class by the source's figures and by the estimate; None when either is unknown."""
    lights = traffic_lights(recipe.nutrition or {})
    guessed = estimate(read(recipe)).lights
    ours = class_of({name: guessed[name] for name in lights if name in guessed})
    theirs = class_of(lights)
    if len(lights) < 2 or ours is None or theirs is None:
        return None
    return theirs, ours


def summary(pairs: Counter[tuple[str, str]]) -> dict[str, Any]:
    """Agreement, the share of the commonest class, and the confusion table."""
    n = pairs.total()
    table = {g: [pairs[g, e] for e in NUTRITION_CLASSES] for g in NUTRITION_CLASSES}
    return {
        "recipes": n,
        "agreement": round(sum(pairs[c, c] for c in NUTRITION_CLASSES) / n, 4),
        "always_the_commonest": round(max(map(sum, table.values())) / n, 4),
        "source_then_estimated": table,
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Compare every file."""

    def labels(record: dict[str, Any]) -> labelled_recipes.Labels:
        recipe = recipe_of(record)
        shown = replace(recipe, tags=()) if a.no_tags else recipe
        for rule, variant in (("", shown), ("_names_only", names_only(shown))):
            if (pair := compare(variant)) is not None:
                yield rule, pair

    result = labelled_recipes.scored(a.files, FILES, labels, summary)
    result.details = {"columns": list(NUTRITION_CLASSES)}
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("files", type=Path, nargs="*")
    p.add_argument("--no-tags", action="store_true", help="ignore tags such as low-fat")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
