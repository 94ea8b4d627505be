"""How often the estimated nutrition class is the class of the given nutrients; prints JSON.

    python bench/nutrition.py epicurious_nutrition.jsonl.gz foodcom_RAW_recipes.csv ...

Files: JSON lines with per-serving figures (calories, fat_g, sodium_mg, ...), or Food.com's
`RAW_recipes.csv` (names of ingredients only; nutrition in % of daily values). Estimates see the
ingredients, steps, title, tags and servings, never the figures; both classes use the lights whose
figures are given. Halves are made by a hash of the title: "development" was looked at while the
rules were written, "held_out" was not. "names_only" drops every amount: what is left to go by in
Food.com's file.
"""

from __future__ import annotations

import argparse
import ast
import csv
import gzip
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from toque.cooking.ingredients.parser import parse_line
from toque.cooking.labels.nutrition import class_of, estimate, traffic_lights
from toque.cooking.recipe import NUTRITION_CLASSES, Recipe

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DEFAULTS = [
    SHARED / "data" / "recipes" / name
    for name in ("epicurious_nutrition.jsonl.gz", "foodcom_RAW_recipes.csv")
]
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


def recipes(path: Path) -> Iterator[Recipe]:
    """Recipes of a file with their nutrition per serving."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                energy, *shares = ast.literal_eval(row["nutrition"])
                figures = {n: s * b for (n, b), s in zip(_FOODCOM, shares, strict=True)}
                yield Recipe(
                    row["name"],
                    tuple(ast.literal_eval(row["ingredients"])),
                    tuple(ast.literal_eval(row["steps"])),
                    tags=tuple(ast.literal_eval(row["tags"])),
                    minutes=int(row["minutes"]),
                    nutrition={"energy_kcal": energy} | figures,
                )
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for line in file:
            record = json.loads(line)
            yield Recipe(
                record["title"],
                tuple(text for text in record["ingredients"] if text),
                tuple(record["directions"]),
                tags=tuple(record.get("tags") or ()),
                servings=record.get("servings"),
                nutrition={
                    ours: record[theirs]
                    for theirs, ours in _FIGURES.items()
                    if record.get(theirs) is not None
                },
            )


def names_only(recipe: Recipe) -> Recipe:
    """A recipe without its amounts."""
    return replace(recipe, ingredients=tuple(parse_line(x).name for x in recipe.ingredients))


def compare(recipe: Recipe) -> tuple[str, str] | None:
    """The class by the given figures and by the estimate; None when either is unknown."""
    given = traffic_lights(recipe.nutrition or {})
    guessed = estimate(recipe).lights
    ours = class_of({name: guessed[name] for name in given if name in guessed})
    theirs = class_of(given)
    if len(given) < 2 or ours is None or theirs is None:
        return None
    return theirs, ours


def summary(pairs: Counter[tuple[str, str]]) -> dict[str, Any]:
    """Agreement, the share of the commonest class, and the confusion table."""
    n = pairs.total()
    if not n:
        return {"recipes": 0}
    by_class = Counter[str]()
    for (given, _), count in pairs.items():
        by_class[given] += count
    table = {g: [pairs[g, e] for e in NUTRITION_CLASSES] for g in NUTRITION_CLASSES}
    return {
        "recipes": n,
        "agreement": round(sum(pairs[c, c] for c in NUTRITION_CLASSES) / n, 4),
        "always_the_commonest": round(max(by_class.values()) / n, 4),
        "given_then_estimated": table,
    }


def main() -> None:
    """Compare every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=DEFAULTS)
    parser.add_argument("--no-tags", action="store_true", help="ignore tags such as low-fat")
    args = parser.parse_args()
    result: dict[str, Any] = {"columns": list(NUTRITION_CLASSES)}
    for path in args.files:
        if not path.exists():
            result[path.name] = {"skipped": "not there: name a file, or set TOQUE_SHARED"}
            continue
        counts: dict[str, Counter[tuple[str, str]]] = {}
        for recipe in recipes(path):
            half = xxhash.xxh3_64_intdigest(recipe.title.encode()) % 2
            name = "held_out" if half else "development"
            shown = replace(recipe, tags=()) if args.no_tags else recipe
            for key, variant in ((name, shown), (f"{name}_names_only", names_only(shown))):
                pair = compare(variant)
                if pair is not None:
                    counts.setdefault(key, Counter())[pair] += 1
        result[path.name] = {key: summary(pairs) for key, pairs in sorted(counts.items())}
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
