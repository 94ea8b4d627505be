"""Agreement of `judged_difficulty` and the 6/12 rule with Food.com's easy tags.

    python bench/quality/difficulty.py foodcom_RAW_recipes.csv [recipes.jsonl.gz ...]

Food.com's `easy` and `beginner-cook` count as easy, other recipes as not easy. JSON lines
(title, ingredients, directions, tags) count when they carry tags; a tag that holds the word
"easy" ("Quick & Easy", "difficulty_easy") makes them easy. "kappa" is Cohen's: agreement beyond
chance, which matters where few recipes are tagged. "_refined" is our rule, "_bounds" the 6/12 rule.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import labelled_recipes

from toque.cooking.labels.difficulty import judged_difficulty
from toque.cooking.labels.features import read
from toque.cooking.recipe import Recipe

FILES = ("foodcom_RAW_recipes.csv", "epicurious_nutrition.jsonl.gz")


def labels(record: dict[str, Any]) -> labelled_recipes.Labels:
    """Whether the tags and each rule call a recipe easy."""
    tags = [tag.lower() for tag in record.get("tags") or ()]
    texts = tuple(record["ingredients"]), tuple(record["directions"])
    if "daily_values" in record:  # Food.com's
        easy = not {"easy", "beginner-cook"}.isdisjoint(tags)
    elif tags and all(texts):
        easy = any("easy" in tag for tag in tags)
    else:
        return
    recipe = Recipe(record["title"], *texts, minutes=record.get("minutes"))
    report = judged_difficulty(read(recipe))
    yield "_refined", (easy, report.level == "easy")
    yield "_bounds", (easy, report.by_bounds == "easy")


def summary(pairs: Counter[tuple[bool, bool]]) -> dict[str, float]:
    """Agreement, Cohen's kappa and the share called easy."""
    n = pairs.total()
    agreement = (pairs[True, True] + pairs[False, False]) / n
    tagged = (pairs[True, True] + pairs[True, False]) / n
    called = (pairs[True, True] + pairs[False, True]) / n
    chance = tagged * called + (1 - tagged) * (1 - called)
    return {
        "recipes": n,
        "agreement": round(agreement, 4),
        "kappa": round((agreement - chance) / (1 - chance), 4),
        "tagged_easy": round(tagged, 4),
        "called_easy": round(called, 4),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Compare every file."""
    return labelled_recipes.scored(a.files, FILES, labels, summary)


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("files", type=Path, nargs="*")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
