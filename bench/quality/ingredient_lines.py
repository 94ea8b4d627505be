"""Scores the ingredient-line parser against hand-labelled lines, and prints them as JSON.

    python bench/ingredient_lines.py ingredient_lines_labelled.csv [--errors name]

The file has columns input, name, quantity, unit, size, preparation, comment, purpose, source;
quantities and units are lists in the line's order ("250 9", "ml fl oz"), fractions are coded
"1#1$2". A line counts as right only when every quantity (unit) it holds is found and no other is.
Names are compared in lower case without marks, words in the singular. The halves are made by a
hash of the line: "development" was looked at while the parser was written, "held_out" was not.
Speed is of one process, without the cache, in processor time, the best of five passes. Without an
argument the file is looked for in $TOQUE_SHARED, else in ../shared beside the repository.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import sys
import time
from collections import Counter
from pathlib import Path

import xxhash

from toque.cooking.ingredients.fractions import WORDS, number
from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.parser import IngredientLine, parse_line
from toque.cooking.ingredients.units import unit_of
from toque.cooking.ingredients.vocabulary import SIZES

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
DEFAULT = SHARED / "data" / "recipes" / "ingredient_lines_labelled.csv"
_MARKS = re.compile(r"[^\w\s'-]")
_FLUID = re.compile(r"\b(?:fl|fluid) ?(oz|ounces?)\b", re.IGNORECASE)


def gold_quantities(text: str) -> Counter[tuple[float, float]]:
    """The quantities of a gold field: "6 84", "#1$2-1", "One 28", "2x 400 14"."""
    found: Counter[tuple[float, float]] = Counter()
    for word in text.lower().split():
        if word in WORDS:
            found[WORDS[word]] += 1
            continue
        bounds = [_gold_number(part) for part in word.rstrip("x").split("-") if part]
        found[(bounds[0], bounds[-1])] += 1
    return found


def _gold_number(text: str) -> float:
    try:
        return number(text.replace("#", " ", 1).replace("$", "/").strip())
    except ValueError:
        return -1.0  # "thirty": no parser of ours finds it


def gold_units(text: str) -> Counter[str]:
    """The units of a gold field under their one names, sizes left out."""
    words = _FLUID.sub("floz", text).split()
    names = [
        unit.name if (unit := unit_of(w)) else w.lower() for w in words if w.lower() not in SIZES
    ]
    return Counter(names)


def normal_name(text: str) -> str:
    """A name to compare: lower case, no marks, singular words."""
    words = _MARKS.sub(" ", text.lower().replace("’", "'").replace("–", "-")).split()
    return " ".join(stem(word) for word in words)


def score_line(row: dict[str, str], read: IngredientLine) -> dict[str, bool]:
    """What the parser got right of one labelled line."""
    quantities = Counter(a.quantity for a in read.amounts if a.quantity is not None)
    units = Counter(a.unit for a in read.amounts if a.unit is not None)
    gold_q, gold_u = gold_quantities(row["quantity"]), gold_units(row["unit"])
    first_q = next(iter(gold_q), None)
    first_u = next(iter(gold_u), None)
    return {
        "quantity": quantities == gold_q,
        "unit": units == gold_u,
        "name": normal_name(read.name) == normal_name(row["name"]),
        "first_quantity": read.quantity == first_q,
        "first_unit": (read.unit in gold_u) if read.unit else not gold_u or first_u == "inch",
        "preparation": normal_name(read.preparation) == normal_name(row["preparation"]),
    }


def timed(lines: list[str]) -> tuple[list[IngredientLine], float]:
    """The lines read without the cache, and the processor seconds of the best of five passes."""
    parse = parse_line.__wrapped__
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        reads = [parse(line) for line in lines]
        best = min(best, time.process_time() - started)
    return reads, best


def half_of(line: str) -> str:
    """The half a line belongs to."""
    return "held_out" if xxhash.xxh3_64_intdigest(line.encode()) % 2 else "development"


def scores(rows: list[dict[str, str]], reads: list[IngredientLine]) -> dict[str, dict[str, float]]:
    """Shares of lines right, by half and over all."""
    right: dict[str, Counter[str]] = {"development": Counter(), "held_out": Counter()}
    lines: Counter[str] = Counter()
    for row, read in zip(rows, reads, strict=True):
        half = half_of(row["input"])
        lines[half] += 1
        right[half].update(key for key, value in score_line(row, read).items() if value)
    right["all"], lines["all"] = right["development"] + right["held_out"], len(rows)
    return {
        half: {"lines": lines[half]}
        | {key: round(count / max(lines[half], 1), 4) for key, count in sorted(found.items())}
        for half, found in right.items()
    }


def print_errors(rows: list[dict[str, str]], reads: list[IngredientLine], field: str) -> None:
    """Lines of the development half of which the parser got `field` wrong, on stderr."""
    for row, read in zip(rows, reads, strict=True):
        if half_of(row["input"]) == "development" and not score_line(row, read)[field]:
            gold = {key: value for key, value in row.items() if value and key != "input"}
            sys.stderr.write(f"{row['input']}\n   gold {gold}\n   read {read}\n")


def main() -> None:
    """Score a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--errors", metavar="FIELD", help="print the lines that are wrong in it")
    args = parser.parse_args()
    if not args.file.exists():
        print(json.dumps({"skipped": f"no {args.file.name}: name it, or set TOQUE_SHARED"}))
        return
    with args.file.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    reads, seconds = timed([row["input"] for row in rows])
    if args.errors:
        print_errors(rows, reads, args.errors)
    result = {"lines_per_second": round(len(rows) / seconds), **scores(rows, reads)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
