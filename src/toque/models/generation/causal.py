"""Decoding of decoder-only models with a KV cache.

A model runs its own forward pass, with an attention function that uses our cache (`_attend`). For
the letters in shapes see `kv_cache.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from toque.models.forward.packed import decoder_hidden_states
from toque.models.forward.varlen_attention import (
    as_attended,
    attend_causally,
    attending_by,
    configs_of,
    planned,
)
from toque.models.generation.kv_cache import (
    AttentionWindow,
    KVCache,
    pad_prompts,
    prefill_groups,
)
from toque.models.generation.prefixes import (
    MIN_TOKENS,
    Prefix,
    PrefixCache,
    attend_after,
)
from toque.models.onnx.row_program import RowProgram

NAME: Final = "toque_cached"  # name of this attention in transformers' registry


class CausalDecoding:
    """Decoding steps of live rows.

    Prefill reads a prompt without its last token, which the first step reads. `columns` is the
    final length of the longest row, including its prompt.
    """

    def __init__(
        self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int
    ) -> None:
        self.core = core
        self.pad_id = pad_id
        self._configs = configs_of(core)
        self.cache = KVCache.of_model(core, rows=rows, columns=columns)
        self.positions: list[int] = []
        """Position of each row's next token."""
        self.prefixes: PrefixCache | None = None
        """Finished rows, for prompts with the same beginning."""

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Prefill new rows after the live ones. Return the first token of each row's step."""
        lengths = [len(prompt) - 1 for prompt in prompts]
        places = self.cache.admit(lengths)
        new: list[tuple[Sequence[int], tuple[int, slice]]] = []
        for prompt, place in zip(prompts, places, strict=True):
            known = None if self.prefixes is None else self.prefixes.find(prompt)
            if known is None:
                new.append((prompt[:-1], place))
            else:
                self._prefill_after(known, prompt[:-1], place)
        starts = [start for start, _ in new]
        for group in prefill_groups(starts, self.core.device):
            self._prefill(starts[group], [place for _, place in new[group]])
        self.positions += lengths
        return [prompt[-1] for prompt in prompts]

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Store the keys and values of a row's tokens, for prompts that begin with them."""
        if self.prefixes is not None and len(tokens) >= MIN_TOKENS:
            self.prefixes.add(tokens, self.cache.read_row(row))

    def _prefill_after(
        self, known: Prefix, prompt: Sequence[int], place: tuple[int, slice]
    ) -> None:
        """Compute the keys and values of a prompt after its known prefix, and store all of them."""
        device = self.core.device
        tokens = torch.tensor([prompt[known.length :]], device=device)
        positions = torch.arange(known.length, len(prompt), device=device)[None]
        plan = _CachedAttention(self.cache, [place], known=known)
        with attending_by(self._configs, NAME, plan):
            decoder_hidden_states(self.core, tokens, positions)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], places: Sequence[tuple[int, slice]]
    ) -> None:
        """Compute the keys and values of prompts, and store them at places of the cache."""
        if not any(prompts):  # prompts of one token, which the first step reads
            return
        # Padding is on the right, where causality hides it: the fused kernels need no mask.
        tokens = pad_prompts(prompts, self.pad_id, self.core.device)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        positions = positions.expand_as(tokens)
        plan = _CachedAttention(self.cache, places)
        with attending_by(self._configs, NAME, plan):
            decoder_hidden_states(self.core, tokens, positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Compute one step: a token of every live row [n] to the output head's input [n, D]."""
        plan = _CachedAttention(self.cache, windows=self.cache.begin())
        positions = torch.tensor(self.positions, device=tokens.device)
        with attending_by(self._configs, NAME, plan):
            hidden = decoder_hidden_states(
                self.core, tokens[:, None], positions[:, None]
            )
        self.cache.end += 1
        self.positions = [position + 1 for position in self.positions]
        return hidden[:, 0]

    def begin_alone(self, program: RowProgram) -> None:
        """Copy the cache of the only live row into a program."""
        program.begin(self.cache.read_row(0))

    def step_alone(self, token: int, program: RowProgram) -> Tensor:
        """Compute one step of the only live row, and return its logits [1, vocabulary]."""
        self.positions[0] += 1
        return program.step(token)

    def end_alone(self, program: RowProgram) -> None:
        """Copy the cache of a program into the only live row."""
        self.cache.replace_row(program.states())

    def drop(self, row: int) -> None:
        """Remove a row. The last live row takes its index."""
        self.cache.drop(row)
        self.positions[row] = self.positions[-1]
        self.positions.pop()


@dataclass(frozen=True)
class _CachedAttention:
    """Attention plan with a cache: for new prompts, or for one token per row."""

    cache: KVCache
    places: Sequence[tuple[int, slice]] = ()
    """Cache row and columns of each new prompt."""
    windows: Sequence[AttentionWindow] = ()
    """Columns to which the token of each row attends. Empty for new prompts."""
    known: Prefix | None = None
    """Beginning of a single new prompt, which is not computed again."""


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
    """Attention function for transformers: [n, H, 1, d] to [n, 1, H, d], or prompts of length P."""
    plan = planned(plan, more)
    layer = cast("int", module.layer_idx)
    scale = scaling or query.shape[-1] ** -0.5
    if plan.known is not None:
        known_keys, known_values = plan.known.states[layer]
        key = _joined(known_keys[:, : plan.known.length], key)
        value = _joined(known_values[:, : plan.known.length], value)
        plan.cache.store(layer, plan.places, key, value)
        query, key, value = as_attended(query, key, value)
        output = attend_after(query, key, value, scale=scale)
        return output.transpose(1, 2), None

    if not plan.windows:
        plan.cache.store(layer, plan.places, key, value)
        query, key, value = as_attended(query, key, value)
        output = attend_causally(
            query, key, value, window=sliding_window, scale=scale, softcap=softcap
        )
        return output.transpose(1, 2), None

    plan.cache.append(layer, key[:, :, 0], value[:, :, 0])
    windows = plan.windows
    if sliding_window or softcap:
        windows = [window.narrow(sliding_window, softcap) for window in windows]
    output = plan.cache.attend(layer, query[:, :, 0], windows=windows, scale=scale)
    return output.view(len(output), 1, query.shape[1], -1), None


def _joined(known: Tensor, new: Tensor) -> Tensor:
    """Join stored keys or values [H, tokens, d] with new ones [1, H, S, d]."""
    return torch.cat([known.to(new.dtype)[None], new], dim=2)


AttentionInterface.register(NAME, _attend)
