"""The forward of packed rows by attention kernels that need no mask of every pair of positions."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from toque.batch import DecoderBatch, EncoderDecoderBatch
from toque.models.forward import flex_attention
from toque.models.forward.attention_plan import (
    Kernel,
    KernelPlan,
    Runs,
    decoder_plan,
    encoder_decoder_plans,
)
from toque.models.forward.unpadded import decoder_rows, t5_rows
from toque.models.forward.varlen_attention import as_attended, attending_by

NAME: Final = "toque_kernels"
"""Name of this attention in transformers' registry."""


def decoder_hidden(core: PreTrainedModel, batch: DecoderBatch, kernel: Kernel) -> Tensor:
    """The last hidden states [R, L, D] of a decoder-only model."""
    with attending_by(core, NAME, _attend):
        return decoder_rows(core, batch.tokens, batch.positions, decoder_plan(batch, kernel))


def encoder_decoder_hidden(core: PreTrainedModel, batch: EncoderDecoderBatch) -> Tensor:
    """The decoder's last hidden states [R, T, D] of a T5, before any scaling for the head."""
    source, target = batch.source_tokens, batch.target_tokens
    longest = source.shape[1], target.shape[1]
    with attending_by(core, NAME, _attend):
        return t5_rows(core, source, target, encoder_decoder_plans(batch), longest=longest)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    plan: KernelPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, T, d] each, to [R, T, H, d]."""
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(plan.own, Runs):
        rows, heads, length, size = query.shape
        q, k, v = (t.transpose(1, 2).reshape(-1, heads, size) for t in (query, key, value))
        output = flash_attention(
            q, k, v, plan.own, causal=bool(module.is_causal), scale=scale, dropout=dropout
        )
        return output.view(rows, length, heads, size), None
    # T5 passes its cross-attention a bias of zeros.
    across = getattr(module, "is_decoder", False) and not module.is_causal
    mask = plan.across if across and plan.across is not None else plan.own
    bias = None if mask is plan.across else position_bias
    output = flex_attention.attend(query, key, value, mask, bias=bias, scale=scale, dropout=dropout)
    return output.transpose(1, 2), None


DTYPES = (torch.bfloat16, torch.float16)
"""Precisions that the kernel computes in."""
LARGEST_HEAD = 256
"""Largest head that it takes; heads are multiples of 8."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale * q @ k.T) @ v within each run; all [tokens, heads, d].

    On a CPU, where there is no such kernel, one run after the other: the same numbers, for tests.
    """
    ends, longest = runs.ends, runs.longest
    if query.device.type == "cpu":
        return _one_by_one(query, key, value, ends, causal=causal, scale=scale, dropout=dropout)
    output: Tensor = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        query, key, value, ends, ends, longest, longest, dropout, causal, False, scale=scale
    )[0]
    return output


def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    lengths = ends.diff().tolist()
    found = []
    for parts in zip(*(torch.split(t, lengths) for t in (query, key, value)), strict=True):
        if len(parts[0]) > 0:
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            one = functional.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=True
            )
            found.append(one[0].transpose(0, 1))
    return torch.cat(found)
