"""Score tables of evaluation.json: each score with its interval and number of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from toque.evaluation.classification import class_rows
from toque.reports.page import Grid, format_value
from toque.reports.run_shares import dict_or_empty

Record = Mapping[str, Any]
_NONE: Final = "-"
_MAX_COLUMNS: Final = 6
"""Maximum number of classes in a confusion matrix. With more, a class has a row but no column.
"""


def make_score_grids(evaluation: Record) -> list[Grid]:
    """Build the tables for all texts, memorisation, tasks, and for each slicing.

    The file may be untrusted.
    """
    tasks: dict[str, Record] = {
        name: scores
        for name, scores in dict_or_empty(evaluation.get("tasks")).items()
        if isinstance(scores, Mapping)
    }
    failed = [
        (name, format_value(error))
        for name, error in dict_or_empty(evaluation.get("failed")).items()
    ]
    grids = [
        _make_main_grid(evaluation),
        _make_memorisation_grid(dict_or_empty(evaluation.get("memorisation"))),
        _make_task_grid(tasks),
        *_make_confusion_grids(tasks),
        *_make_slice_grids(dict_or_empty(evaluation.get("slices"))),
        Grid(("metric", "why"), failed, title="Metrics that failed"),
    ]
    return [grid for grid in grids if grid.rows]


def _make_main_grid(evaluation: Record) -> Grid:
    """Make the table of all scores, with their intervals and numbers of texts."""
    intervals = dict_or_empty(evaluation.get("intervals"))
    n_texts = dict_or_empty(evaluation.get("applies_to"))
    rows = [
        (_title(f"held-out {name}"), _format_first(value), _NONE, _NONE)
        for name, value in dict_or_empty(evaluation.get("heldout")).items()
    ]
    for name, value in dict_or_empty(evaluation.get("generated")).items():
        interval = _format_interval(intervals.get(name))
        count = format_value(n_texts.get(name, _NONE))
        rows.append((_title(name), _format_first(value), interval, count))

    title = "Final evaluation"
    step = evaluation.get("step")
    if step is not None:
        title += f", step {format_value(step)}"
    method = dict_or_empty(evaluation.get("method"))
    note = "; ".join(f"{name}: {value}" for name, value in method.items())
    return Grid(("measure", "value", "interval", "over"), rows, note, title)


def make_source_grids(evaluation: Record) -> list[Grid]:
    """Build the table of the held-out loss per source, or nothing for a single source.

    The file may be untrusted.
    """
    sources = dict_or_empty(evaluation.get("sources"))
    names = ("examples", "before", "after", "change")
    rows = [
        (source, *(_format_first(dict_or_empty(losses).get(name)) for name in names))
        for source, losses in sources.items()
    ]
    note = (
        "Held-out loss in nats per token, before the first update and at the end. A positive "
        "change means that the model forgot."
    )
    grid = Grid(("source", *names), rows, note, "What it forgot")
    return [grid] if rows else []


def _make_slice_grids(slicings: Record) -> Iterator[Grid]:
    """Make one table per slicing, with a row per metric and a column per label.

    The intervals appear only in the file.
    """
    for slicing, parts in slicings.items():
        if not isinstance(parts, Mapping):
            continue
        columns = {
            label: part for label, part in parts.items() if isinstance(part, Mapping)
        }
        names = dict.fromkeys(name for part in columns.values() for name in part)
        rows = []
        for name in names:
            values = [part.get(name) for part in columns.values()]
            rows.append((_title(name), *map(_format_first, values)))
        yield Grid(("measure", *columns), rows, title=f"By {_title(slicing)}")


_SHARED_RUNS: Final = {
    "n": "texts",
    "median": "median run, tokens",
    "p95": "95th percentile, tokens",
    "largest": "longest, tokens",
    "example": "longest: row of the store",
    "largest_share": "largest share of a text",
    "long_share": "share of texts with a long run",
}
"""Titles of the memorisation statistics. A run is a sequence of consecutive tokens."""


def _make_memorisation_grid(record: Record) -> Grid:
    """Make the table of the runs of tokens that texts share with the training examples."""
    sides = [dict_or_empty(record.get(side)) for side in ("texts", "references")]
    rows = [
        (title, *(_format_first(side.get(name)) for side in sides))
        for name, title in _SHARED_RUNS.items()
        if any(name in side for side in sides)
    ]
    n_total = _format_first(record.get("examples"))
    n_read = _format_first(record.get("examples_read"))
    shortest = _format_first(record.get("shortest_run"))
    long = _format_first(record.get("long_run"))
    note = (
        "The longest span of tokens that a text shares word for word with a training example, "
        f"without tokens from its prompt. {n_read} of {n_total} training examples were read, for "
        f"runs of {shortest} tokens or more. A long run has {long} tokens or more."
    )
    heads = ("shared with training", "generated", "held out")
    return Grid(heads, rows, note, "Memorisation")


def _make_task_grid(tasks: Mapping[str, Record]) -> Grid:
    heads_by_name = {
        "examples": "examples",
        "loss": "loss",
        "accuracy": "accuracy",
        "majority": "most frequent class",
        "macro_f1": "macro-F1",
        "ece": "ECE",
    }
    rows = [
        (_title(task), *(_format_first(scores.get(name)) for name in heads_by_name))
        for task, scores in tasks.items()
    ]
    note = "Most frequent class: the accuracy of always answering this class, as a baseline."
    return Grid(("task", *heads_by_name.values()), rows, note, "Tasks")


class _Answers(msgspec.Struct):
    classes: list[str]
    confusion: list[list[int]]


def _make_confusion_grids(tasks: Mapping[str, Record]) -> Iterator[Grid]:
    """Make a confusion matrix per class task, or a row per class if there are many classes."""
    for task, scores in tasks.items():
        try:
            answers = msgspec.convert(scores, _Answers)
        except msgspec.ValidationError:
            continue  # a task without classes, or an untrusted file
        classes, confusion = answers.classes, answers.confusion
        n = len(classes)
        is_square = len(confusion) == n and all(len(row) == n for row in confusion)
        if not is_square:
            continue  # an untrusted file

        heads: Sequence[str]
        rows: Sequence[Sequence[str]]
        if n <= _MAX_COLUMNS:
            heads = ("true class", *(f"answered {name}" for name in classes))
            rows = [
                (name, *map(format_value, row))
                for name, row in zip(classes, confusion, strict=True)
            ]
        else:
            heads, rows = class_rows(classes, confusion)
        yield Grid(heads, rows, title=f"Answers to {_title(task)}")


def _format_first(value: object) -> str:
    """Format a number, or the first of a list of numbers."""
    if isinstance(value, list):
        return format_value(value[0]) if value else _NONE
    return _NONE if value is None else format_value(value)


def _format_interval(value: object) -> str:
    if not isinstance(value, list) or len(value) != 2:
        return _NONE
    return f"{format_value(value[0])} to {format_value(value[1])}"


def _title(name: str) -> str:
    """Replace underscores with spaces, so that a narrow screen can wrap the name."""
    return name.replace("_", " ")
