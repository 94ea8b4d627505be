"""Scores the ingredient-line parser against hand-labelled lines, and prints them as JSON.

    python bench/ingredient_lines.py ingredient_lines_labelled.csv [--errors 50 --half development]

The file has columns input, name, quantity, unit, size, preparation, comment, purpose, source;
quantities and units are lists in the line's order ("250 9", "ml fl oz"), fractions are coded
"1#1$2". A line counts as right only when every quantity (unit) it holds is found and no other is.
Names are compared in lower case without marks, words in the singular. The halves are made by a
hash of the line: "development" was looked at while the parser was written, "held_out" was not.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import xxhash

from toque.cooking.ingredient_lines import IngredientLine, parse_line
from toque.cooking.ingredient_words import SIZES
from toque.cooking.ingredients import stem
from toque.cooking.quantities import WORDS, number
from toque.cooking.units_of_measure import unit_of

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
    names = [unit.name if (unit := unit_of(w)) else w.lower() for w in words if w.lower() not in SIZES]
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


def main() -> None:
    """Score a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--errors", type=int, default=0, help="print so many errors of a field")
    parser.add_argument("--field", default="name")
    parser.add_argument("--half", choices=("development", "held_out"), default="development")
    args = parser.parse_args()
    with args.file.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    started = time.perf_counter()
    reads = [parse_line(row["input"]) for row in rows]
    seconds = time.perf_counter() - started
    right: dict[str, Counter[str]] = {"development": Counter(), "held_out": Counter()}
    n = Counter[str]()
    for row, read in zip(rows, reads, strict=True):
        half = "held_out" if xxhash.xxh3_64_intdigest(row["input"].encode()) % 2 else "development"
        scores = score_line(row, read)
        n[half] += 1
        right[half].update(key for key, value in scores.items() if value)
        if args.errors and half == args.half and not scores[args.field]:
            args.errors -= 1
            gold = {key: row[key] for key in ("name", "quantity", "unit", "preparation", "comment") if row[key]}
            sys.stderr.write(f"{row['input']}\n   gold {gold}\n   read {read}\n")
    result = {
        half: {"lines": n[half]} | {key: round(count / n[half], 4) for key, count in sorted(c.items())}
        for half, c in right.items()
    }
    both = sum(right.values(), Counter[str]())
    result["all"] = {"lines": len(rows)} | {k: round(c / len(rows), 4) for k, c in sorted(both.items())}
    print(json.dumps({"lines_per_second": round(len(rows) / seconds), **result}, indent=1))


if __name__ == "__main__":
    main()
