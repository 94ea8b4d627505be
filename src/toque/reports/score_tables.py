"""Score tables of evaluation.json: each score with its interval and the texts behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from toque.evaluation.classification import class_rows
from toque.reports.page import Grid, written
from toque.reports.run_shares import mapping

_NONE: Final = "-"
_MOST_COLUMNS: Final = 6  # classes of a confusion table with columns; more have rows alone


def score_grids(evaluation: Mapping[str, Any]) -> list[Grid]:
    """A table for all texts, then one for each way they are divided; of any evaluation.json."""
    held_out, intervals, over, written_texts, method = (
        mapping(evaluation.get(name))
        for name in ("heldout", "intervals", "applies_to", "generated", "method")
    )
    rows = [(_named(f"held-out {n}"), _first(v), _NONE, _NONE) for n, v in held_out.items()]
    rows += [
        (_named(n), _first(v), _interval(intervals.get(n)), written(over.get(n, _NONE)))
        for n, v in written_texts.items()
    ]
    step = evaluation.get("step")
    title = "Final evaluation" + ("" if step is None else f", step {written(step)}")
    note = "; ".join(f"{name}: {value}" for name, value in method.items())
    tasks: dict[str, Mapping[str, Any]] = {
        name: own
        for name, own in mapping(evaluation.get("tasks")).items()
        if isinstance(own, Mapping)
    }
    grids = [
        Grid(("measure", "value", "interval", "over"), rows, note, title),
        _memorisation(mapping(evaluation.get("memorisation"))),
        _tasks(tasks),
        *_confusions(tasks),
    ]
    for slicing, parts in mapping(evaluation.get("slices")).items():
        if isinstance(parts, Mapping) and parts:
            # One row a metric, one column a part; its interval is in the file.
            scores = {label: found for label, found in parts.items() if isinstance(found, Mapping)}
            cells = [
                (_named(name), *(_first(found.get(name)) for found in scores.values()))
                for name in dict.fromkeys(name for found in scores.values() for name in found)
            ]
            grids.append(Grid(("measure", *scores), cells, title=f"By {_named(slicing)}"))
    failed = [(name, written(why)) for name, why in mapping(evaluation.get("failed")).items()]
    grids.append(Grid(("metric", "why"), failed, title="Metrics that failed"))
    return [grid for grid in grids if grid.rows]


_RUNS: Final = {
    "n": "texts",
    "median": "median run, tokens",
    "p95": "95th percentile, tokens",
    "largest": "longest, tokens",
    "example": "longest: row of the store",
    "largest_share": "largest share of a text",
    "long_share": "share of texts with a long run",
}


def _memorisation(found: Mapping[str, Any]) -> Grid:
    sides = [mapping(found.get(side)) for side in ("texts", "references")]
    rows = [
        (words, *(_first(side.get(name)) for side in sides))
        for name, words in _RUNS.items()
        if any(name in side for side in sides)
    ]
    examples, read, shortest, long = (
        _first(found.get(name))
        for name in ("examples", "examples_read", "shortest_run", "long_run")
    )
    note = (
        "The longest run of tokens that a text shares word for word with a training example, apart "
        f"from what its prompt says, too. {read} of {examples} training examples were read, for "
        f"runs of {shortest} tokens or more; a long run has {long} or more."
    )
    return Grid(("shared with training", "written", "held out"), rows, note, "Memorisation")


def _tasks(tasks: Mapping[str, Mapping[str, Any]]) -> Grid:
    names = ("examples", "loss", "accuracy", "majority", "macro_f1", "ece")
    heads = ("task", "examples", "loss", "accuracy", "most frequent class", "macro-F1", "ECE")
    rows = [(_named(task), *(_first(own.get(n)) for n in names)) for task, own in tasks.items()]
    note = "The accuracy of always answering the most frequent class stands beside the model's."
    return Grid(heads, rows, note, "Tasks")


class _Answers(msgspec.Struct):
    classes: list[str]
    confusion: list[list[int]]


def _confusions(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[Grid]:
    """Answers of each class task: a table that fits, or a row a class."""
    for task, own in tasks.items():
        try:
            found = msgspec.convert(own, _Answers)
        except msgspec.ValidationError:  # a task without classes, or a stranger's file
            continue
        names, confusion = found.classes, found.confusion
        if len(confusion) != len(names) or any(len(row) != len(names) for row in confusion):
            continue
        heads: Sequence[str]
        rows: Sequence[Sequence[str]]
        if len(names) <= _MOST_COLUMNS:
            heads = ("true class", *(f"answered {name}" for name in names))
            rows = [(name, *map(written, row)) for name, row in zip(names, confusion, strict=True)]
        else:
            heads, rows = class_rows(names, confusion)
        yield Grid(heads, rows, title=f"Answers to {_named(task)}")


def _first(value: object) -> str:
    if isinstance(value, list):
        return written(value[0]) if value else _NONE
    return _NONE if value is None else written(value)


def _interval(value: object) -> str:
    if not isinstance(value, list) or len(value) != 2:
        return _NONE
    return f"{written(value[0])} to {written(value[1])}"


def _named(name: str) -> str:
    """Name with blanks, at which a narrow screen can break it."""
    return name.replace("_", " ")
