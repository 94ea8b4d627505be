"""Scores by text: what scores are made from, kept so that runs are compared text by text.

The file holds numbers and hashes, none of the texts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from toque.evaluation.bootstrap import Floats, PerText
from toque.evaluation.ngram_metrics import bleu_of, chrf_of
from toque.storage.json_files import decode_json

FILE: Final = "scores_by_text.json"
"""Name of the file in a run's folder, beside evaluation.json."""
_FORM: Final = 1
_DIGITS: Final = 6
_SCORES: Final[Mapping[str, Callable[[Floats], Floats]]] = {"bleu": bleu_of, "chrf": chrf_of}
"""Measures that are no ratio of two sums."""


def key_of_text(prompt: str, reference: str) -> str:
    """A short name of a prompt with its reference; the same in every run."""
    text = f"{prompt}\0{reference}".encode("utf-8", "replace")
    return hashlib.sha256(text).hexdigest()[:16]


@dataclass(frozen=True)
class TextTable:
    """Measures of some texts, a row a text."""

    keys: Sequence[str]
    measures: Mapping[str, PerText]

    def in_order(self, keys: Sequence[str]) -> TextTable:
        """The same for these of its texts, in this order."""
        at = {key: row for row, key in enumerate(self.keys)}
        rows = np.array([at[key] for key in keys], dtype=np.int64)
        return TextTable(keys, {name: m.at(rows) for name, m in self.measures.items()})

    def record(self) -> dict[str, Any]:
        """The table as JSON; null for a text to which a measure does not apply."""
        return {
            "keys": list(self.keys),
            "measures": {
                name: [
                    [round(value, _DIGITS) for value in row] if applies else None
                    for row, applies in zip(m.values.tolist(), m.applies.tolist(), strict=True)
                ]
                for name, m in self.measures.items()
            },
        }


def losses_table(
    keys: Sequence[str], nats: Floats, tokens: Floats, size: Floats, weight: Floats | float = 1.0
) -> TextTable:
    """Held-out loss of examples, and bits a byte where the bytes are known.

    Args:
        keys: of the examples.
        nats: of each, summed over its target.
        tokens: of its target.
        size: bytes of its target as text; 0 where the tokens are no whole text.
        weight: in the loss.
    """
    measures = {"loss": PerText.ratio(weight * nats, weight * tokens)}
    if len(keys) and size.all():
        measures["bits_per_byte"] = PerText.ratio(nats / math.log(2), size)
    return TextTable(keys, measures)


def to_json(*, examples: TextTable, texts: TextTable, step: int | None) -> str:
    """The content of `FILE`."""
    tables = {"examples": examples.record(), "texts": texts.record()}
    return json.dumps({"form": _FORM, "step": step, **tables})


class _Table(msgspec.Struct):
    keys: list[str]
    measures: dict[str, list[list[float] | None]]


class _File(msgspec.Struct):
    form: int
    examples: _Table
    texts: _Table
    step: int | None = None


@dataclass(frozen=True)
class ByText:
    """The content of a run's file."""

    examples: TextTable
    texts: TextTable
    step: int | None


def from_json(data: bytes) -> ByText:
    """The tables of a file, which may come from anyone.

    Raises:
        ValueError: it is damaged, or of another form.
    """
    found = decode_json(data, _File)
    if found.form != _FORM:
        raise ValueError(f"its form is {found.form}, and this version reads {_FORM}")
    return ByText(_table(found.examples), _table(found.texts), found.step)


def _table(found: _Table) -> TextTable:
    wrong = [name for name, rows in found.measures.items() if len(rows) != len(found.keys)]
    if wrong:
        raise ValueError(f"{wrong[0]} is not of {len(found.keys)} texts")
    return TextTable(found.keys, {n: _measure(n, rows) for n, rows in found.measures.items()})


def _measure(name: str, rows: Sequence[Sequence[float] | None]) -> PerText:
    width = next((len(row) for row in rows if row is not None), 2)
    filled = [[0.0] * width if row is None else row for row in rows]
    if any(len(row) != width for row in filled):
        raise ValueError(f"the rows of {name} are not of one length")
    values = np.array(filled, float).reshape(len(rows), width)
    if not np.isfinite(values).all():
        raise ValueError(f"{name} holds a number that is not finite")
    applies = np.array([row is not None for row in rows], dtype=bool)
    if name in _SCORES and width == {"bleu": 10, "chrf": 18}[name]:
        return PerText(values, _SCORES[name], applies)
    if width != 2:
        raise ValueError(f"{name} has {width} numbers a text")
    ratio = PerText.ratio(values[:, 0], values[:, 1])
    return PerText(ratio.values, ratio.score, ratio.applies & applies)
