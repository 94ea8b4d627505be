"""Packing: examples that share a row, chosen by their lengths.

Best fit decreasing: long examples first, each into the fullest row that still holds it; in one
dimension (decoder-only) or two (encoder and decoder side at once).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]
Rows = list[list[int]]  # positions in the array of lengths, for each row
_TINY: Final = 1e-9  # closer shares of a row are equal: far less than a token, more than rounding
_UNOPENED: Final = 1e3


@dataclass(frozen=True)
class RowShape:
    """Tokens a row can hold. `source` is 0 for a decoder-only model."""

    source: int
    target: int

    @property
    def tokens(self) -> int:
        """Computed tokens of one row, both sides."""
        return self.source + self.target


@dataclass(frozen=True)
class Placed:
    """Rows of examples: the k-th that window w placed is order[w, k]; it went to row row[w, k]."""

    order: NDArray[np.int64]  # [windows, examples] positions within the window
    row: NDArray[np.int64]  # [windows, examples] rows, numbered from 0 in every window

    @property
    def n_rows(self) -> NDArray[np.int64]:
        """[windows] rows each window fills."""
        return np.asarray(self.row.max(axis=1, initial=-1) + 1)

    def by_row(
        self, order: NDArray[np.int64] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Examples by row, as placed [windows, examples]; and counts [windows, rows], 0 for no row.

        `order` [windows, rows] is the wanted order of the rows; None for ascending.
        """
        n_windows, width = len(self.row), int(self.n_rows.max(initial=0))
        row = self.row
        if order is not None:
            place = np.empty_like(order)
            np.put_along_axis(place, order, np.arange(width)[None], axis=1)
            row = np.take_along_axis(place, row, axis=1)
        # Small numbers are sorted by radix: ten times faster.
        small = row.astype(np.int16) if width < 1 << 15 else row
        sort = np.argsort(small, axis=1, kind="stable")
        cells = row + np.arange(n_windows)[:, None] * width
        counts = np.bincount(cells.ravel(), minlength=n_windows * width)
        return np.take_along_axis(self.order, sort, axis=1), counts.reshape(n_windows, width)


def pack(source: Lengths, target: Lengths, shape: RowShape) -> Rows:
    """Rows of whole examples, none longer than a row; every example is in exactly one row.

    >>> pack(np.zeros(3, np.int64), np.array([3, 5, 2]), RowShape(0, 5))
    [[1], [0, 2]]
    """
    items, counts = pack_windows(source[None], target[None], shape).by_row()
    following = iter(items[0].tolist())
    return [list(islice(following, n)) for n in counts[0].tolist()]


def pack_windows(source: Lengths, target: Lengths, shape: RowShape) -> Placed:
    """Pack each of several windows as `pack` does one; the lengths are [windows, examples]."""
    if shape.source:
        return _best_fit_pairs(source / shape.source, target / shape.target)
    order = np.argsort(-target, axis=1, kind="stable")
    lengths = np.take_along_axis(target, order, axis=1).tolist()
    rows = [_best_fit(window, shape.target) for window in lengths]
    return Placed(order, np.array(rows, np.int64).reshape(order.shape))


def _best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """The row of each of these descending lengths."""
    placed: list[int] = []
    n_rows = 0
    # Rows by the room they have left.
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set when some row has room r: the smallest room >= n is one shift away
    for length in lengths:
        candidates = rooms >> length
        if candidates:
            room = length + (candidates & -candidates).bit_length() - 1
            row = open_rows[room].pop()
            if not open_rows[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, n_rows
            n_rows += 1
        placed.append(row)
        left = room - length
        open_rows[left].append(row)
        rooms |= 1 << left
    return placed


def _best_fit_pairs(s: NDArray[np.float64], t: NDArray[np.float64]) -> Placed:
    """Best fit in two dimensions, of lengths [windows, examples] as shares of a row's sides.

    A numpy call costs as much as a thousand numbers in it, and a window of a batch has some thirty
    rows: so all windows place their k-th example at once.
    """
    # Examples that are large on either side leave the fewest choices, so they go first.
    order = np.lexsort((-(s + t), -np.maximum(s, t)))
    sides = np.stack([np.take_along_axis(side, order, axis=1).T for side in (s, t)], axis=1)
    n_windows, n_examples = s.shape
    rows = np.empty((n_examples, n_windows), np.int64)
    open_rows = _OpenRows(n_windows)
    for k in range(n_examples):
        open_rows.place(sides[k], out=rows[k])
    return Placed(order, np.ascontiguousarray(rows.T))


class _OpenRows:
    """The room left in the rows of several windows, as shares of a row's two sides."""

    def __init__(self, n_windows: int) -> None:
        self._room = np.empty((2, n_windows, 0))
        self._widen()

    def place(self, example: NDArray[np.float64], *, out: NDArray[np.int64]) -> None:
        """Place one example [2, windows] in each window; `out` takes the rows they go to."""
        if self._sure == 0:
            self._widen()
        self._sure -= 1
        np.subtract(self._room, example[:, :, None], out=self._left)
        (left_s, left_t), (lopsided, too_full) = self._left, self._scratch
        np.minimum(left_s, left_t, out=too_full)
        # The tightest fit: least room left on both sides together, and not lopsided.
        np.subtract(left_s, left_t, out=lopsided)
        np.abs(lopsided, out=lopsided)
        lopsided *= 0.5
        left_s += left_t
        left_s += lopsided
        # Beyond all bounds, up or down. An assignment under a mask costs ten times as much.
        too_full += _TINY
        too_full *= -1e300
        np.maximum(left_s, too_full, out=left_s)
        left_s.argmin(axis=1, out=out)
        place = self._firsts + out
        room = self._all_room.take(place)
        np.minimum(room, 1.0, out=room)
        room -= example
        self._all_room[place] = room

    def _widen(self) -> None:
        # A row not yet opened looks far too large, so it is taken when no other will do; of
        # several the first.
        _, n_windows, before = self._room.shape
        n_rows = int((self._room < _UNOPENED).sum(axis=2).max(initial=0))
        width = n_rows + n_rows // 8 + 8
        room = np.full((2, n_windows, width), _UNOPENED)
        room[:, :, :before] = self._room
        self._room, self._all_room = room, room.reshape(-1)
        self._left, self._scratch = np.empty_like(room), np.empty_like(room)
        self._firsts = (np.arange(2 * n_windows) * width).reshape(2, n_windows)
        self._sure = width - n_rows  # examples there is a row for: each opens at most one


def useful_share(source: Lengths, target: Lengths, shape: RowShape) -> float:
    """Share of computed tokens that are not padding when these examples are packed."""
    useful = int(target.sum()) + (int(source.sum()) if shape.source else 0)
    n_rows = int(pack_windows(source[None], target[None], shape).n_rows[0])
    return useful / (n_rows * shape.tokens)


def choose_shape(
    source: Lengths, target: Lengths, *, encoder: bool, at_most: float = np.inf
) -> RowShape:
    """The row shape that computes least for these examples.

    A candidate's cost is its computed tokens per useful one, times 1 + length / 8192 for attention
    over a row (a guess: at width 512 its two matrix products cost as much as the projections near
    4,096 positions, and masks are half empty). The longest example is among the lengths; a row may
    hold `at_most` tokens, as far as that one allows.
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
    allowed = [shape for shape in ordered if shape.tokens <= at_most]
    if allowed or not encoder:

        def cost(shape: RowShape) -> float:
            length = max(shape.source, shape.target)
            return (1 + length / 8192) / useful_share(source, target, shape)

        return min(allowed or ordered[:1], key=cost)
    # Short targets and one long one: the ratio asks for more source than an update holds.
    rest = (at_most - longest_t) // 16 * 16
    return RowShape(max(longest_s, int(rest)), longest_t)


def _round_up(n: int, multiple: int = 16) -> int:
    return max(multiple, -(-n // multiple) * multiple)
