"""Which examples share a row. Only lengths are looked at.

Best fit decreasing: long examples first, each into the fullest row that still holds it. For one
dimension (decoder-only) and for two (encoder and decoder side at once).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Rows = list[list[int]]
"""For each row, positions into the lengths that were given."""


@dataclass(frozen=True)
class RowShape:
    """Tokens a row can hold. `source` is 0 for a decoder-only model."""

    source: int
    target: int

    @property
    def tokens(self) -> int:
        """Computed tokens of one row, both sides."""
        return self.source + self.target


def pack(source: Lengths, target: Lengths, shape: RowShape) -> Rows:
    """Rows of whole examples; every example is in exactly one row.

    Args:
        source: encoder lengths (ignored when `shape.source` is 0).
        target: decoder lengths, of the same size.
        shape: what a row can hold; no example may be longer.

    >>> pack(np.zeros(3, np.int64), np.array([3, 5, 2]), RowShape(0, 5))
    [[1], [0, 2]]
    """
    if shape.source == 0:
        return _best_fit(target, shape.target)
    return _best_fit_pairs(source, target, shape)


def _best_fit(lengths: Lengths, capacity: int) -> Rows:
    rows: Rows = []
    open_rows: list[list[int]] = [
        [] for _ in range(capacity + 1)
    ]  # rows by the room they have left
    rooms = 0  # bit r is set when some row has room r: the smallest room >= n is one shift away
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        candidates = rooms >> length
        if candidates:
            room = length + (candidates & -candidates).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        left = room - length
        open_rows[left].append(row)
        rooms |= 1 << left
    return rows


def _best_fit_pairs(source: Lengths, target: Lengths, shape: RowShape) -> Rows:
    s = source / shape.source
    t = target / shape.target
    rows: Rows = []
    room_s, room_t = np.empty(len(s)), np.empty(len(s))
    first = 0  # rows before it are full: they cannot take even the smallest example
    smallest_s, smallest_t = (s.min(), t.min()) if len(s) else (0.0, 0.0)
    # Examples that are large on either side leave the fewest choices, so they go first.
    for item in np.lexsort((-(s + t), -np.maximum(s, t))).tolist():
        n = len(rows)
        left_s, left_t = room_s[first:n] - s[item], room_t[first:n] - t[item]
        # The tightest fit: least room left on both sides together, and not lopsided.
        waste = left_s + left_t + 0.5 * np.abs(left_s - left_t)
        waste[(left_s < -1e-9) | (left_t < -1e-9)] = np.inf
        best = int(waste.argmin()) if n > first else -1
        if best < 0 or waste[best] == np.inf:
            rows.append([item])
            room_s[n], room_t[n] = 1.0 - s[item], 1.0 - t[item]
            continue
        row = first + best
        rows[row].append(item)
        room_s[row] -= s[item]
        room_t[row] -= t[item]
        while first < len(rows) and (
            room_s[first] < smallest_s - 1e-9 or room_t[first] < smallest_t - 1e-9
        ):
            first += 1
    return rows


def useful_share(source: Lengths, target: Lengths, shape: RowShape) -> float:
    """Share of computed tokens that are not padding when these examples are packed."""
    useful = int(target.sum()) + (int(source.sum()) if shape.source else 0)
    return useful / (len(pack(source, target, shape)) * shape.tokens)


def choose_shape(
    source: Lengths, target: Lengths, *, encoder: bool, at_most: float = np.inf
) -> RowShape:
    """The row that computes least for these examples.

    Padding falls with longer rows and attention's cost rises with them. A candidate's cost is its
    computed tokens per useful one, times 1 + length / 8192 for the attention over a row (a guess:
    at width 512 the two matrix products of attention cost as much as the projections near 4,096
    positions, and masks are half empty).

    Args:
        source: encoder lengths of a sample of examples, among them the longest.
        target: decoder lengths of the same examples.
        encoder: whether the model has an encoder side.
        at_most: tokens a row may hold, as far as the longest example allows.
    """
    longest_s = _round_up(int(source.max(initial=1)))
    longest_t = _round_up(int(target.max(initial=1)))
    if not encoder:
        shapes = {RowShape(0, n) for n in (longest_t, 256, 512, 1024, 2048) if n >= longest_t}
    else:
        ratio = max(1.0, float(source.sum())) / max(1.0, float(target.sum()))
        shapes = {
            RowShape(max(longest_s, _round_up(int(n * ratio * slack))), n)
            for n in (longest_t, 256, 384, 512, 640, 768, 1024)
            if n >= longest_t
            for slack in (0.95, 1.0, 1.06)
        }
    ordered = sorted(shapes, key=lambda shape: (shape.tokens, shape.source))
    allowed = [shape for shape in ordered if shape.tokens <= at_most] or ordered[:1]
    return min(allowed, key=lambda shape: _cost(source, target, shape))


def _cost(source: Lengths, target: Lengths, shape: RowShape) -> float:
    return (1 + max(shape.source, shape.target) / 8192) / useful_share(source, target, shape)


def _round_up(n: int, multiple: int = 16) -> int:
    return max(multiple, -(-n // multiple) * multiple)
