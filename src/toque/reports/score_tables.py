"""Score tables of evaluation.json: each score with its interval and the texts behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from toque.evaluation.classification import class_rows
from toque.reports.page import Grid, written

_NONE: Final = "-"
_MOST_COLUMNS: Final = 6
"""Classes of a confusion table with a column for each; more have a row for each class."""


def score_grids(evaluation: Mapping[str, Any]) -> list[Grid]:
    """A table for all texts, then one for each way they are divided.

    Args:
        evaluation: values of evaluation.json, of any version; parts that are missing are left out.
    """
    grids: list[Grid] = []
    if rows := _held_out(evaluation) + _generated(evaluation):
        method = _mapping(evaluation, "method")
        note = "; ".join(f"{name}: {value}" for name, value in method.items())
        heads = ("measure", "value", "interval", "over")
        step = evaluation.get("step")
        title = "Final evaluation" + ("" if step is None else f", step {written(step)}")
        grids.append(Grid(heads, rows, note, title))
    if tasks := _tasks(evaluation):
        grids.append(tasks)
    grids += _confusions(evaluation)
    for slicing, parts in _mapping(evaluation, "slices").items():
        if isinstance(parts, Mapping) and parts:
            grids.append(_sliced(f"By {_named(slicing)}", parts))
    if failed := _mapping(evaluation, "failed"):
        rows = [(name, written(why)) for name, why in failed.items()]
        grids.append(Grid(("metric", "why"), rows, title="Metrics that failed"))
    return grids


def _held_out(evaluation: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = _mapping(evaluation, "heldout")
    return [(_named(f"held-out {n}"), written(v), _NONE, _NONE) for n, v in found.items()]


def _generated(evaluation: Mapping[str, Any]) -> list[tuple[str, ...]]:
    intervals = _mapping(evaluation, "intervals")
    over = _mapping(evaluation, "applies_to")
    return [
        (
            _named(name),
            written(value),
            _interval(intervals.get(name)),
            written(over.get(name, _NONE)),
        )
        for name, value in _mapping(evaluation, "generated").items()
    ]


def _tasks(evaluation: Mapping[str, Any]) -> Grid | None:
    """One row a task; accuracy and what goes with it where answers are classes."""
    names = ("examples", "loss", "accuracy", "majority", "macro_f1", "ece")
    heads = ("task", "examples", "loss", "accuracy", "most frequent class", "macro-F1", "ECE")
    found = {task: own for task, own in _mapping(evaluation, "tasks").items() if _is_mapping(own)}
    rows = [
        (_named(task), *(_NONE if n not in own else written(own[n]) for n in names))
        for task, own in found.items()
    ]
    note = "The accuracy of always answering the most frequent class stands beside the model's."
    return Grid(heads, rows, note, "Tasks") if rows else None


def _confusions(evaluation: Mapping[str, Any]) -> list[Grid]:
    """Answers of each class task: a table that fits, or a row a class."""
    grids = []
    for task, own in _mapping(evaluation, "tasks").items():
        if not _is_mapping(own) or not own.get("classes"):
            continue
        names, confusion = list(own["classes"]), own.get("confusion") or []
        heads: Sequence[str]
        if len(names) <= _MOST_COLUMNS:
            heads = ("true class", *(f"answered {name}" for name in names))
            rows = [(name, *map(written, row)) for name, row in zip(names, confusion, strict=False)]
        else:
            heads, rows = class_rows(names, confusion)
        grids.append(Grid(heads, rows, title=f"Answers to {_named(task)}"))
    return grids


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _sliced(title: str, parts: Mapping[str, Any]) -> Grid:
    """One row a metric, one column a part; its interval is in the file."""
    scores = {label: found for label, found in parts.items() if isinstance(found, Mapping)}
    names = list(dict.fromkeys(name for found in scores.values() for name in found))
    rows = [
        (_named(name), *(_first(found.get(name)) for found in scores.values())) for name in names
    ]
    return Grid(("measure", *scores), rows, title=title)


def _first(value: object) -> str:
    if isinstance(value, list):
        return written(value[0]) if value else _NONE
    return _NONE if value is None else written(value)


def _interval(value: object) -> str:
    if not isinstance(value, list) or len(value) != 2:
        return _NONE
    return f"{written(value[0])} to {written(value[1])}"


def _mapping(evaluation: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = evaluation.get(name)
    return found if isinstance(found, Mapping) else {}


def _named(name: str) -> str:
    """Name with blanks, at which a narrow screen can break it."""
    return name.replace("_", " ")
