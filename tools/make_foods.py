"""Makes src/toque/cooking/foods.tsv from tools/foods.txt and the USDA's SR21 files.

    python tools/make_foods.py FOLDER_WITH_ABBREV_AND_FOOD_DES [--recipes FILE.jsonl.gz]

`foods.txt` says which USDA entry stands for which foods, and what a cup or a piece weighs. The
nutrients are USDA's (National Nutrient Database for Standard Reference 21, public domain).
"= kcal fat saturates sugar sodium protein carbohydrate" gives typical values for the few foods
that SR21 lacks. Where USDA gives no sugars, 40 % of the carbohydrate is taken.

With `--recipes` (JSON lines with "ingredients" and "calories" of a serving, .gz) the last column
is made anew: the median weight of the food in a serving of the recipes that measure it, where the
servings are the energy of the whole over that of a serving. It stands in where a recipe gives no
amounts. Only the development half is read (`half_of` in tests/fixtures/labelled_lines.py): the
other judges the estimates.
Without `--recipes` the column stays as it is.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import xxhash

HERE = Path(__file__).parent
TABLE = HERE.parent / "src" / "toque" / "cooking" / "foods.tsv"
COLUMNS = {  # place in ABBREV.txt
    "energy_kcal": 3,
    "fat_g": 5,
    "saturated_fat_g": 42,
    "sugar_g": 9,
    "sodium_mg": 15,
    "protein_g": 4,
    "carbohydrate_g": 7,
}
HEADER = ("names", "usda", *COLUMNS, "weights_g", "serving_g")


def usda_rows(path: Path) -> list[list[str]]:
    """Rows of an SR file: fields between "^", texts between "~"."""
    lines = path.read_text(encoding="latin-1").splitlines()
    return [[field.strip("~") for field in line.split("^")] for line in lines]


def nutrients(row: list[str], sugar: float | None) -> list[float]:
    """The nutrients of an ABBREV row per 100 g, in the order of `COLUMNS`."""
    values = {name: row[place] for name, place in COLUMNS.items()}
    if not values["sugar_g"]:
        guess = 0.4 * float(values["carbohydrate_g"])
        values["sugar_g"] = str(guess if sugar is None else sugar)
    return [float(value or 0.0) for value in values.values()]


def typical_weights(recipes: Path) -> dict[str, float]:
    """Median grams of each food in a serving."""
    from toque.cooking.ingredients.parser import parse_line
    from toque.cooking.labels.foods import find_food, grams_of

    seen: dict[str, list[float]] = defaultdict(list)
    with gzip.open(recipes, "rb") as file:
        for text in file:
            recipe = json.loads(text)
            held_out = (
                xxhash.xxh3_64_intdigest(recipe["title"].encode()) % 2
            )  # as in tests/fixtures/labelled_lines.py
            if held_out or not (recipe.get("calories") or 0.0) > 20.0:
                continue
            weights: list[tuple[str, float]] = []
            energy = 0.0
            for line in recipe["ingredients"]:
                read = parse_line(line)
                food = find_food(read.name)
                grams = grams_of(read, food) if food is not None else None
                if food is not None and grams is not None:
                    weights.append((food.name, grams))
                    energy += food.per_100_g[0] * grams / 100.0
            servings = min(max(energy / recipe["calories"], 1.0), 30.0)
            for name, grams in weights:
                seen[name].append(grams / servings)
    return {name: statistics.median(values) for name, values in seen.items()}


def read_list(usda: Path) -> list[list[str]]:
    """Rows of the table without their last column."""
    descriptions = {row[0]: row[2] for row in usda_rows(usda / "FOOD_DES.txt")}
    figures = {row[0]: row for row in usda_rows(usda / "ABBREV.txt")}
    table: list[list[str]] = []
    for line in (HERE / "foods.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        names, source, weights = (part.strip() for part in line.split("|"))
        given = dict(item.split("=") for item in weights.split())
        sugar = float(given.pop("sugar")) if "sugar" in given else None
        if source.startswith("="):
            number, values = "typical", [float(value) for value in source[1:].split()]
        else:
            matches = sorted(
                (
                    key
                    for key, text in descriptions.items()
                    if text.lower().startswith(source.lower())
                ),
                key=lambda key: (len(descriptions[key]), key),
            )
            if not matches:
                sys.exit(
                    f"{source!r} of {names.split(',')[0]!r} begins no description of SR21."
                )
            number, values = matches[0], nutrients(figures[matches[0]], sugar)
        kept = ";".join(f"{unit}={grams}" for unit, grams in given.items())
        unique = ",".join(dict.fromkeys(name.strip() for name in names.split(",")))
        table.append([unique, number, *(f"{value:.4g}" for value in values), kept])
    return table


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("usda", type=Path)
    parser.add_argument("--recipes", type=Path)
    args = parser.parse_args()
    table = read_list(args.usda)
    typical: dict[str, str] = {}
    if TABLE.exists():
        for line in TABLE.read_text(encoding="utf-8").splitlines()[1:]:
            cells = line.split("\t")
            typical[cells[0].split(",")[0]] = cells[-1]
    write(table, typical)
    if args.recipes is not None:
        found = typical_weights(args.recipes)
        write(table, {name: f"{grams:.3g}" for name, grams in found.items()})


def write(table: list[list[str]], typical: dict[str, str]) -> None:
    """Write the rows with their weights in a serving."""
    rows = [[*row, typical.get(row[0].split(",")[0], "")] for row in table]
    text = "\n".join("\t".join(row) for row in [list(HEADER), *rows]) + "\n"
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
