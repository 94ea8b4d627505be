"""Ingredient-line parser against hand-labelled lines, ingredient-parser-nlp beside it.

    python bench/quality/ingredient_lines.py ingredient_lines_labelled.csv [--errors name]

The file has columns input, name, quantity, unit, size, preparation, comment, purpose, source;
quantities and units are lists in the line's order ("250 9", "ml fl oz"), fractions are coded
"1#1$2". A line counts as right only when every quantity (unit) it holds is found and no other is.
Names are compared in lower case without marks, words in the singular. The halves are made by a
hash of the line: "development" was looked at while the parser was written, "held_out" was not.
`lines_per_second` is of one process, without a cache, in processor time, the best of five passes
(theirs: one). Theirs reads its result into the same fields and is scored by the same rules; sizes
("large") are left out of both sides' units. The file's sources (bbc, cookstr, ...) are names
that its own training data has too, so it may have seen these very lines; that was not checked.

ingredient-parser-nlp needs an NLTK tagger (averaged_perceptron_tagger_eng) that it downloads when
it is first imported. Without that (offline) `theirs` says why it is absent. Fetch it once by
`python -m nltk.downloader averaged_perceptron_tagger_eng`, or let NLTK_DATA name its folder.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
from labelled_recipes import half_of

from toque.cooking.ingredients.amounts import Amount, IngredientLine
from toque.cooking.ingredients.names import stem
from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.tokens import number
from toque.cooking.ingredients.vocabulary import SIZES, SPELLINGS

TAGGER = "taggers/averaged_perceptron_tagger_eng"
_MARKS = re.compile(r"[^\w\s'-]")
_FLUID = re.compile(r"\b(?:fl|fluid) ?(oz|ounces?)\b", re.IGNORECASE)


def gold_quantities(text: str) -> Counter[tuple[float, float]]:
    """The quantities of a gold field: "6 84", "#1$2-1", "One 28", "2x 400 14"."""
    found: Counter[tuple[float, float]] = Counter()
    for word in text.lower().split():
        if word in WORDS:
            found[(WORDS[word], WORDS[word])] += 1
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
    names = (w.rstrip(".") for w in words if w.lower() not in SIZES)
    units = ((SPELLINGS.get(name) or SPELLINGS.get(name.lower()), name) for name in names)
    return Counter(unit.name if unit else name.lower() for unit, name in units)


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


def timed(
    parse: Callable[[str], IngredientLine], lines: list[str], *, passes: int
) -> tuple[list[IngredientLine], float]:
    """The lines read, and the processor seconds of the best pass."""
    runs = [harness.timed(lambda: [parse(line) for line in lines]) for _ in range(passes)]
    return runs[0].value, min(run.processor for run in runs)


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


def peer() -> Callable[[str], IngredientLine]:
    """ingredient-parser-nlp, its result in our fields.

    Raises:
        Skipped: it, or the tagger it needs, is not installed.
    """
    try:
        import nltk

        nltk.data.find(TAGGER)  # before the import below would try to download it
        from ingredient_parser import parse_ingredient
    except ImportError as missing:
        raise harness.Skipped(f"{missing}: pip install ingredient-parser-nlp") from missing
    except LookupError as missing:
        raise harness.Skipped(f"NLTK's {TAGGER} is not installed (docstring)") from missing

    def parse(line: str) -> IngredientLine:
        read = parse_ingredient(line, string_units=True, separate_names=False)
        # A composite amount ("1 lb 2 oz") holds several.
        parts = [part for a in read.amount for part in getattr(a, "amounts", [a])]
        amounts = tuple(Amount(_range(part), _unit(str(part.unit))) for part in parts)
        name = " ".join(text.text for text in read.name)
        texts = (
            getattr(text, "text", "") for text in (read.preparation, read.comment, read.purpose)
        )
        first = amounts[0] if amounts else Amount(None, None)
        return IngredientLine(first.quantity, first.unit, "", name, *texts, False, amounts)

    return parse


def _range(amount: Any) -> tuple[float, float] | None:
    try:
        return float(amount.quantity), float(amount.quantity_max)
    except ValueError:  # it found none, or kept a text that is no number
        return None if not amount.quantity else (-1.0, -1.0)


def _unit(text: str) -> str | None:
    """Under the same name as the labels' units; None when there is none."""
    return next(iter(gold_units(text)), None)


def measure(a: argparse.Namespace) -> harness.Result:
    """Score a file with both parsers."""
    path = a.file or peers.shared("data/recipes/ingredient_lines_labelled.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [row["input"] for row in rows]
    reads, seconds = timed(parse_line.__wrapped__, lines, passes=5)
    if a.errors:
        print_errors(rows, reads, a.errors)
    result = harness.Result(ours=_figures(rows, reads, seconds))
    try:
        their_reads, their_seconds = timed(peer(), lines, passes=1)
        result.theirs = _figures(rows, their_reads, their_seconds)
    except harness.Skipped as reason:
        result.theirs = {"skipped": str(reason)}
    return result


def _figures(
    rows: list[dict[str, str]], reads: list[IngredientLine], seconds: float
) -> dict[str, Any]:
    return {"lines_per_second": round(len(rows) / seconds), **scores(rows, reads)}


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("file", type=Path, nargs="?")
    p.add_argument("--errors", metavar="FIELD", help="print the lines that are wrong in it")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
