"""Decoding of decoder-only models with a KV cache.

Models compute their own forward, with an attention that uses our cache (`_attend`). For single
tokens, most of the time is spent on dispatch. The decoding step of GPT-2, GPT-NeoX and Llama-shaped
models is therefore ours. Its products are the model's own modules, so that a LoRA adapter works as
in training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

from toque.models.families import family_of
from toque.models.forward.packed import decoder_rows
from toque.models.forward.varlen_attention import (
    as_attended,
    attend_causally,
    attending_by,
    configs_of,
    planned,
)
from toque.models.generation.kv_cache import AttentionWindow, KVCache, padded, prefilled_together


class CausalDecoding:
    """Live rows. Prefill reads a prompt without its last token, which the first step reads.

    `columns` is the final length of the longest row, with its prompt.
    """

    def __init__(self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int) -> None:
        self.core, self.pad_id = core, pad_id
        self._forward = _STEPS[family_of(core.config).name]
        self.cache = KVCache.of_model(core, rows=rows, columns=columns)
        self.positions: list[int] = []

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Prefill new rows after the live ones. Return the first token of each row's step."""
        places = self.cache.admit([len(prompt) - 1 for prompt in prompts])
        read = [prompt[:-1] for prompt in prompts]
        for part in prefilled_together(read, self.core.device):
            self._prefill(read[part], places[part])
        self.positions += [len(prompt) - 1 for prompt in prompts]
        return [prompt[-1] for prompt in prompts]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], places: Sequence[tuple[int, slice]]
    ) -> None:
        if not any(prompts):
            return
        # Padding is on the right, where causality hides it: the fused kernels need no mask.
        tokens = padded(prompts, self.pad_id, self.core.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with attending_by(configs_of(self.core), NAME, _Cached(self.cache, places)):
            decoder_rows(self.core, tokens, positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Compute one step: a token of every live row [n] to the output head's input [n, D]."""
        windows = self.cache.begin()
        positions = torch.tensor(self.positions, device=tokens.device)
        hidden = self._forward(self.core, self.cache, tokens, positions, windows)
        self.cache.end += 1
        self.positions = [position + 1 for position in self.positions]
        return hidden

    def drop(self, row: int) -> None:
        """Remove a row. The last live row gets its number."""
        self.cache.drop(row)
        self.positions[row] = self.positions[-1]
        self.positions.pop()


Windows = Sequence[AttentionWindow]
Step = Callable[[PreTrainedModel, KVCache, Tensor, Tensor, Windows], Tensor]
"""(model, cache, tokens [n], positions [n], windows) -> hidden states [n, D]."""


def _gpt2(
    core: PreTrainedModel, cache: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """Compute GPT2Model.forward for one token per row."""
    base: Any = core.base_model
    hidden = base.wte(tokens) + base.wpe(positions)
    for number, block in enumerate(base.h):
        hidden = hidden.to(cache.devices[number])
        attention = block.attn
        joint = attention.c_attn(block.ln_1(hidden))
        query, key, value = joint.view(len(joint), 3, -1, attention.head_dim).unbind(1)
        cache.append(number, key, value)
        seen = cache.attend(number, query, windows=windows, scale=attention.scaling)
        hidden = hidden + attention.c_proj(seen)
        hidden = hidden + block.mlp(block.ln_2(hidden))
    return cast("Tensor", base.ln_f(hidden))


def _neox(
    core: PreTrainedModel, cache: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """Compute GPTNeoXModel.forward for one token per row."""
    base: Any = core.base_model
    hidden = base.embed_in(tokens)
    cosine, sine = _rotation(base, hidden, positions)
    for number, layer in enumerate(base.layers):
        hidden = hidden.to(cache.devices[number])
        attention = layer.attention
        joint = attention.query_key_value(layer.input_layernorm(hidden))
        split = joint.view(len(joint), -1, 3 * attention.head_size)
        query, key, value = split.chunk(3, dim=-1)
        query, key = _rotated(query, key, cosine, sine)
        cache.append(number, key, value)
        seen = cache.attend(number, query, windows=windows, scale=attention.scaling)
        attended = attention.dense(seen)
        if layer.use_parallel_residual:
            hidden = layer.mlp(layer.post_attention_layernorm(hidden)) + attended + hidden
        else:
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return cast("Tensor", base.final_layer_norm(hidden))


def _llama(
    core: PreTrainedModel, cache: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """Compute LlamaModel.forward for one token per row, also for Mistral and Qwen."""
    base: Any = core.base_model
    hidden = base.embed_tokens(tokens)
    cosine, sine = _rotation(base, hidden, positions)
    for number, layer in enumerate(base.layers):
        hidden = hidden.to(cache.devices[number])
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        shape = (len(normed), -1, attention.head_dim)
        query = attention.q_proj(normed).view(shape)
        key = attention.k_proj(normed).view(shape)
        value = attention.v_proj(normed).view(shape)
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = _rotated(query, key, cosine, sine)
        cache.append(number, key, value)
        seen = cache.attend(number, query, windows=windows, scale=attention.scaling)
        hidden = hidden + attention.o_proj(seen)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return cast("Tensor", base.norm(hidden))


def _causal(
    core: PreTrainedModel, cache: KVCache, tokens: Tensor, positions: Tensor, windows: Windows
) -> Tensor:
    """Compute any model's own forward for one token per row."""
    with attending_by(configs_of(core), NAME, _Cached(cache, windows=windows)):
        hidden = decoder_rows(core, tokens[:, None], positions[:, None])
    return hidden[:, 0]


_STEPS: dict[str, Step] = {"gpt2": _gpt2, "neox": _neox, "llama": _llama, "causal": _causal}
NAME: Final = "toque_cached"  # name of the attention below in transformers' registry


@dataclass(frozen=True)
class _Cached:
    """Attention plan with a cache: for new prompts, or for one token per row."""

    cache: KVCache
    places: Sequence[tuple[int, slice]] = ()  # rows and columns of new prompts
    windows: Windows = ()  # columns that one token per row attends to


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None = None,
    *,
    plan: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers, to [n, 1, H, d] or [prompts, P, H, d]."""
    plan = planned(plan, more)
    layer, scale = cast("int", module.layer_idx), scaling or query.shape[-1] ** -0.5
    if plan.windows:
        plan.cache.append(layer, key[:, :, 0], value[:, :, 0])
        near = [window.near(sliding_window, softcap) for window in plan.windows]
        output = plan.cache.attend(layer, query[:, :, 0], windows=near, scale=scale)
        return output.view(len(output), 1, query.shape[1], -1), None
    plan.cache.store(layer, plan.places, key, value)
    query, key, value = as_attended(query, key, value)
    output = attend_causally(query, key, value, window=sliding_window, scale=scale, softcap=softcap)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, _attend)


def _rotation(base: Any, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return RoPE's cosines and sines for the position of every row, [n, rotated] each."""
    cosine, sine = base.rotary_emb(hidden[:, None], positions[:, None])
    return cosine[:, 0], sine[:, 0]


def _rotated(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Apply RoPE (Su et al. 2021, eq. 34) to the first columns of every head; in Llama to all."""
    angles = cosine.to(query.device), sine.to(query.device)
    rotated: tuple[Tensor, Tensor] = apply_rotary_pos_emb(query, key, *angles)  # type: ignore[no-untyped-call]
    return rotated
