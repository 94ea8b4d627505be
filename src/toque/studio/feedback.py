"""Comparisons of two models by a person, stored as preference pairs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from toque.evaluation.bootstrap import wilson_interval
from toque.serving.request_errors import RequestError
from toque.sources.preference_pairs import compare_answers
from toque.storage.json_files import append_json_lines

FILE: Final = "feedback.jsonl"
"""Pairs in the form that `objective: {kind: dpo}` reads."""
BOTH_BAD: Final = "feedback-both-bad.jsonl"
"""Texts of comparisons without a better one. They are not pairs."""

_Text = Annotated[str, Field(max_length=50_000)]
_Name = Annotated[str, Field(min_length=1, max_length=300)]


class _Side(BaseModel):
    """Text of one model."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    model: _Name
    text: _Text


class Comparison(BaseModel):
    """Choice of a person between two texts for the same prompt."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: Annotated[_Text, Field(min_length=1)]
    left: _Side
    right: _Side
    choice: Literal["left", "right", "both_bad"]


def add_comparison(folder: Path, comparison: Comparison) -> None:
    """Append a comparison to its file.

    Raises:
        RequestError: The texts are equal or blank, or the file cannot be written.
    """
    sides = (comparison.left, comparison.right)
    reason = compare_answers(sides[0].text, sides[1].text)
    if reason or not all(side.text.strip() for side in sides):
        reason = reason or "a text is blank"
        raise RequestError(
            422,
            f"This comparison cannot become a preference pair: {reason}. Write two other texts.",
        )
    file = FILE
    if comparison.choice == "both_bad":
        file = BOTH_BAD
        row: dict[str, Any] = {
            "prompt": comparison.prompt,
            "texts": [side.text for side in sides],
            "models": [side.model for side in sides],
        }
    else:
        chosen, rejected = sides if comparison.choice == "left" else sides[::-1]
        row = {
            "prompt": comparison.prompt,
            "chosen": chosen.text,
            "rejected": rejected.text,
            "chosen_model": chosen.model,
            "rejected_model": rejected.model,
        }
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")
    error = append_json_lines(folder / file, [line])
    if error is not None:
        raise RequestError(
            507, f"{file} cannot be written: {error.strerror}."
        ) from error


def count_wins(folder: Path) -> list[dict[str, Any]]:
    """Count the wins of each pair of models, with the interval of the first model's share.

    The interval is Wilson's (1927), at 95 %, over the comparisons with a better text.
    """
    wins: defaultdict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in _rows_in(folder / FILE):
        winner, loser = str(row.get("chosen_model")), str(row.get("rejected_model"))
        pair = (min(winner, loser), max(winner, loser))
        wins[pair][pair.index(winner)] += 1
    for row in _rows_in(folder / BOTH_BAD):
        names = row.get("models")
        if isinstance(names, list) and len(names) == 2:
            first_name, second_name = sorted(map(str, names))
            wins[first_name, second_name][2] += 1
    counts = []
    for models, (first, second, both_bad) in sorted(wins.items()):
        n = first + second
        interval = wilson_interval(first / n, n) if n else None
        counts.append(
            {
                "models": models,
                "wins": [first, second],
                "both_bad": both_bad,
                "interval": interval,
            }
        )
    return counts


def _rows_in(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a file. Damaged lines are left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row
