"""Decoding with a KV cache for T5: the source is encoded once, then only the decoder runs.

Letters as in `base.py`; S longest live source. Self- and cross-attention have H heads each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from toque.models.forward.packed import scale_decoder_outputs
from toque.models.generation.cache_buffers import Columns, buffer_pair, whole_tiles
from toque.models.generation.decoding import (
    Decoding,
    cache_dtype,
    cache_shape,
    gathers,
    groups,
    layer_devices,
    padded,
)
from toque.models.generation.kv_cache import (
    KVCache,
    Window,
    gathered_window,
    length_groups,
    windowed_attention,
    windows_on,
)


class T5Decoding(Decoding):
    """Prefill encodes the sources and computes their keys and values once a layer.

    Args:
        core: The model.
        rows: The most live rows.
        columns: Tokens of the longest answer.
        pad_id: Pads the short sources of a prefill; starts an answer if the model does not say.
    """

    def __init__(self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int) -> None:
        self.core, self.pad_id, self.rows = core, pad_id, rows
        start = core.config.decoder_start_token_id
        self.start = pad_id if start is None else int(start)
        self.decoder: Any = core.get_submodule("decoder")
        self.dtype, self.gathers = cache_dtype(core), gathers(core)
        self.cache = KVCache(
            cache_shape(core),
            rows=rows,
            columns=columns,
            dtype=self.dtype,
            device=core.device,
            devices=layer_devices(core),
            gathers=self.gathers,
        )
        self.sources: list[int] = []
        self._cross: list[tuple[Columns, Columns]] = []
        self._source_mask = torch.empty(0)  # [R, S]: -inf after a row's source
        self._position_bias = torch.empty(0)
        self._source_windows: list[Window] = []  # empty when the rows have changed

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Encode the prompts; every answer begins with the start token."""
        self._widen(max(map(len, prompts)))
        lengths = [len(prompt) for prompt in prompts]
        for part in groups(lengths, self.core.device):
            self._encode(prompts[part])
            self._add_sources(prompts[part])
        self.cache.admit([0] * len(prompts))
        return [self.start] * len(prompts)

    def _widen(self, width: int) -> None:
        """Grow the cross-attention's buffers to `width` source tokens in every row."""
        have = self._source_mask.shape[-1] if self._cross else 0
        if width <= have:
            return
        if self.gathers:
            width = whole_tiles(slice(0, width)).stop
        live, config = len(self.sources), self.core.config
        device = self.core.device
        shape = (self.rows, config.num_heads, width, config.d_kv)
        old, self._cross = self._cross, []
        for layer, own in enumerate(layer_devices(self.core)):
            pair = buffer_pair(shape, self.dtype, own, gathers=self.gathers)
            if old:
                for new, before in zip(pair, old[layer], strict=True):
                    new.take(before, live, slice(0, have), 0)
            self._cross.append(pair)
        dtype = torch.float32 if self.gathers else self.dtype
        self._source_mask = torch.zeros(self.rows, width, dtype=dtype, device=device)
        for row, length in enumerate(self.sources):
            self._source_mask[row, length:] = -torch.inf

    def _encode(self, prompts: Sequence[Sequence[int]]) -> None:
        tokens = padded(prompts, self.pad_id, self.core.device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        mask = real[:, None, None, :].expand(-1, -1, tokens.shape[1], -1)
        source = self.core.get_submodule("encoder")(
            input_ids=tokens, attention_mask=mask
        ).last_hidden_state
        first, width = len(self.sources), tokens.shape[1]
        rows = slice(first, first + len(prompts))
        size = self.core.config.d_kv
        for block, (keys, values) in zip(self.decoder.block, self._cross, strict=True):
            attention = block.layer[1].EncDecAttention
            for buffer, project in ((keys, attention.k), (values, attention.v)):
                new = project(source).view(len(prompts), width, -1, size)
                buffer.store(rows, slice(0, width), new.transpose(1, 2))

    def _add_sources(self, prompts: Sequence[Sequence[int]]) -> None:
        for row, prompt in enumerate(prompts, start=len(self.sources)):
            self._source_mask[row, : len(prompt)] = 0.0
            self._source_mask[row, len(prompt) :] = -torch.inf
            self.sources.append(len(prompt))
        self._source_windows = []

    def step(self, tokens: Tensor) -> Tensor:
        """One token of every row through the decoder."""
        windows = self._biased(self.cache.begin())
        over_source, live = self._windows_over_source(), len(self.sources)
        hidden = self.decoder.embed_tokens(tokens)
        size = self.core.config.d_kv
        for number, block in enumerate(self.decoder.block):
            hidden = self.cache.near(number, hidden)
            layer = block.layer[0]
            attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
            query, key, value = (
                project(normed).view(live, -1, size)
                for project in (attention.q, attention.k, attention.v)
            )
            # No 1/sqrt(d): T5's query initialiser carries it (Raffel et al. 2020).
            seen = self.cache.attend(number, query, key, value, windows=windows, scale=1.0)
            hidden = hidden + attention.o(seen)

            layer = block.layer[1]
            attention = layer.EncDecAttention
            query = attention.q(layer.layer_norm(hidden)).view(live, -1, size)
            if query.device != self.core.device:
                over_source = windows_on(query.device, over_source)
            keys, values = (buffer.data for buffer in self._cross[number])
            hidden = hidden + attention.o(windowed_attention(over_source, query, keys, values, 1.0))

            hidden = block.layer[2](hidden)
        self.cache.advance()
        return scale_decoder_outputs(self.core, self.decoder.final_layer_norm(hidden))

    def _biased(self, windows: Sequence[Window]) -> list[Window]:
        """The windows with T5's relative position bias in their masks, [1 or rows, H, 1, K]."""
        widest = max(part.columns.stop - part.masked.start for part in windows)
        if self._position_bias.shape[-1] < widest:
            # [1, H, 1, columns]: bias of the newest position to each (Raffel et al. 2020, 2.1).
            attention = self.decoder.block[0].layer[0].SelfAttention
            columns = widest + 256
            bias = attention.compute_bias(1, columns, past_seen_tokens=columns - 1)
            # A CPU adds it to float32 scores; SDPA wants the keys' precision.
            self._position_bias = bias if bias.device.type == "cpu" else bias.to(self.dtype)
        biased = []
        for part in windows:
            bias = self._position_bias[..., part.masked.start - part.columns.stop :]
            if part.masked.stop > part.columns.stop:  # masked: whatever is added there
                bias = functional.pad(bias, (0, part.masked.stop - part.columns.stop))
            mask = bias if part.mask is None else bias + part.mask
            biased.append(replace(part, mask=mask))
        return biased

    def _windows_over_source(self) -> list[Window]:
        """Windows of the cross-attention, over the sources."""
        if not self._source_windows:
            device, gathers = self.core.device, self.gathers
            for part in length_groups(self.sources, device, gathers=gathers):
                columns = slice(0, part.columns)
                if gathers:
                    used = [slice(0, length) for length in self.sources[part.rows]]
                    window = gathered_window(part.rows, columns, used, self._source_mask)
                else:
                    masked = self._source_mask[part.rows, None, None, columns]
                    window = Window(part.rows, columns, None if part.even else masked)
                self._source_windows.append(window)
        return self._source_windows

    def drop(self, row: int) -> None:
        """Free a row; the last live one takes its number."""
        self.cache.drop(row)
        last = len(self.sources) - 1
        if row != last:
            for pair in self._cross:
                for buffer in pair:
                    buffer.copy_row(row, last, slice(0, self.sources[last]))
            self._source_mask[row] = self._source_mask[last]
            self.sources[row] = self.sources[last]
        self.sources.pop()
        self._source_windows = []
