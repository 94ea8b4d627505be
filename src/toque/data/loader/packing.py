"""Packing of examples into rows by their lengths.

The method is best fit decreasing: the longest example comes first, and each example goes into the
fullest row with enough space. A decoder's rows have one length, an encoder-decoder's rows have two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from toque.data.array_types import Floats, Ints

Lengths = Ints
Rows = list[list[int]]  # indices of the examples in each row
# Tolerance for fractions of a row: less than a token, more than rounding errors.
_TINY = 1e-9
_UNOPENED = 1e3
"""Free space of a row without examples, as fractions of a row. Any opened row fits better."""
_MULTIPLE = 16  # tokens; row lengths are multiples of it
_DECODER_LENGTHS = (256, 512, 1024, 2048)  # candidates of a decoder's row length
_TARGET_LENGTHS = (256, 384, 512, 640, 768, 1024)
"""Candidates for the target length of an encoder-decoder's rows."""
_RATIO_FACTORS = (0.95, 1.0, 1.06)
"""Factors on the mean ratio of source to target. The best packing may need a little more space on
either side."""
_ATTENTION_LENGTH = 8192  # row length at which attention costs as much as the rest


@dataclass(frozen=True)
class RowShape:
    """Length of a row on both sides, in tokens. `source` is 0 for a decoder-only model."""

    source: int
    target: int

    @property
    def tokens(self) -> int:
        """Number of computed tokens per row, on both sides together."""
        return self.source + self.target


@dataclass(frozen=True)
class Placement:
    """Row of each example in several windows, in the order of packing."""

    examples: NDArray[
        np.int64
    ]  # [windows, examples] index of each example in its window
    # [windows, examples] row of each example, numbered from 0 in every window.
    rows: Ints

    @property
    def n_rows(self) -> Ints:
        """Number of rows per window, [windows]."""
        return np.asarray(self.rows.max(axis=1, initial=-1) + 1)

    def sort_by_row(self, row_order: Ints | None = None) -> tuple[Ints, Ints]:
        """Sort the examples by row.

        Args:
            row_order: The rows of each window in the requested order, [windows, rows]. None means
                ascending order.

        Returns:
            Indices of the examples [windows, examples], and number of examples per row [windows,
            rows].
        """
        n_windows = len(self.rows)
        width = int(self.n_rows.max(initial=0))
        rank = self.rows
        if row_order is not None:
            rank_of_row = np.empty_like(row_order)
            np.put_along_axis(rank_of_row, row_order, np.arange(width)[None], axis=1)
            rank = np.take_along_axis(rank_of_row, self.rows, axis=1)

        # numpy sorts 16-bit integers by radix, which is ten times faster.
        sort_keys = rank.astype(np.int16) if width < 1 << 15 else rank
        by_rank = np.argsort(sort_keys, axis=1, kind="stable")
        examples = np.take_along_axis(self.examples, by_rank, axis=1)

        # Count the examples of all windows in one call, with distinct numbers for their rows.
        row_numbers = rank + np.arange(n_windows)[:, None] * width
        counts = np.bincount(row_numbers.ravel(), minlength=n_windows * width)
        return examples, counts.reshape(n_windows, width)


def pack(source: Lengths, target: Lengths, shape: RowShape) -> Rows:
    """Pack the examples of one window. Every example must fit into a row.

    >>> pack(np.zeros(3, np.int64), np.array([3, 5, 2]), RowShape(0, 5))
    [[1], [0, 2]]
    """
    examples, counts = pack_windows(source[None], target[None], shape).sort_by_row()
    examples_left = iter(examples[0].tolist())
    return [list(islice(examples_left, n)) for n in counts[0].tolist()]


def pack_windows(source: Lengths, target: Lengths, shape: RowShape) -> Placement:
    """Pack several windows. The lengths are [windows, examples]."""
    if shape.source:
        return _best_fit_pairs(source / shape.source, target / shape.target)
    order = np.argsort(-target, axis=1, kind="stable")
    lengths = np.take_along_axis(target, order, axis=1).tolist()
    rows = [_best_fit(window, shape.target) for window in lengths]
    return Placement(order, np.array(rows, np.int64).reshape(order.shape))


def _best_fit(lengths: Sequence[int], capacity: int) -> list[int]:
    """Find a row for each example. The lengths must be in descending order."""
    row_of: list[int] = []
    n_rows = 0
    rows_by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    spaces = 0  # bit n is set if a row has space for exactly n tokens
    for length in lengths:
        candidates = spaces >> length
        if candidates:
            # The lowest set bit is the tightest fit.
            space = length + (candidates & -candidates).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space = capacity
            row = n_rows
            n_rows += 1
        row_of.append(row)
        space -= length
        rows_by_space[space].append(row)
        spaces |= 1 << space
    return row_of


def _best_fit_pairs(source: Floats, target: Floats) -> Placement:
    """Find rows with a source and a target side.

    The lengths [windows, examples] are shares of the length of a side. All windows place their
    k-th example together, because a window has only about thirty rows, and the overhead of a numpy
    call equals the work on a thousand numbers.
    """
    # Examples that are long on either side fit into few rows, so they come first.
    order = np.lexsort((-(source + target), -np.maximum(source, target)))
    sides = [np.take_along_axis(side, order, axis=1).T for side in (source, target)]
    lengths = np.stack(sides, axis=1)
    n_windows, n_examples = source.shape
    rows = np.empty((n_examples, n_windows), np.int64)
    open_rows = _OpenRows(n_windows)
    for k in range(n_examples):
        open_rows.place(lengths[k], out=rows[k])
    return Placement(order, np.ascontiguousarray(rows.T))


class _OpenRows:
    """Free space in the rows of several windows, as shares of the row length of both sides."""

    def __init__(self, n_windows: int) -> None:
        self._space = np.empty((2, n_windows, 0))
        self._widen()

    def place(self, example: Floats, *, out: Ints) -> None:
        """Place one example per window, of lengths [2, windows], and write the rows to `out`."""
        if self._n_unopened == 0:
            self._widen()
        self._n_unopened -= 1

        # Find the tightest fit: the least space on both sides, with little difference between them.
        np.subtract(self._space, example[:, :, None], out=self._left)
        (left_s, left_t), (difference, overflow) = self._left, self._scratch
        np.minimum(left_s, left_t, out=overflow)
        np.subtract(left_s, left_t, out=difference)
        np.abs(difference, out=difference)
        difference *= 0.5
        cost = left_s  # computed in place, because a new array takes time
        cost += left_t
        cost += difference
        # A row without enough space gets a huge cost. A masked assignment takes ten times longer.
        overflow += _TINY
        overflow *= -1e300
        np.maximum(cost, overflow, out=cost)
        cost.argmin(axis=1, out=out)

        # An unopened row has the space of one row.
        index = self._row_offsets + out
        space = self._flat_space.take(index)
        np.minimum(space, 1.0, out=space)
        space -= example
        self._flat_space[index] = space

    def _widen(self) -> None:
        """Add unopened rows. They fit worse than any opened row, so only the first is chosen."""
        _, n_windows, old_width = self._space.shape
        n_opened = int((self._space < _UNOPENED).sum(axis=2).max(initial=0))
        width = n_opened + n_opened // 8 + 8
        space = np.full((2, n_windows, width), _UNOPENED)
        space[:, :, :old_width] = self._space
        self._space = space
        self._flat_space = space.reshape(-1)
        self._left = np.empty_like(space)
        self._scratch = np.empty_like(space)
        self._row_offsets = (np.arange(2 * n_windows) * width).reshape(2, n_windows)
        self._n_unopened = width - n_opened


def useful_share(source: Lengths, target: Lengths, shape: RowShape) -> float:
    """Compute the fraction of computed tokens that are not padding if these examples are packed."""
    useful = int(target.sum()) + (int(source.sum()) if shape.source else 0)
    n_rows = int(pack_windows(source[None], target[None], shape).n_rows[0])
    return useful / (n_rows * shape.tokens)


def choose_shape(
    source: Lengths, target: Lengths, *, encoder: bool, at_most: float = np.inf
) -> RowShape:
    """Choose the row shape with the lowest cost for these examples.

    The cost is computed tokens per useful token, times 1 + length / 8192 for attention. This is a
    rough estimate: at width 512, the two matmuls of attention cost as much as the projections near
    4,096 positions, and half of each mask is empty.

    Args:
        source: Source lengths, including the longest example.
        target: Target lengths, including the longest example.
        encoder: Whether the model has an encoder.
        at_most: Largest number of tokens per row, unless the longest example needs more.
    """
    longest_source = round_up(int(source.max(initial=1)))
    longest_target = round_up(int(target.max(initial=1)))
    if encoder:
        ratio = max(1.0, float(source.sum())) / max(1.0, float(target.sum()))
        shapes = _paired_shapes(longest_source, longest_target, ratio)
    else:
        lengths = (longest_target, *_DECODER_LENGTHS)
        shapes = {RowShape(0, n) for n in lengths if n >= longest_target}
    ordered = sorted(shapes, key=lambda shape: (shape.tokens, shape.source))
    allowed = [shape for shape in ordered if shape.tokens <= at_most]
    if not allowed and encoder:
        # If most targets are short and one is long, the ratio needs more source tokens than are
        # allowed. So use the tokens that the longest target leaves.
        remaining = (at_most - longest_target) // _MULTIPLE * _MULTIPLE
        return RowShape(max(longest_source, int(remaining)), longest_target)

    def cost(shape: RowShape) -> float:
        length = max(shape.source, shape.target)
        attention_factor = 1 + length / _ATTENTION_LENGTH
        return attention_factor / useful_share(source, target, shape)

    return min(allowed or ordered[:1], key=cost)


def _paired_shapes(
    longest_source: int, longest_target: int, ratio: float
) -> set[RowShape]:
    """List candidate shapes for an encoder-decoder. `ratio` is source tokens per target token."""
    shapes: set[RowShape] = set()
    for target in (longest_target, *_TARGET_LENGTHS):
        if target >= longest_target:
            for factor in _RATIO_FACTORS:
                source = round_up(int(target * ratio * factor))
                shapes.add(RowShape(max(longest_source, source), target))
    return shapes


def computed_lengths(
    prompt: Lengths, target: Lengths, *, encoder: bool
) -> tuple[Lengths, Lengths]:
    """Compute the number of encoder and decoder tokens of examples, [examples] each.

    A decoder-only model reads the prompt and the target without its last token.

    Args:
        prompt: Prompt tokens, [examples].
        target: Target tokens, [examples].
        encoder: Whether the model has an encoder.
    """
    if encoder:
        return prompt, target
    return np.zeros_like(prompt), prompt + target - 1


def round_up(n: int) -> int:
    """Round up to a positive multiple of `_MULTIPLE` tokens."""
    return max(_MULTIPLE, -(-n // _MULTIPLE) * _MULTIPLE)
