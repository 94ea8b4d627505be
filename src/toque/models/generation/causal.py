"""One more token for every live row: what a decoder computes when its past is remembered.

Prompts are read by the stock forward, which is at its best with many tokens at once. For single
tokens its time goes into growing the cache (`torch.cat` copies all of it at every step), masks
and dispatch, so the walk through the layers is ours; every leaf (projection, norm, activation,
embedding) is the model's own module, whatever has replaced it: an adapter works as in training.

Letters: n live rows, D hidden size, H key-value heads, G query heads of one key-value head,
d head size, P longest prompt of a group, K columns of the window.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from toque.models.families import family_of
from toque.models.generation.kv_cache import KVCache, Window

READ_TOKENS = 4096
"""Prompt tokens, padding included, that are read at once; bounds the memory of reading."""


class Decoding(ABC):
    """The live rows of one model: prompts come in, each step reads one token a row."""

    @abstractmethod
    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Add rows after the live ones; returns the token each is to be stepped with first."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
        """Read one token of every live row [n]; what the head reads then, [n, D]."""

    @abstractmethod
    def drop(self, row: int) -> None:
        """Forget a row; the last live one takes its number."""


def decoding_for(core: PreTrainedModel, *, rows: int, columns: int, pad_id: int) -> Decoding:
    """The decoding of this model's family.

    Args:
        core: The model.
        rows: The most live rows.
        columns: Tokens that the longest row's decoder remembers in the end.
        pad_id: Fills the short prompts of a group.
    """
    name = family_of(core.config).name
    if name == "t5":
        from toque.models.generation.t5 import T5Decoding

        return T5Decoding(core, rows=rows, columns=columns, pad_id=pad_id)
    return CausalDecoding(core, _LAYERS[name], rows=rows, columns=columns, pad_id=pad_id)


def cache_dtype(core: PreTrainedModel) -> torch.dtype:
    """What keys and values are remembered in: the number format of the products."""
    kind = core.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else core.dtype


def cache_shape(core: PreTrainedModel) -> tuple[int, int, int]:
    """Layers, key-value heads and head size of what a decoder remembers."""
    config = core.config
    if family_of(config).is_encoder_decoder:
        return config.num_decoder_layers, config.num_heads, config.d_kv
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, size


def groups(lengths: Sequence[int]) -> Iterator[slice]:
    """Consecutive prompts whose padded tokens are at most READ_TOKENS, at least one prompt."""
    start, longest = 0, 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > start and longest * (number + 1 - start) > READ_TOKENS:
            yield slice(start, number)
            start, longest = number, length
    if start < len(lengths):
        yield slice(start, len(lengths))


def padded(prompts: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> Tensor:
    """[prompts, longest]: each from the left edge, then padding."""
    width = max(map(len, prompts))
    rows = [list(prompt) + [pad_id] * (width - len(prompt)) for prompt in prompts]
    return torch.tensor(rows, device=device)


class CausalDecoding(Decoding):
    """GPT-2, GPT-NeoX and Llama-shaped models.

    A prompt is read up to its last token, which then is the first one to be stepped with.
    """

    def __init__(
        self, core: PreTrainedModel, walk: Walk, *, rows: int, columns: int, pad_id: int
    ) -> None:
        self.core, self.walk, self.pad_id = core, walk, pad_id
        shape, dtype = cache_shape(core), cache_dtype(core)
        self.slots = KVCache(shape, rows=rows, columns=columns, dtype=dtype, device=core.device)
        self.positions: list[int] = []

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Read all but the last token of each prompt."""
        places = self.slots.admit([len(prompt) - 1 for prompt in prompts])
        for part in groups([len(prompt) - 1 for prompt in prompts]):
            self._read([prompt[:-1] for prompt in prompts[part]], places[part])
        self.positions += [len(prompt) - 1 for prompt in prompts]
        return [prompt[-1] for prompt in prompts]

    def _read(self, prompts: Sequence[Sequence[int]], places: Sequence[tuple[int, slice]]) -> None:
        if not any(prompts):
            return
        cache = DynamicCache(config=self.core.config)
        # Padding stands on the right, where causality hides it: no mask, the fused kernels.
        # Embeddings instead of tokens: without a mask GPT-2 would look for padding among them.
        tokens = padded(prompts, self.pad_id, self.core.device)
        self.core.base_model(
            inputs_embeds=self.core.get_input_embeddings()(tokens),
            past_key_values=cache,
            use_cache=True,
        )
        for number, layer in enumerate(cast("list[DynamicLayer]", cache.layers)):
            for i, (row, columns) in enumerate(places):
                length = columns.stop - columns.start
                keys, values = cast("Tensor", layer.keys), cast("Tensor", layer.values)
                self.slots.remember(
                    number, row, columns, keys[i, :, :length], values[i, :, :length]
                )

    def step(self, tokens: Tensor) -> Tensor:
        """One walk through the layers."""
        windows = self.slots.begin()
        positions = torch.tensor(self.positions, device=tokens.device)
        hidden = self.walk(self.core, self.slots, tokens, positions, windows)
        self.slots.advance()
        self.positions = [position + 1 for position in self.positions]
        return hidden

    def drop(self, row: int) -> None:
        """See `Decoding.drop`."""
        self.slots.drop(row)
        self.positions[row] = self.positions[-1]
        self.positions.pop()


Windows = Sequence[Window]
Walk = Callable[[PreTrainedModel, KVCache, Tensor, Tensor, Windows], Tensor]
"""(model, slots, tokens [n], positions [n], windows) -> hidden states [n, D]."""


def gpt2(
    core: PreTrainedModel, slots: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """GPT2Model.forward for one token a row."""
    base: Any = core.base_model
    hidden = base.wte(tokens) + base.wpe(positions)
    for number, block in enumerate(base.h):
        attention = block.attn
        joint = attention.c_attn(block.ln_1(hidden))
        query, key, value = joint.view(len(joint), 3, -1, attention.head_dim).unbind(1)
        seen = slots.attend(number, query, key, value, windows=windows, scale=attention.scaling)
        hidden = hidden + attention.c_proj(seen)
        hidden = hidden + block.mlp(block.ln_2(hidden))
    return cast("Tensor", base.ln_f(hidden))


def neox(
    core: PreTrainedModel, slots: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """GPTNeoXModel.forward for one token a row."""
    base: Any = core.base_model
    hidden = base.embed_in(tokens)
    cosine, sine = _rotation(base, hidden, positions)
    for number, layer in enumerate(base.layers):
        attention = layer.attention
        joint = attention.query_key_value(layer.input_layernorm(hidden))
        split = joint.view(len(joint), -1, 3 * attention.head_size)
        query, key, value = split.chunk(3, dim=-1)
        query, key = _rotated(query, key, cosine, sine)
        seen = slots.attend(number, query, key, value, windows=windows, scale=attention.scaling)
        attended = attention.dense(seen)
        if layer.use_parallel_residual:
            hidden = layer.mlp(layer.post_attention_layernorm(hidden)) + attended + hidden
        else:
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return cast("Tensor", base.final_layer_norm(hidden))


def llama(
    core: PreTrainedModel, slots: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """LlamaModel.forward for one token a row; Mistral's and Qwen's, which norm heads, too."""
    base: Any = core.base_model
    hidden = base.embed_tokens(tokens)
    cosine, sine = _rotation(base, hidden, positions)
    for number, layer in enumerate(base.layers):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (len(normed), -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape)
        key = attention.k_proj(normed).view(shape)
        value = attention.v_proj(normed).view(shape)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = _rotated(query, key, cosine, sine)
        seen = slots.attend(number, query, key, value, windows=windows, scale=attention.scaling)
        hidden = hidden + attention.o_proj(seen)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return cast("Tensor", base.norm(hidden))


_LAYERS: dict[str, Walk] = {"gpt2": gpt2, "neox": neox, "llama": llama}


def _rotation(base: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every row's position, [n, rotated] each."""
    cosine, sine = base.rotary_emb(hidden[:, None], positions[:, None])
    return cosine[:, 0], sine[:, 0]


def _rotated(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary positions (Su et al. 2021) of the first columns of every head, the rest as it is.

    GPT-NeoX rotates a part of each head and Llama all of it; the function for the part does both.
    """
    turned: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, cosine, sine)  # type: ignore[no-untyped-call]
    return turned
