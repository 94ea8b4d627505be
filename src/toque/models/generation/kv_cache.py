"""KV cache of the rows being generated, in buffers that are allocated once, and its attention.

Tensors are [rows, heads, columns, head size]. All rows share a clock: the newest token of each
stands in the same column, so that a step writes one column for all of them and reads a window that
ends there. A row that began later starts further right; what lies left of its start is masked. Once
the columns left of every row are more than those in use, the rows move back to the left: else each
column would be touched in time, and a server of short texts hold the memory of long ones. A
finished row is overwritten by the last one, so the live rows are always the first n and a step
computes nothing else. On a CPU, where attention takes as long as reading keys and values does,
neighbours of similar length attend together and read no further back than the longest of them.

Letters: R rows, n live rows, H key-value heads, G query heads of one key-value head, W columns
of the buffer, K columns of the window, d head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from toque.models.generation.cache_buffers import TILE, Columns, buffer_pair, whole_tiles
from toque.models.generation.gathered_attention import MOST_EMPTY_COLUMNS, Gather

SPARE = 64
"""Columns allocated beyond what is needed now."""
AT_ONCE = 1024
"""The most columns allocated before any row needs them.

Widths are odd: with a multiple of 4 KiB between rows, all of them compete for the same few lines of
a CPU's cache (3.3 ms against 2.1 ms for one product with the keys of 96 rows).
"""
MOST_WASTED_COLUMNS = 192
"""Padding columns that rows attending together may read before they are split into two groups.

About what one more attention call costs: 40 us, at 3 kB a column and 8 GB/s.
"""


@dataclass(frozen=True)
class LengthGroup:
    """Neighbouring rows that attend together."""

    rows: slice
    columns: int
    """Length of the longest."""
    even: bool
    """True if all have the same length."""


def length_groups(
    lengths: Sequence[int], device: torch.device, *, gathers: bool = False
) -> list[LengthGroup]:
    """Split the rows, where that saves time, into neighbours of similar length.

    >>> [part.rows for part in length_groups([900, 880, 100, 100], torch.device("cpu"))]
    [slice(0, 2, None), slice(2, 4, None)]
    """
    most_wasted = MOST_EMPTY_COLUMNS if gathers else MOST_WASTED_COLUMNS
    parts: list[LengthGroup] = []
    first, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        together = max(longest, length) * (row + 1 - first)
        if device.type == "cpu" and together - total - length > most_wasted:
            parts.append(LengthGroup(slice(first, row), longest, total == longest * (row - first)))
            first, longest, total = row, 0, 0
        longest, total = max(longest, length), total + length
    n = len(lengths)
    parts.append(LengthGroup(slice(first, n), longest, total == longest * (n - first)))
    return parts


@dataclass(frozen=True)
class Window:
    """The columns some rows attend to at a step."""

    rows: slice
    columns: slice
    mask: Tensor | None
    """Added to the scores, [rows or 1, H or 1, 1, K]; None for nothing."""
    gather: Gather | None = None
    """Sums what each row reads instead of multiplying; None for products."""

    @property
    def masked(self) -> slice:
        """The K columns of the mask."""
        return self.columns if self.gather is None else self.gather.columns


def gathered_window(
    rows: slice,
    columns: slice,
    used: Sequence[slice],
    blocked: Tensor,
    last: Gather | None = None,
) -> Window:
    """A window of which each row reads its own columns.

    Args:
        rows: Of the cache.
        columns: What the rows use, all together.
        used: What each of them does.
        blocked: [R, W] -inf where a row uses no column, up to the last of `columns`.
        last: These rows' at the step before, in the same buffers; serves again if it may.
    """
    gather = Gather(rows, columns, used)
    if last is not None and gather.reads_as(last):
        gather = last
    mask = blocked[rows, gather.columns].clone()
    mask[:, columns.stop - gather.columns.start :] = -torch.inf
    return Window(rows, columns, mask[:, None, None], gather)


def windows_on(device: torch.device, windows: Sequence[Window]) -> list[Window]:
    """The windows with their masks on another device."""
    masks = [None if part.mask is None else part.mask.to(device) for part in windows]
    return [replace(part, mask=mask) for part, mask in zip(windows, masks, strict=True)]


def windowed_attention(
    windows: Sequence[Window], query: Tensor, keys: Tensor, values: Tensor, scale: float
) -> Tensor:
    """`attend`, window by window, [n, H * G * d]."""
    seen = [
        attend(
            query[part.rows],
            keys[part.rows, :, part.columns],
            values[part.rows, :, part.columns],
            part.mask,
            scale,
        )
        if part.gather is None
        else part.gather.attend(query[part.rows], keys, values, part.mask, scale)
        for part in windows
    ]
    return seen[0] if len(seen) == 1 else torch.cat(seen)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """One token of each row against its keys: softmax(scale * q @ k.T + mask) @ v.

    Args:
        query: [n, H * G, d]; the query heads of one key-value head are neighbours.
        keys: [n, H, K, d].
        values: [n, H, K, d].
        mask: Added to the scores, [n or 1, H or 1, 1, K]; None for nothing.
        scale: Of the products.

    Returns:
        [n, H * G * d].
    """
    n, heads, columns, size = keys.shape
    # Query heads that share keys are so many queries at one position: nothing is repeated.
    grouped = query.to(keys.dtype).reshape(n, heads, -1, size).contiguous()
    if keys.device.type != "cpu":
        if mask is not None:
            mask = mask.expand(n, -1, grouped.shape[2], -1)
        output = functional.scaled_dot_product_attention(grouped, keys, values, mask, scale=scale)
        return output.reshape(n, -1)
    # On a CPU two plain products: reading keys and values is all the time there is, and PyTorch's
    # fused kernel, made for many queries, reads them a quarter slower (4.2 ms against 5.2 ms for
    # 64 rows, 6 heads, 180 columns).
    queries = grouped.view(n * heads, -1, size)
    if keys.dtype == torch.float32:
        products = torch.bmm(queries, _flat(keys).transpose(1, 2))
    else:  # oneDNN's bf16 kernels take a third of the time this way round
        products = torch.bmm(_flat(keys), queries.transpose(1, 2)).transpose(1, 2)
    scores = products.float().mul_(scale).view(n, heads, -1, columns)
    if mask is not None:
        scores = scores.add_(mask)
    shares = scores.softmax(-1).to(values.dtype)
    return torch.bmm(shares.view(n * heads, -1, columns), _flat(values)).view(n, -1)


def _flat(part: Tensor) -> Tensor:
    """[n, H, K, d] -> [n * H, K, d] without a copy: a window's rows and heads stay one axis."""
    n, heads, columns, size = part.shape
    stride = part.stride()
    if stride[0] != heads * stride[1]:
        return part.reshape(n * heads, columns, size)
    return part.as_strided((n * heads, columns, size), stride[1:], part.storage_offset())


class KVCache:
    """Keys and values of every layer for the live rows."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        rows: int,
        columns: int = 0,
        dtype: torch.dtype,
        device: torch.device,
        devices: Sequence[torch.device] = (),
        gathers: bool = False,
    ) -> None:
        """Nothing is allocated yet.

        Args:
            shape: Layers, key-value heads and head size.
            rows: The most rows that can live at once.
            columns: What the longest row will need, where known: growing a buffer copies it.
            dtype: Of keys and values; where they are gathered, as `Gather` takes them.
            device: Of keys and values, and of masks.
            devices: Of each layer's keys and values, where a model lies on several.
            gathers: Attention reads its columns as `Gather` does; only on a CPU.
        """
        layers, heads, size = shape
        self._shape = (layers, rows, heads, size)
        self._dtype, self._device, self._gathers = dtype, device, gathers
        self._devices = tuple(devices) or (device,) * layers
        self._layers: list[tuple[Columns, Columns]] = []  # keys and values
        self._blocked = torch.empty(0)  # [R, W]: -inf left of a row's start
        self.starts: list[int] = []
        """The first column of every live row."""
        self.end = 0
        """The column the next token is written to."""
        self._width = self._whole(min(columns, AT_ONCE))
        self._groups: list[LengthGroup] = []  # empty when the rows have changed
        self._since = 0  # the newest token's column when they were grouped
        self._gathered: dict[int, Gather] = {}  # the last step's, by their first rows

    @property
    def first(self) -> int:
        """The first column a live row uses."""
        return min(self.starts, default=self.end)

    def admit(self, lengths: Sequence[int]) -> list[tuple[int, slice]]:
        """Add rows with prompts of `lengths` tokens; returns the row and columns of each."""
        needed = max(lengths)
        if not self._layers or not self.starts or self.end < needed:
            self._place(needed)
        places = []
        for length in lengths:
            places.append((len(self.starts), slice(self.end - length, self.end)))
            self.starts.append(self.end - length)
            if not length:
                row = len(self.starts) - 1
                for buffer in itertools.chain(*self._layers):
                    buffer.begin(slice(row, row + 1), self.end)
        self._mask_rows(range(len(self.starts) - len(lengths), len(self.starts)))
        self._groups = []
        return places

    def store(self, layer: int, row: int, columns: slice, keys: Tensor, values: Tensor) -> None:
        """Store the keys and values of a new row's prompt, [H, tokens, d] each."""
        for buffer, many in zip(self._layers[layer], (keys, values), strict=True):
            buffer.store(slice(row, row + 1), columns, many[None])

    def drop(self, row: int) -> None:
        """Free a row; the last live one takes its place."""
        last = len(self.starts) - 1
        if row != last:
            columns = slice(self.starts[last], self.end)
            for buffer in itertools.chain(*self._layers):
                buffer.copy_row(row, last, columns)
            self.starts[row] = self.starts[last]
            self._mask_rows([row])
        self.starts.pop()
        self._groups = []

    def begin(self) -> list[Window]:
        """Make room for one more token a row.

        Returns:
            The windows of this step; masks are [rows, 1, 1, K] of 0 and -inf.
        """
        kept = self.end - self.first
        # A move copies fewer columns than steps and prompts have left behind since the last one.
        if self.end == self._width or self.first >= kept + SPARE:
            self._place(kept)
        if not self._groups:
            lengths = [self.end + 1 - start for start in self.starts]
            self._groups = length_groups(lengths, self._device, gathers=self._gathers)
            self._since = self.end
        # Since the grouping every row has grown by as much.
        return [
            self._window(part, slice(self._since + 1 - part.columns, self.end + 1))
            for part in self._groups
        ]

    def _window(self, part: LengthGroup, columns: slice) -> Window:
        if not self._gathers:
            mask = None if part.even else self._blocked[part.rows, None, None, columns]
            return Window(part.rows, columns, mask)
        used = [slice(start, columns.stop) for start in self.starts[part.rows]]
        last = self._gathered.get(part.rows.start)
        window = gathered_window(part.rows, columns, used, self._blocked, last)
        if window.gather is not None:
            self._gathered[part.rows.start] = window.gather
        return window

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        windows: Sequence[Window],
        scale: float,
    ) -> Tensor:
        """Append the new token's key and value [n, H, d], then attend: [n, H * G * d]."""
        keys, values = self._layers[layer]
        keys.append(self.end, key)
        values.append(self.end, value)
        if keys.data.device != self._device:
            windows = windows_on(keys.data.device, windows)
        return windowed_attention(windows, query, keys.data, values.data, scale)

    def near(self, layer: int, hidden: Tensor) -> Tensor:
        """Hidden states on the device of a layer."""
        return hidden.to(self._devices[layer])

    def advance(self) -> None:
        """End of a step: the next token goes one column further."""
        self.end += 1

    def _place(self, end: int) -> None:
        """Move the rows so that they end before column `end`; into new buffers if needed.

        A row of tiles may end up to one tile later: its tiles move as they are.
        """
        first, live, kept = self.first, len(self.starts), self.end - self.first
        if live and self._gathers:
            end += (self.end - end) % TILE
        source, at = slice(first, self.end), end - kept
        if self._layers and end + SPARE <= self._width:
            for buffer in itertools.chain(*self._layers):
                buffer.take(buffer, live, source, at)
        else:
            self._allocate(source, at)
        self.starts = [start - first + at for start in self.starts]
        self._since += end - self.end
        self.end = end
        self._mask_rows(range(live))

    def _allocate(self, source: slice, at: int) -> None:
        """New buffers, wider if needed, with the live rows' columns `source` from `at` on."""
        live, end = len(self.starts), at + source.stop - source.start
        if end + (SPARE if self._layers else 0) > self._width:
            self._width = self._whole(end + max(SPARE, end // 4))
        _, rows, heads, size = self._shape
        shape = (rows, heads, self._width, size)
        old, self._layers, self._gathered = self._layers, [], {}
        for layer, device in enumerate(self._devices):
            pair = buffer_pair(shape, self._dtype, device, gathers=self._gathers)
            self._layers.append(pair)
            if old:
                for new, before in zip(pair, old[layer], strict=True):
                    new.take(before, live, source, at)
        dtype = torch.float32 if self._gathers else self._dtype
        self._blocked = torch.zeros(rows, self._width, dtype=dtype, device=self._device)

    def _whole(self, width: int) -> int:
        """A buffer's width, at least this."""
        return whole_tiles(slice(0, width)).stop if self._gathers else width | 1

    def _mask_rows(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._blocked[row] = 0.0
            self._blocked[row, : self.starts[row]] = -torch.inf
