"""Decoding of decoder-only models with a KV cache.

Models compute their own forward, with an attention that uses our cache (`_attend`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from toque.models.forward.packed import decoder_rows
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
    padded,
    prefilled_together,
)


class CausalDecoding:
    """Live rows. Prefill reads a prompt without its last token, which the first step reads.

    `columns` is the final length of the longest row, with its prompt.
    """

    def __init__(
        self, core: PreTrainedModel, *, rows: int, columns: int, pad_id: int
    ) -> None:
        self.core, self.pad_id = core, pad_id
        self._configs = configs_of(core)
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
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(
            tokens
        )
        with attending_by(self._configs, NAME, _Cached(self.cache, places)):
            decoder_rows(self.core, tokens, positions)

    def step(self, tokens: Tensor) -> Tensor:
        """Compute one step: a token of every live row [n] to the output head's input [n, D]."""
        plan = _Cached(self.cache, windows=self.cache.begin())
        positions = torch.tensor(self.positions, device=tokens.device)
        with attending_by(self._configs, NAME, plan):
            hidden = decoder_rows(self.core, tokens[:, None], positions[:, None])
        self.cache.end += 1
        self.positions = [position + 1 for position in self.positions]
        return hidden[:, 0]

    def drop(self, row: int) -> None:
        """Remove a row. The last live row gets its number."""
        self.cache.drop(row)
        self.positions[row] = self.positions[-1]
        self.positions.pop()


NAME: Final = "toque_cached"  # name of the attention below in transformers' registry


@dataclass(frozen=True)
class _Cached:
    """Attention plan with a cache: for new prompts, or for one token per row."""

    cache: KVCache
    places: Sequence[tuple[int, slice]] = ()  # rows and columns of new prompts
    windows: Sequence[AttentionWindow] = ()  # columns that one token per row attends to


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
        windows = plan.windows
        if sliding_window or softcap:
            windows = [window.near(sliding_window, softcap) for window in windows]
        output = plan.cache.attend(layer, query[:, :, 0], windows=windows, scale=scale)
        return output.view(len(output), 1, query.shape[1], -1), None
    plan.cache.store(layer, plan.places, key, value)
    query, key, value = as_attended(query, key, value)
    output = attend_causally(
        query, key, value, window=sliding_window, scale=scale, softcap=softcap
    )
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, _attend)
