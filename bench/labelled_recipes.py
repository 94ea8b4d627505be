"""Recipe files with labels of their own, read alike and scored in two halves.

Halves are made by a hash of the title: "development" was looked at while our rules were written,
"held_out" was not.
"""

from __future__ import annotations

import ast
import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import peers
import xxhash
from harness import Result, Skipped

Labels = Iterable[tuple[str, Any]]
"""Name of a rule, and its pair: the file's label and ours."""


def half_of(text: str) -> str:
    """The half a text belongs to."""
    return "held_out" if xxhash.xxh3_64_intdigest(text.encode()) % 2 else "development"


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Records of JSON lines (.gz too), or of Food.com's `RAW_recipes.csv` under the same names."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                lists = {key: ast.literal_eval(row[key]) for key in ("ingredients", "tags")}
                steps, daily = (ast.literal_eval(row[key]) for key in ("steps", "nutrition"))
                yield {"title": row["name"], "directions": steps, "minutes": int(row["minutes"]),
                       "daily_values": daily, **lists}  # fmt: skip
        return
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from map(json.loads, file)


def scored(
    files: Sequence[Path],
    names: Sequence[str],
    labels: Callable[[dict[str, Any]], Labels],
    summary: Callable[[Counter[Any]], dict[str, Any]],
) -> Result:
    """Scores of every file by half and rule.

    Args:
        files: What is scored; when empty, `names` of the shared recipes.
        names: File names.
        labels: The pairs of a record, none when it has no label.
        summary: Scores of counted pairs.
    """
    found: dict[str, Any] = {}
    for path in files or [peers.SHARED / "data" / "recipes" / name for name in names]:
        if not path.exists():
            found[path.name] = {"skipped": "not there: name a file, or set TOQUE_SHARED"}
            continue
        counts: dict[str, Counter[Any]] = {}
        for record in records(path):
            for rule, pair in labels(record):
                counts.setdefault(f"{half_of(record['title'])}{rule}", Counter())[pair] += 1
        found[path.name] = {key: summary(pairs) for key, pairs in sorted(counts.items())}
    if all("skipped" in scores for scores in found.values()):
        raise Skipped(f"none of {', '.join(found)} is there: name a file, or set TOQUE_SHARED")
    return Result(ours=found)
