"""Score tables of evaluation.json: each score with its interval and number of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from toque.evaluation.classification import class_rows
from toque.reports.page import Grid, written
from toque.reports.run_shares import mapping

_NONE: Final = "-"
_MAX_COLUMNS: Final = 6
"""Classes of a confusion table with columns. More classes have only rows."""


def score_grids(evaluation: Mapping[str, Any]) -> list[Grid]:
    """Make the tables of all texts, of memorisation and tasks, and of each slicing.

    The file may be untrusted.
    """
    intervals = mapping(evaluation.get("intervals"))
    n_texts = mapping(evaluation.get("applies_to"))

    rows = [
        (_title(f"held-out {name}"), _first(value), _NONE, _NONE)
        for name, value in mapping(evaluation.get("heldout")).items()
    ]
    rows += [
        (
            _title(n),
            _first(v),
            _interval(intervals.get(n)),
            written(n_texts.get(n, _NONE)),
        )
        for n, v in mapping(evaluation.get("generated")).items()
    ]

    step = evaluation.get("step")
    title = "Final evaluation"
    if step is not None:
        title += f", step {written(step)}"

    method = mapping(evaluation.get("method"))
    note = "; ".join(f"{name}: {value}" for name, value in method.items())

    tasks: dict[str, Mapping[str, Any]] = {
        name: scores
        for name, scores in mapping(evaluation.get("tasks")).items()
        if isinstance(scores, Mapping)
    }

    grids = [
        Grid(("measure", "value", "interval", "over"), rows, note, title),
        _memorisation(mapping(evaluation.get("memorisation"))),
        _tasks(tasks),
        *_confusions(tasks),
    ]

    for slicing, parts in mapping(evaluation.get("slices")).items():
        if isinstance(parts, Mapping) and parts:
            # A row per metric and a column per label. The intervals are only in the file.
            columns = {
                label: part
                for label, part in parts.items()
                if isinstance(part, Mapping)
            }
            cells = [
                (_title(name), *(_first(part.get(name)) for part in columns.values()))
                for name in dict.fromkeys(
                    name for part in columns.values() for name in part
                )
            ]
            grids.append(
                Grid(("measure", *columns), cells, title=f"By {_title(slicing)}")
            )

    failed = [
        (name, written(error))
        for name, error in mapping(evaluation.get("failed")).items()
    ]
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


def _memorisation(record: Mapping[str, Any]) -> Grid:
    sides = [mapping(record.get(side)) for side in ("texts", "references")]
    rows = [
        (title, *(_first(side.get(name)) for side in sides))
        for name, title in _RUNS.items()
        if any(name in side for side in sides)
    ]
    examples, n_read, shortest, long = (
        _first(record.get(name))
        for name in ("examples", "examples_read", "shortest_run", "long_run")
    )
    note = (
        "The longest run of tokens that a text shares word for word with a training example, "
        f"without tokens from its prompt. {n_read} of {examples} training examples were read, for "
        f"runs of {shortest} tokens or more. A long run has {long} tokens or more."
    )
    return Grid(
        ("shared with training", "written", "held out"), rows, note, "Memorisation"
    )


def _tasks(tasks: Mapping[str, Mapping[str, Any]]) -> Grid:
    names = ("examples", "loss", "accuracy", "majority", "macro_f1", "ece")
    heads = (
        "task",
        "examples",
        "loss",
        "accuracy",
        "most frequent class",
        "macro-F1",
        "ECE",
    )
    rows = [
        (_title(task), *(_first(scores.get(name)) for name in names))
        for task, scores in tasks.items()
    ]
    note = "The baseline is the accuracy of the most frequent class."
    return Grid(heads, rows, note, "Tasks")


class _Answers(msgspec.Struct):
    classes: list[str]
    confusion: list[list[int]]


def _confusions(tasks: Mapping[str, Mapping[str, Any]]) -> Iterator[Grid]:
    """Make a confusion table per class task, or a row per class if there are many classes."""
    for task, scores in tasks.items():
        try:
            answers = msgspec.convert(scores, _Answers)
        except msgspec.ValidationError:  # a task without classes, or an untrusted file
            continue
        names, confusion = answers.classes, answers.confusion
        if len(confusion) != len(names) or any(
            len(row) != len(names) for row in confusion
        ):
            continue
        heads: Sequence[str]
        rows: Sequence[Sequence[str]]
        if len(names) <= _MAX_COLUMNS:
            heads = ("true class", *(f"answered {name}" for name in names))
            rows = [
                (name, *map(written, row))
                for name, row in zip(names, confusion, strict=True)
            ]
        else:
            heads, rows = class_rows(names, confusion)
        yield Grid(heads, rows, title=f"Answers to {_title(task)}")


def _first(value: object) -> str:
    if isinstance(value, list):
        return written(value[0]) if value else _NONE
    return _NONE if value is None else written(value)


def _interval(value: object) -> str:
    if not isinstance(value, list) or len(value) != 2:
        return _NONE
    return f"{written(value[0])} to {written(value[1])}"


def _title(name: str) -> str:
    """Replace underscores by blanks, so that a narrow screen can break the name."""
    return name.replace("_", " ")
