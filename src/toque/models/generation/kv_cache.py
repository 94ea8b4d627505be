"""KV cache of the rows being generated, in buffers that are allocated once, and its attention.

All rows share a clock: the newest token of each stands in the same column, so that a step writes
one column for all of them and reads a window that ends there. A row that began later starts further
right; what lies left of its start is masked. Once the columns left of every row are more than those
in use, the rows move back to the left: else a server of short texts would hold the memory of long
ones. A finished row is overwritten by the last one, so the live rows are always the first n. On a
CPU neighbours of similar length attend together and read no further back than the longest of them.

Letters, also in `causal.py` and `t5.py`: R rows, n live rows, D hidden size, H key-value heads, G
query heads of one key-value head, W columns of the buffer, K columns of the window, d head size, P
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

from toque.models.families import CAUSAL, family_of, head_size
from toque.models.forward.blocks import blocks
from toque.models.generation.gathered_attention import DTYPE as GATHERED
from toque.models.generation.gathered_attention import TILE, Gather, Tiles, can_gather, whole_tiles
from toque.models.generation.packed_products import has_bf16_products

SPARE = 64  # columns allocated beyond what is needed now
AT_ONCE = 1024  # the most columns allocated before any row needs them
MOST_WASTED_COLUMNS = 192  # padding that rows read together: 40 us at 8 GB/s, as one more call
PREFILL_TOKENS = 4096  # prompt tokens, padding included, of one forward of the prefill: its memory
WASTED_TOKENS = 128  # padding of a prefill on a CPU: 0.15 ms a token (30 M model), 2 to 3 a forward


def cache_dtype(core: PreTrainedModel) -> torch.dtype:
    """Precision of the KV cache: that of the matrix products, but for one that is gathered."""
    if has_bf16_products(core):
        return GATHERED if gathers(core) else torch.bfloat16
    kind = core.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else core.dtype


def gathers(core: PreTrainedModel) -> bool:
    """True if a step's attention is gathered: beside bf16 products; float32 keeps its sums."""
    plainly = family_of(core.config) == CAUSAL  # perhaps with windows and caps
    return has_bf16_products(core) and can_gather(core.device) and not plainly


def cache_shape(core: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, key-value heads and head size of the decoder's KV cache."""
    config = core.config
    if family_of(config).is_encoder_decoder:
        return config.num_decoder_layers, config.num_heads, config.d_kv
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):  # of GPT-BigCode
        heads = 1
    return config.num_hidden_layers, heads, head_size(config)


def layer_devices(core: PreTrainedModel) -> list[torch.device]:
    """The device of each layer of the decoder."""
    encoder = family_of(core.config).is_encoder_decoder
    decoder = core.get_submodule("decoder") if encoder else core.base_model
    return [next(layer.parameters()).device for layer in blocks(decoder)]


def neighbours(
    lengths: Sequence[int], *, most_wasted: float, most: float = math.inf
) -> Iterator[slice]:
    """Consecutive rows of similar length, of at most `most` tokens, `most_wasted` of them padding.

    >>> list(neighbours([900, 880, 100, 90], most_wasted=128))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    start, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        together = max(longest, length) * (row + 1 - start)
        if row > start and (together > most or together - total - length > most_wasted):
            yield slice(start, row)
            start, longest, total = row, 0, 0
        longest, total = max(longest, length), total + length
    if start < len(lengths):
        yield slice(start, len(lengths))


def prefilled_together(prompts: Sequence[Sequence[int]], device: torch.device) -> Iterator[slice]:
    """Consecutive prompts that are prefilled by one forward."""
    most_wasted = WASTED_TOKENS if device.type == "cpu" else PREFILL_TOKENS
    return neighbours([*map(len, prompts)], most_wasted=most_wasted, most=PREFILL_TOKENS)


def padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """[prompts, P] token ids, padded on the right."""
    width = max(map(len, prompts))
    rows = [list(prompt) + [pad_id] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(rows, device=device)


class Columns:
    """A layer's keys, or values, [R, H, W, d]."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = _zeroed(shape, dtype, device)  # a masked column must not hold a NaN

    def append(self, column: int, new: Tensor) -> None:
        """Write one column of the first n rows, [n, H, d]."""
        self.data[: len(new), :, column] = new

    def begin(self, row: int, column: int) -> None:
        """Make ready a row whose first column this will be."""

    def store(self, row: int, columns: slice, many: Tensor) -> None:
        """Write columns of a row, [H, columns, d]."""
        self.data[row, :, columns] = many

    def copy_row(self, row: int, source: int, columns: slice) -> None:
        """Overwrite columns of a row with those of another."""
        self.data[row, :, columns] = self.data[source, :, columns]

    def take(self, other: Tensor, rows: int, columns: slice, at: int) -> None:
        """Copy columns of the first rows of a buffer's data to the columns from `at` on."""
        length, taken = columns.stop - columns.start, other[:rows, :, columns]
        self.data[:rows, :, at : at + length] = taken.clone() if other is self.data else taken


def _zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, pages take time and memory only when first touched.

    `torch.zeros` writes all. NumPy's ask for huge pages, which clear 2 MiB where a short row in a
    long buffer needs 16 KiB: a fifth of the time of 96 rows of 80 tokens, the longest of 512.
    """
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True)
class AttentionWindow:
    """The columns some rows attend to at a step."""

    rows: slice
    columns: slice
    mask: Tensor | None  # added to the scores, [rows or 1, H or 1, 1, K]; None for nothing
    gather: Gather | None = None  # sums what each row reads instead of multiplying
    cap: float | None = None  # c of scores that are c * tanh(s / c) before the mask

    @property
    def masked(self) -> slice:
        """The K columns of the mask."""
        return self.columns if self.gather is None else self.gather.columns

    def near(self, width: int | None, cap: float | None) -> AttentionWindow:
        """With a cap, and without the columns that lie `width` or more back from the last."""
        first = max(self.columns.start, self.columns.stop - (width or self.columns.stop))
        mask = None if self.mask is None else self.mask[..., first - self.columns.start :]
        return replace(self, columns=slice(first, self.columns.stop), mask=mask, cap=cap)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Attention of these rows among all of a query [n, H * G, d] and of a layer's buffers."""
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
    """One token of each row against its keys: softmax(scale * q @ k.T + mask) @ v, [n, H * G * d].

    Queries are [n, H * G, d]; keys and values [n, H, K, d]; the mask is [n or 1, H or 1, 1, K].
    With a cap c, scores s are c * tanh(s / c) before the mask.
    """
    n, heads, columns, size = keys.shape
    # Query heads that share keys are so many queries at one position: nothing is repeated.
    grouped = query.to(keys.dtype).reshape(n, heads, -1, size).contiguous()
    if keys.device.type != "cpu" and cap is None:
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
    if cap is not None:
        scores = scores.div_(cap).tanh_().mul_(cap)
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
    """Keys and values of every layer for the live rows; nothing is allocated before the first.

    `shape` is layers, key-value heads and head size, `columns` what the longest row will need,
    where known: growing a buffer copies it. Masks are on `device`, each layer on its own of
    `devices`. With `gathers`, only on a CPU, attention reads its columns as `Gather` does, which
    decides the dtype.
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
        self._dtype, self._device, self._gathers = dtype, device, gathers
        self.devices = tuple(devices) or (device,) * layers
        self._layers: list[tuple[Columns | Tiles, Columns | Tiles]] = []  # keys and values
        self._blocked = torch.empty(0)  # [R, W]: -inf left of a row's start
        self.starts: list[int] = []  # the first column of every live row
        self.end = 0  # the column the next token is written to, one further after a step
        self._width = self._whole(min(columns, AT_ONCE))
        self._groups: list[slice] = []  # of rows; empty when they have changed
        self._gather: Gather | None = None  # the last step's

    @classmethod
    def of_model(cls, core: PreTrainedModel, *, rows: int, columns: int = 0) -> Self:
        """The cache of a model's decoder."""
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
        """The first column a live row uses."""
        return min(self.starts, default=self.end)

    def admit(self, lengths: Sequence[int]) -> list[tuple[int, slice]]:
        """Add rows with prompts of `lengths` tokens; returns the row and columns of each."""
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
        self, layer: int, places: Sequence[tuple[int, slice]], keys: Tensor, values: Tensor
    ) -> None:
        """Store keys and values of new rows' prompts, [prompts, H, P, d], at what `admit` gave."""
        for buffer, prompts in zip(self._layers[layer], (keys, values), strict=True):
            for (row, columns), many in zip(places, prompts, strict=True):
                buffer.store(row, columns, many[:, : columns.stop - columns.start])

    def drop(self, row: int) -> None:
        """Free a row; the last live one takes its place."""
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
        """Make room for one more token a row; returns the windows that end with it."""
        kept = self.end - self.first
        # A move copies fewer columns than steps and prompts have left behind since the last one.
        if self.end == self._width or self.first >= kept + SPARE:
            self._place(kept)
        return self.windows(self.end + 1)

    def windows(self, end: int) -> list[AttentionWindow]:
        """Windows over the rows' columns before `end`."""
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
            most_wasted = MOST_WASTED_COLUMNS if self._device.type == "cpu" else math.inf
            lengths = [end - start for start in self.starts]
            self._groups = list(neighbours(lengths, most_wasted=most_wasted))
        found = []
        for rows in self._groups:
            first = min(starts := self.starts[rows])
            mask = self._blocked[rows, None, None, first:end] if max(starts) > first else None
            found.append(AttentionWindow(rows, slice(first, end), mask))
        return found

    def append(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the new token's key and value, [n, H, d] each."""
        for buffer, new in zip(self._layers[layer], (key, value), strict=True):
            buffer.append(self.end, new)

    def attend(
        self, layer: int, query: Tensor, *, windows: Sequence[AttentionWindow], scale: float
    ) -> Tensor:
        """Attention of one token a row, [n, H * G, d] to [n, H * G * d]."""
        keys, values = (buffer.data for buffer in self._layers[layer])
        if keys.device != self._device:
            masks = [None if part.mask is None else part.mask.to(keys.device) for part in windows]
            windows = [replace(part, mask=m) for part, m in zip(windows, masks, strict=True)]
        seen = [part.attend(query, keys, values, scale) for part in windows]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _buffers(self) -> Iterator[Columns | Tiles]:
        return itertools.chain(*self._layers)

    def _place(self, end: int) -> None:
        """Move the rows to end before column `end`, in tiles up to one tile later."""
        first, live, kept = self.first, len(self.starts), self.end - self.first
        if self._gathers:
            end += ((self.end if live else 0) - end) % TILE
        source, at = slice(first, self.end), end - kept
        if self._layers and end + SPARE <= self._width:
            for buffer in self._buffers():
                buffer.take(buffer.data, live, source, at)
        else:
            self._allocate(source, at)
        self.starts = [start - first + at for start in self.starts]
        self.end, self._gather = end, None
        for row in range(live):
            self._mask_row(row)

    def _allocate(self, source: slice, at: int) -> None:
        """New buffers, wider if needed, with the live rows' columns `source` from `at` on."""
        end = at + source.stop - source.start
        if end + (SPARE if self._layers else 0) > self._width:
            self._width = self._whole(end + max(SPARE, end // 4))
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
            new.take(before.data, len(self.starts), source, at)
        dtype = torch.float32 if self._gathers else self._dtype
        self._blocked = torch.zeros(rows, self._width, dtype=dtype, device=self._device)

    def _whole(self, width: int) -> int:
        # Odd: with a multiple of 4 KiB between rows, all compete for the same few lines of a CPU's
        # cache (3.3 ms against 2.1 ms for one product with the keys of 96 rows).
        return whole_tiles(slice(0, width)).stop if self._gathers else width | 1

    def _mask_row(self, row: int) -> None:
        self._blocked[row] = 0.0
        self._blocked[row, : self.starts[row]] = -torch.inf
