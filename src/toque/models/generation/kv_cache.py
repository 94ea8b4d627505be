"""KV cache of live rows in buffers that are allocated once, and its attention.

The newest tokens of all rows are in the same column. A step writes this column for all rows, and
reads a window that ends there. A row that began later starts further right, and the columns left of
its start are masked. If more columns are unused than used, the rows move left. Otherwise a server
of short texts would need the memory of long texts. When a row is finished, the last row replaces
it, so the live rows are always the first n. On a CPU, consecutive rows of similar length attend
together, and read no more columns than the longest of them.

Letters, also in `causal.py` and `t5.py`: R rows, n live rows, D hidden size, H key-value heads.
G query heads per key-value head, W columns of the buffer, K columns of the window, d head size. P
longest prompt of a prefill.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from toque.models.config_values import head_size
from toque.models.families import CAUSAL, family_of
from toque.models.forward.blocks import blocks
from toque.models.generation.gathered_attention import DTYPE as GATHERED
from toque.models.generation.gathered_attention import TILE, Gather, Tiles, can_gather
from toque.models.generation.packed_products import has_bf16_products

SPARE = 64  # columns that are allocated in addition to the current need
MAX_INITIAL_COLUMNS = 1024  # columns that are allocated before a row needs them
# Padding in a group of rows: 40 us at 8 GB/s, the cost of another call.
MAX_WASTED_COLUMNS = 192
# Prompt tokens with padding in one forward, which limits its memory.
PREFILL_TOKENS = 4096
# Padding of a prefill on a CPU: 0.15 ms per token (30 M model), 2 to 3 per call.
WASTED_TOKENS = 128


def cache_dtype(core: PreTrainedModel) -> torch.dtype:
    """Return the precision of the KV cache: float16 if gathered, else the precision of products."""
    if has_bf16_products(core):
        return GATHERED if gathers(core) else torch.bfloat16
    kind = core.device.type
    return (
        torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind)
        else core.dtype
    )


def gathers(core: PreTrainedModel) -> bool:
    """True if the attention of a step is gathered, with bf16 products only.

    float32 products keep float32 sums. Models of the family `CAUSAL` may have windows and caps.
    """
    is_causal = family_of(core.config) == CAUSAL
    return has_bf16_products(core) and can_gather(core.device) and not is_causal


def cache_shape(core: PreTrainedModel) -> tuple[int, int, int]:
    """Return the layers, key-value heads and head size of the decoder."""
    config = core.config
    if family_of(config).is_encoder_decoder:
        return config.num_decoder_layers, config.num_heads, config.d_kv
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):  # GPT-BigCode
        heads = 1
    return config.num_hidden_layers, heads, head_size(config)


def layer_devices(core: PreTrainedModel) -> list[torch.device]:
    """Return the device of each layer of the decoder."""
    encoder = family_of(core.config).is_encoder_decoder
    decoder = core.get_submodule("decoder") if encoder else core.base_model
    return [next(layer.parameters()).device for layer in blocks(decoder)]


def neighbours(
    lengths: Sequence[int], *, max_wasted: float, max_tokens: float = math.inf
) -> Iterator[slice]:
    """Group consecutive rows of similar length, with limits for padding and for all tokens.

    >>> list(neighbours([900, 880, 100, 90], max_wasted=128))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    start = longest = total = 0
    for row, length in enumerate(lengths):
        padded_total = max(longest, length) * (row + 1 - start)
        wasted = padded_total - total - length
        if row > start and (padded_total > max_tokens or wasted > max_wasted):
            yield slice(start, row)
            start = row
            longest = total = 0
        longest, total = max(longest, length), total + length
    if start < len(lengths):
        yield slice(start, len(lengths))


def prefilled_together(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[slice]:
    """Group consecutive prompts for the forwards of a prefill."""
    max_wasted = WASTED_TOKENS if device.type == "cpu" else PREFILL_TOKENS
    return neighbours(
        [*map(len, prompts)], max_wasted=max_wasted, max_tokens=PREFILL_TOKENS
    )


def padded(
    prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device
) -> Tensor:
    """Build token ids [prompts, P] with padding on the right."""
    width = max(map(len, prompts))
    rows = [list(prompt) + [pad_id] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(rows, device=device)


class Columns:
    """Keys or values of a layer, [R, H, W, d]."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        # A masked column must not contain NaN.
        self.data = _zeroed(shape, dtype, device)

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        self.data[: len(new), :, column] = new

    def begin(self, row: int, column: int) -> None:
        """Prepare a row that starts with this column."""

    def store(self, row: int, columns: slice, many: Tensor) -> None:
        """Write columns of a row, [H, columns, d]."""
        self.data[row, :, columns] = many

    def copy_row(self, row: int, source: int, columns: slice) -> None:
        """Copy columns from another row."""
        self.data[row, :, columns] = self.data[source, :, columns]

    def copy_from(self, other: Tensor, rows: int, columns: slice, start: int) -> None:
        """Copy columns of the first rows from a buffer's data, to the columns after `start`."""
        source = other[:rows, :, columns]
        end = start + columns.stop - columns.start
        self.data[:rows, :, start:end] = (
            source.clone() if other is self.data else source
        )


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros. On a CPU, a page needs time and memory only when it is first used.

    `torch.zeros` writes all pages. NumPy requests huge pages, which clears 2 MiB for a short row in
    a long buffer instead of 16 KiB. It takes 20 % of the time of 96 rows of 80 tokens, if the
    longest has 512.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True)
class AttentionWindow:
    """Columns that some rows attend to in a step."""

    rows: slice
    columns: slice
    # Added to the scores, [rows or 1, H or 1, 1, K]; None without a mask.
    mask: Tensor | None
    gather: Gather | None = None  # gathered attention, if it is used
    cap: float | None = None  # c of scores that become c * tanh(s / c) before the mask

    @property
    def masked(self) -> slice:
        """Columns of the mask."""
        return self.columns if self.gather is None else self.gather.columns

    def near(self, width: int | None, cap: float | None) -> AttentionWindow:
        """Return a window with a cap, and with at most `width` columns at the end."""
        first = max(
            self.columns.start, self.columns.stop - (width or self.columns.stop)
        )
        mask = (
            None if self.mask is None else self.mask[..., first - self.columns.start :]
        )
        return replace(
            self, columns=slice(first, self.columns.stop), mask=mask, cap=cap
        )

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, scale: float
    ) -> Tensor:
        """Compute attention for these rows of a query [n, H * G, d] and a layer's buffers."""
        query = query[self.rows]
        if self.gather is not None:
            return self.gather.attend(query, keys, values, self.mask, scale)
        keys, values = (part[self.rows, :, self.columns] for part in (keys, values))
        return _attend(query, keys, values, self.mask, scale, self.cap)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None,
) -> Tensor:
    """Compute softmax(scale * q @ k.T + mask) @ v for one token per row, [n, H * G * d].

    Queries are [n, H * G, d], keys and values [n, H, K, d]. The mask is [n or 1, H or 1, 1, K].
    With a cap c, scores s become c * tanh(s / c) before the mask.
    """
    n, heads, columns, size = keys.shape
    # Query heads with shared keys are several queries at one position: nothing is repeated.
    grouped = query.to(keys.dtype).reshape(n, heads, -1, size).contiguous()
    if keys.device.type != "cpu" and cap is None:
        if mask is not None:
            mask = mask.expand(n, -1, grouped.shape[2], -1)
        output = functional.scaled_dot_product_attention(
            grouped, keys, values, mask, scale=scale
        )
        return output.reshape(n, -1)
    # On a CPU, two plain products: almost all time is spent on reading keys and values. PyTorch's
    # fused kernel for many queries is slower (5.2 ms instead of 4.2 ms for 64 rows, 6 heads, 180
    # columns).
    queries = grouped.view(n * heads, -1, size)
    if keys.dtype == torch.float32:
        products = torch.bmm(queries, _flat(keys).transpose(1, 2))
    else:  # oneDNN's bf16 kernels are three times as fast in this order
        products = torch.bmm(_flat(keys), queries.transpose(1, 2)).transpose(1, 2)
    scores = products.float().mul_(scale).view(n, heads, -1, columns)
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
    if mask is not None:
        scores = scores.add_(mask)
    shares = scores.softmax(-1).to(values.dtype)
    return torch.bmm(shares.view(n * heads, -1, columns), _flat(values)).view(n, -1)


def _flat(part: Tensor) -> Tensor:
    """View [n, H, K, d] as [n * H, K, d], without a copy if rows and heads can be one axis."""
    n, heads, columns, size = part.shape
    stride = part.stride()
    if stride[0] != heads * stride[1]:
        return part.reshape(n * heads, columns, size)
    return part.as_strided(
        (n * heads, columns, size), stride[1:], part.storage_offset()
    )


class KVCache:
    """Keys and values of every layer for the live rows. The first row allocates memory.

    Args:
        shape: Layers, key-value heads and head size.
        rows: Maximum number of rows.
        columns: Columns of the longest row, if known. To grow a buffer copies it.
        dtype: Precision of keys and values.
        device: Device of the masks.
        devices: Device of each layer; `device` by default.
        gathers: Use gathered attention, on a CPU only. It determines the precision.
    """

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
        layers, heads, size = shape
        self._shape = (rows, heads, size)
        self._dtype, self._device = dtype, device
        self._gathers = gathers
        self.devices = tuple(devices) or (device,) * layers
        self._layers: list[
            tuple[Columns | Tiles, Columns | Tiles]
        ] = []  # keys and values
        self._blocked = torch.empty(0)  # [R, W]: -inf left of a row's start
        self.starts: list[int] = []  # first column of every live row
        self.end = 0  # column of the next token
        self._width = self._rounded_width(min(columns, MAX_INITIAL_COLUMNS))
        self._groups: list[
            slice
        ] = []  # groups of rows; empty after a change of the rows
        self._gather: Gather | None = None  # gathered attention of the last step

    @classmethod
    def of_model(cls, core: PreTrainedModel, *, rows: int, columns: int = 0) -> Self:
        """Create the cache of a model's decoder."""
        return cls(
            cache_shape(core),
            rows=rows,
            columns=columns,
            dtype=cache_dtype(core),
            device=core.device,
            devices=layer_devices(core),
            gathers=gathers(core),
        )

    @property
    def first(self) -> int:
        """First column that a live row uses."""
        return min(self.starts, default=self.end)

    def admit(self, lengths: Sequence[int]) -> list[tuple[int, slice]]:
        """Add rows with prompts of these lengths. Return the row and columns of each."""
        needed = max(lengths)
        if not self._layers or not self.starts or self.end < needed:
            self._place(needed)
        places = []
        for row, length in enumerate(lengths, start=len(self.starts)):
            places.append((row, slice(self.end - length, self.end)))
            self.starts.append(self.end - length)
            self._mask_row(row)
            if not length:
                for buffer in self._buffers():
                    buffer.begin(row, self.end)
        self._groups = []
        return places

    def store(
        self,
        layer: int,
        places: Sequence[tuple[int, slice]],
        keys: Tensor,
        values: Tensor,
    ) -> None:
        """Store keys and values of new rows' prompts, [prompts, H, P, d], at places of `admit`."""
        for buffer, prompts in zip(self._layers[layer], (keys, values), strict=True):
            for (row, columns), many in zip(places, prompts, strict=True):
                buffer.store(row, columns, many[:, : columns.stop - columns.start])

    def drop(self, row: int) -> None:
        """Remove a row. The last live row replaces it."""
        last = len(self.starts) - 1
        if row != last:
            columns = slice(self.starts[last], self.end)
            for buffer in self._buffers():
                buffer.copy_row(row, last, columns)
            self.starts[row] = self.starts[last]
            self._mask_row(row)
        self.starts.pop()
        self._groups = []

    def begin(self) -> list[AttentionWindow]:
        """Prepare one more token per row. Return the windows that end with it."""
        n_used = self.end - self.first
        # A move copies fewer columns than steps and prompts have freed since the last one.
        if self.end == self._width or self.first >= n_used + SPARE:
            self._place(n_used)
        return self.windows(self.end + 1)

    def windows(self, end: int) -> list[AttentionWindow]:
        """Return windows over the rows' columns before `end`."""
        if self._gathers:
            rows, columns = slice(0, len(self.starts)), slice(self.first, end)
            gather = Gather(columns, [slice(start, end) for start in self.starts])
            if self._gather is not None and gather.reads_as(self._gather):
                gather = self._gather
            self._gather = gather
            blocked = self._blocked[rows, None, None, gather.columns].clone()
            blocked[..., end - gather.columns.start :] = -torch.inf
            return [AttentionWindow(rows, columns, blocked, gather)]
        if not self._groups:
            max_wasted = MAX_WASTED_COLUMNS if self._device.type == "cpu" else math.inf
            lengths = [end - start for start in self.starts]
            self._groups = list(neighbours(lengths, max_wasted=max_wasted))
        windows = []
        for rows in self._groups:
            first = min(starts := self.starts[rows])
            mask = (
                self._blocked[rows, None, None, first:end]
                if max(starts) > first
                else None
            )
            windows.append(AttentionWindow(rows, slice(first, end), mask))
        return windows

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the key and value of a new token, [n, H, d] each."""
        for buffer, new in zip(self._layers[layer], (key, value), strict=True):
            buffer.append(self.end, new)

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        windows: Sequence[AttentionWindow],
        scale: float,
    ) -> Tensor:
        """Compute attention of one token per row, [n, H * G, d] to [n, H * G * d]."""
        keys, values = (buffer.data for buffer in self._layers[layer])
        if keys.device != self._device:
            masks = [
                None if part.mask is None else part.mask.to(keys.device)
                for part in windows
            ]
            windows = [
                replace(part, mask=m) for part, m in zip(windows, masks, strict=True)
            ]
        outputs = [window.attend(query, keys, values, scale) for window in windows]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _buffers(self) -> Iterator[Columns | Tiles]:
        return itertools.chain(*self._layers)

    def _place(self, end: int) -> None:
        """Move the rows so that they end before column `end`. Tiles may end up to a tile later."""
        first, n_live = self.first, len(self.starts)
        n_used = self.end - first
        if self._gathers:
            end += ((self.end if n_live else 0) - end) % TILE
        source, start = slice(first, self.end), end - n_used
        if self._layers and end + SPARE <= self._width:
            for buffer in self._buffers():
                buffer.copy_from(buffer.data, n_live, source, start)
        else:
            self._allocate(source, start)
        self.starts = [old_start - first + start for old_start in self.starts]
        self.end, self._gather = end, None
        for row in range(n_live):
            self._mask_row(row)

    def _allocate(self, source: slice, start: int) -> None:
        """Allocate buffers, wider if needed. Copy the live rows' columns `source` to `start`."""
        end = start + source.stop - source.start
        if end + (SPARE if self._layers else 0) > self._width:
            self._width = self._rounded_width(end + max(SPARE, end // 4))
        rows, heads, size = self._shape
        shape = (rows, heads, self._width, size)
        old, self._layers = self._layers, []
        for device in self.devices:
            keys, values = (
                Tiles(shape, keys=are_keys)
                if self._gathers
                else Columns(shape, self._dtype, device)
                for are_keys in (True, False)
            )
            self._layers.append((keys, values))
        for new, before in zip(self._buffers(), itertools.chain(*old), strict=False):
            new.copy_from(before.data, len(self.starts), source, start)
        dtype = torch.float32 if self._gathers else self._dtype
        self._blocked = torch.zeros(rows, self._width, dtype=dtype, device=self._device)

    def _rounded_width(self, width: int) -> int:
        if self._gathers:
            return -(-width // TILE) * TILE
        # Odd, because with a multiple of 4 KiB per row, all rows use the same few lines of a CPU's
        # cache (3.3 ms instead of 2.1 ms for one product with the keys of 96 rows).
        return width | 1

    def _mask_row(self, row: int) -> None:
        self._blocked[row] = 0.0
        self._blocked[row, : self.starts[row]] = -torch.inf
