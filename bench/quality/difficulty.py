"""How often `difficulty_of` and the 6/12 rule agree with Food.com's easy tags; prints JSON.

    python bench/difficulty.py foodcom_RAW_recipes.csv [recipes.jsonl.gz ...]

Food.com's `easy` and `beginner-cook` are taken for easy, other recipes for not easy. JSON lines
(title, ingredients, directions, tags) count when they carry tags; a tag that holds the word
"easy" ("Quick & Easy", "difficulty_easy") makes them easy. "kappa" is Cohen's: agreement beyond
chance, which matters where few recipes are tagged. Halves as in bench/nutrition.py.
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
from pathlib import Path

import xxhash

from toque.cooking.labels.difficulty import report_difficulty
from toque.cooking.recipe import Recipe

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DEFAULTS = [
    SHARED / "data" / "recipes" / name
    for name in ("foodcom_RAW_recipes.csv", "epicurious_nutrition.jsonl.gz")
]
_EASY = {"easy", "beginner-cook"}


def recipes(path: Path) -> Iterator[tuple[Recipe, bool]]:
    """Recipes of a file, each with whether its tags call it easy."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                tags = tuple(ast.literal_eval(row["tags"]))
                recipe = Recipe(
                    row["name"],
                    tuple(ast.literal_eval(row["ingredients"])),
                    tuple(ast.literal_eval(row["steps"])),
                    minutes=int(row["minutes"]),
                )
                yield recipe, not _EASY.isdisjoint(tags)
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for line in file:
            record = json.loads(line)
            tags = tuple(tag.lower() for tag in record.get("tags") or ())
            if tags and record["directions"] and record["ingredients"]:
                texts = (tuple(record["ingredients"]), tuple(record["directions"]))
                yield Recipe(record["title"], *texts), any("easy" in tag for tag in tags)


def summary(pairs: Counter[tuple[bool, bool]]) -> dict[str, float]:
    """Agreement, Cohen's kappa and the share called easy."""
    n = pairs.total()
    agreement = (pairs[True, True] + pairs[False, False]) / n
    tagged = (pairs[True, True] + pairs[True, False]) / n
    called = (pairs[True, True] + pairs[False, True]) / n
    chance = tagged * called + (1 - tagged) * (1 - called)
    return {
        "agreement": round(agreement, 4),
        "kappa": round((agreement - chance) / (1 - chance), 4),
        "tagged_easy": round(tagged, 4),
        "called_easy": round(called, 4),
    }


def main() -> None:
    """Compare every file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", default=DEFAULTS)
    args = parser.parse_args()
    result: dict[str, dict[str, object]] = {}
    for path in args.files:
        if not path.exists():
            result[path.name] = {"skipped": "not there: name a file, or set TOQUE_SHARED"}
            continue
        counts: dict[str, Counter[tuple[bool, bool]]] = {}
        for recipe, easy in recipes(path):
            half = xxhash.xxh3_64_intdigest(recipe.title.encode()) % 2
            name = "held_out" if half else "development"
            report = report_difficulty(recipe)
            for rule, level in (("refined", report.level), ("bounds", report.by_bounds)):
                pair = (easy, level == "easy")
                counts.setdefault(f"{name}_{rule}", Counter())[pair] += 1
        halves = {key: summary(pairs) for key, pairs in sorted(counts.items())}
        recipes_read = sum(c.total() for c in counts.values()) // 2
        result[path.name] = {"recipes": recipes_read, **halves}
    json.dump(result, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
