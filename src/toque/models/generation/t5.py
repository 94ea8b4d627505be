"""Decoding of T5 with a KV cache. Sources are encoded once. For letters see `kv_cache.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from toque.models.forward.packed import scale_outputs
from toque.models.generation.kv_cache import (
    AttentionWindow,
    KVCache,
    cache_dtype,
    padded,
    prefilled_together,
)


class T5Decoding:
    """Live rows. Prefill encodes the sources, and computes their keys and values for every layer.

    `columns` is the length of the longest answer. Answers start with the model's own start token,
    or with `pad_id` without one.
    """

    def __init__(
        self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int
    ) -> None:
        self.core, self.pad_id = core, pad_id
        start = core.config.decoder_start_token_id
        self.start = pad_id if start is None else int(start)
        self.decoder: Any = core.get_submodule("decoder")
        self.cache = KVCache.of_model(core, rows=rows, columns=columns)
        # Keys and values of the cross-attention.
        self.sources = KVCache.of_model(core, rows=rows)
        self._source_windows: list[
            AttentionWindow
        ] = []  # empty after a change of the rows
        self._position_bias: dict[
            int, Tensor
        ] = {}  # bias by layer, if the layer has one

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Encode the prompts of new rows after the live ones. Return their start tokens."""
        places = self.sources.admit([*map(len, prompts)])
        size, encoder = self.core.config.d_kv, self.core.get_submodule("encoder")
        for part in prefilled_together(prompts, self.core.device):
            tokens = padded(prompts[part], self.pad_id, self.core.device)
            lengths = torch.tensor([*map(len, prompts[part])], device=tokens.device)
            is_real = (
                torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
            )
            mask = is_real[:, None, None, :].expand(-1, -1, tokens.shape[1], -1)
            source = encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
            for number, block in enumerate(self.decoder.block):
                attention = block.layer[1].EncDecAttention
                keys, values = (
                    project(source).view(*tokens.shape, -1, size).transpose(1, 2)
                    for project in (attention.k, attention.v)
                )
                self.sources.store(number, places[part], keys, values)
        self.cache.admit([0] * len(prompts))
        self._source_windows = []
        return [self.start] * len(prompts)

    def step(self, tokens: Tensor) -> Tensor:
        """Compute one step: a token of every live row [n] to the output head's input [n, D]."""
        plain_windows = windows = self.cache.begin()
        if not self._source_windows:
            self._source_windows = self.sources.windows(self.sources.end)
        hidden = self.decoder.embed_tokens(tokens)
        shape = (len(tokens), -1, self.core.config.d_kv)
        for number, block in enumerate(self.decoder.block):
            hidden = hidden.to(self.cache.devices[number])
            layer = block.layer[0]
            attention, normed = layer.SelfAttention, layer.layer_norm(hidden)
            if attention.has_relative_attention_bias:  # in T5 only the first layer
                windows = self._biased(plain_windows, number, attention)
            query, key, value = (
                project(normed).view(shape)
                for project in (attention.q, attention.k, attention.v)
            )
            self.cache.append(number, key, value)
            # No 1/sqrt(d), because T5's query initialiser includes it (Raffel et al. 2020).
            output = self.cache.attend(number, query, windows=windows, scale=1.0)
            hidden = hidden + attention.o(output)

            layer = block.layer[1]
            attention = layer.EncDecAttention
            query = attention.q(layer.layer_norm(hidden)).view(shape)
            output = self.sources.attend(
                number, query, windows=self._source_windows, scale=1.0
            )
            hidden = hidden + attention.o(output)

            hidden = block.layer[2](hidden)
        self.cache.end += 1
        return scale_outputs(self.core, self.decoder.final_layer_norm(hidden))

    def _biased(
        self, windows: Sequence[AttentionWindow], layer: int, attention: Any
    ) -> list[AttentionWindow]:
        """Add T5's relative position bias to the windows' masks, [1 or rows, H, 1, K]."""
        widest = max(part.columns.stop - part.masked.start for part in windows)
        if (
            layer not in self._position_bias
            or self._position_bias[layer].shape[-1] < widest
        ):
            # [1, H, 1, columns]: bias of the newest position for each (Raffel et al. 2020, 2.1).
            columns = widest + 256
            bias = attention.compute_bias(1, columns, past_seen_tokens=columns - 1)
            # A CPU adds it to float32 scores. SDPA needs the precision of the keys.
            on_cpu = bias.device.type == "cpu"
            self._position_bias[layer] = (
                bias if on_cpu else bias.to(cache_dtype(self.core))
            )
        biased = []
        for part in windows:
            bias = self._position_bias[layer][
                ..., part.masked.start - part.columns.stop :
            ]
            if part.masked.stop > part.columns.stop:  # the mask hides these columns
                bias = functional.pad(bias, (0, part.masked.stop - part.columns.stop))
            biased.append(
                replace(part, mask=bias if part.mask is None else bias + part.mask)
            )
        return biased

    def drop(self, row: int) -> None:
        """Remove a row. The last live row gets its number."""
        self.cache.drop(row)
        self.sources.drop(row)
        self._source_windows = []
