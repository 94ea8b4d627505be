"""Decoding of T5 with a KV cache. Sources are encoded once.

For the letters in shapes see `kv_cache.py`.
"""

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
    pad_prompts,
    prefill_groups,
)
from toque.models.onnx.row_program import RowProgram

_SPARE_BIAS_COLUMNS = 256
"""Number of spare columns in a position bias, so that few steps need to compute it again."""


def encode(
    core: PreTrainedModel, prompts: Sequence[Sequence[int]], pad_id: int
) -> tuple[Tensor, Tensor]:
    """Encode prompts with a T5's encoder.

    Returns:
        The last hidden states [n, P, D], and whether a position has a token [n, P].
    """
    tokens = pad_prompts(prompts, pad_id, core.device)
    width = tokens.shape[1]
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
    is_token = torch.arange(width, device=tokens.device) < lengths[:, None]
    mask = is_token[:, None, None, :].expand(-1, -1, width, -1)
    encoder = core.get_submodule("encoder")
    states: Tensor = encoder(input_ids=tokens, attention_mask=mask).last_hidden_state
    return states, is_token


class T5Decoding:
    """Decoding steps of live rows.

    Prefill encodes the sources, and computes their keys and values for every layer. `columns` is
    the length of the longest answer. Answers start with the model's own start token, or with
    `pad_id` if the model does not have one.
    """

    def __init__(
        self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int
    ) -> None:
        self.core = core
        self.pad_id = pad_id
        start = core.config.decoder_start_token_id
        self.start = pad_id if start is None else int(start)
        self.decoder: Any = core.get_submodule("decoder")
        self.cache = KVCache.of_model(core, rows=rows, columns=columns)
        # Keys and values of the cross-attention.
        self.sources = KVCache.of_model(core, rows=rows)
        # Empty after the rows change.
        self._source_windows: list[AttentionWindow] = []
        # Bias of each layer that has one, [1, H, 1, columns]. The newest position is the last.
        self._position_bias: dict[int, Tensor] = {}

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Encode the prompts of new rows after the live ones. Return their start tokens."""
        places = self.sources.admit([len(prompt) for prompt in prompts])
        for group in prefill_groups(prompts, self.core.device):
            self._prefill(prompts[group], places[group])
        self.cache.admit([0 for _ in prompts])
        self._source_windows = []
        return [self.start for _ in prompts]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], places: Sequence[tuple[int, slice]]
    ) -> None:
        """Encode prompts, and store the keys and values of the cross-attention."""
        source, is_token = encode(self.core, prompts, self.pad_id)
        rows, width = is_token.shape
        head_size = self.core.config.d_kv
        for number, block in enumerate(self.decoder.block):
            attention = block.layer[1].EncDecAttention
            keys = attention.k(source).view(rows, width, -1, head_size)
            values = attention.v(source).view(rows, width, -1, head_size)
            self.sources.store(
                number, places, keys.transpose(1, 2), values.transpose(1, 2)
            )

    def step(self, tokens: Tensor) -> Tensor:
        """Compute one step: a token of every live row [n] to the output head's input [n, D]."""
        plain_windows = windows = self.cache.begin()
        if not self._source_windows:
            self._source_windows = self.sources.windows(self.sources.end)
        hidden = self.decoder.embed_tokens(tokens)
        for number, block in enumerate(self.decoder.block):
            hidden = hidden.to(self.cache.devices[number])
            self_attention, cross_attention, feed_forward = block.layer
            attention = self_attention.SelfAttention
            if attention.has_relative_attention_bias:  # in T5 only the first layer
                windows = self._add_position_bias(plain_windows, number, attention)
            hidden = self._attend_to_answer(number, self_attention, hidden, windows)
            hidden = self._attend_to_source(number, cross_attention, hidden)
            hidden = feed_forward(hidden)
        self.cache.end += 1
        return scale_outputs(self.core, self.decoder.final_layer_norm(hidden))

    def begin_alone(self, program: RowProgram) -> None:
        """Copy the caches of the only live row into a program."""
        program.begin(self.cache.read_row(0), self.sources.read_row(0))

    def step_alone(self, token: int, program: RowProgram) -> Tensor:
        """Compute one step of the only live row, and return its logits [1, vocabulary]."""
        return program.step(token)

    def end_alone(self, program: RowProgram) -> None:
        """Copy the cache of a program into the only live row."""
        self.cache.replace_row(program.states())

    def _attend_to_answer(
        self,
        layer: int,
        block_layer: Any,
        hidden: Tensor,
        windows: Sequence[AttentionWindow],
    ) -> Tensor:
        """Apply a layer's self-attention to hidden states [n, D], with the residual."""
        attention = block_layer.SelfAttention
        shape = (len(hidden), -1, self.core.config.d_kv)
        normed = block_layer.layer_norm(hidden)
        query = attention.q(normed).view(shape)
        key = attention.k(normed).view(shape)
        value = attention.v(normed).view(shape)
        self.cache.append(layer, key, value)
        # No 1/sqrt(d), because T5's query initialiser includes it (Raffel et al. 2020).
        output = self.cache.attend(layer, query, windows=windows, scale=1.0)
        update: Tensor = attention.o(output)
        return hidden + update

    def _attend_to_source(self, layer: int, block_layer: Any, hidden: Tensor) -> Tensor:
        """Apply a layer's cross-attention to hidden states [n, D], with the residual."""
        attention = block_layer.EncDecAttention
        shape = (len(hidden), -1, self.core.config.d_kv)
        query = attention.q(block_layer.layer_norm(hidden)).view(shape)
        output = self.sources.attend(
            layer, query, windows=self._source_windows, scale=1.0
        )
        update: Tensor = attention.o(output)
        return hidden + update

    def _add_position_bias(
        self, windows: Sequence[AttentionWindow], layer: int, attention: Any
    ) -> list[AttentionWindow]:
        """Add T5's relative position bias to the windows' masks, [1 or rows, H, 1, K]."""
        widest = max(part.columns.stop - part.mask_columns.start for part in windows)
        position_bias = self._position_bias_of(layer, attention, widest)
        biased = []
        for part in windows:
            columns = part.mask_columns
            bias = position_bias[..., columns.start - part.columns.stop :]
            n_after = columns.stop - part.columns.stop
            if n_after > 0:  # later columns of a tile, which the mask hides
                bias = functional.pad(bias, (0, n_after))
            mask = bias if part.mask is None else bias + part.mask
            biased.append(replace(part, mask=mask))
        return biased

    def _position_bias_of(self, layer: int, attention: Any, width: int) -> Tensor:
        """Return a layer's position bias for at least `width` columns. Compute it if necessary."""
        cached = self._position_bias.get(layer)
        if cached is not None and cached.shape[-1] >= width:
            return cached
        # Bias of the newest position for each column (Raffel et al. 2020, 2.1).
        columns = width + _SPARE_BIAS_COLUMNS
        bias: Tensor = attention.compute_bias(1, columns, past_seen_tokens=columns - 1)
        # A CPU adds it to float32 scores. SDPA needs the precision of the keys.
        if bias.device.type != "cpu":
            bias = bias.to(cache_dtype(self.core))
        self._position_bias[layer] = bias
        return bias

    def drop(self, row: int) -> None:
        """Remove a row. The last live row takes its index."""
        self.cache.drop(row)
        self.sources.drop(row)
        self._source_windows = []
