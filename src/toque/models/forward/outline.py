"""Outlined forward: a training update's tensors by their shapes alone, for a model of no memory.

Under `FakeTensorMode` a tensor has no content, so which tokens belong together is said beforehand.
On a GPU attention keeps its inputs, its output and a number for each query (Dao et al. 2022, arXiv
2205.14135): `_KernelAttention`'s shapes. On a CPU the layers are those that train.

Letters: R rows, L tokens of a row, N = R * L, D hidden size, H heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel

from toque.models.families import family_of
from toque.models.forward import varlen_attention as varlen
from toque.models.forward.grouped_attention import AttentionPlan, Example
from toque.models.forward.packed import decoder_rows, scale_decoder_outputs, t5_rows
from toque.models.forward.varlen_attention import as_attended, attending_by, configs_of

NAME: Final = "toque_outline"  # name of the GPU's attention in transformers' registry
Where = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class OutlinedRows:
    """Rows that are filled to the last token."""

    rows: int
    source: int  # tokens of a row's source side; 0 for a decoder-only model
    target: int  # tokens of its target side, or of the row
    examples: int = 1  # examples that share a row, of equal length

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return self.rows * (self.source + self.target)


def cpu_plans(rows: OutlinedRows) -> tuple[AttentionPlan, AttentionPlan]:
    """Plans of a T5's encoder and of the decoder, grouped at once, outside of `FakeTensorMode`."""
    targets = _equal(rows.rows * rows.target, rows.rows * rows.examples)
    sources = _equal(rows.rows * rows.source, rows.rows * rows.examples)
    across = [(*own[:2], *read[:2]) for own, read in zip(targets, sources, strict=True)]
    encoder = AttentionPlan(sources)
    decoder = AttentionPlan(targets, across if rows.source else None)
    _ = (decoder.causal_groups, decoder.groups)
    if rows.source:
        _ = (decoder.across_groups, encoder.groups)
    return encoder, decoder


def outlined_hidden(
    model: PreTrainedModel,
    rows: OutlinedRows,
    where: Where,
    plans: tuple[AttentionPlan, AttentionPlan],
    *,
    masked: bool = False,
) -> Tensor:
    """The output head's input [1, N, D] (CPU) or [R, L, D], with dense masks if `masked`."""
    read: object
    write: object
    if where == "cpu":
        name, shape = varlen.NAME, (1, rows.rows)
        read, write = plans
        longest = plans[0].longest, plans[1].longest
    else:
        name, shape = NAME, (rows.rows, 1)
        longest = rows.source, rows.target
        masks = (torch.ones(rows.rows, 1, n, n, dtype=torch.bool) for n in longest if masked)
        read, write = masks if masked else (None, None)
    written = torch.zeros(shape[0], shape[1] * rows.target, dtype=torch.int64)
    with attending_by(configs_of(model), name):
        if not family_of(model.config).is_encoder_decoder:
            return decoder_rows(model, written, written, write)
        source = torch.zeros(shape[0], shape[1] * rows.source, dtype=torch.int64)
        hidden = t5_rows(model, source, written, (read, write), longest=longest)
        return scale_decoder_outputs(model, hidden)


def _equal(tokens: int, examples: int) -> list[Example]:
    """`tokens` as `examples` that stand one after the other, as equal as can be."""
    edges = [i * tokens // examples for i in range(examples + 1)]
    return [(start, end - start, start, end - start) for start, end in pairwise(edges)]


def _attend(
    _module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    plan: Tensor | None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, L, d] each, to [R, L, H, d]."""
    query, key, value = as_attended(query, key, value)
    mask = plan if position_bias is None else position_bias
    if plan is not None and position_bias is not None:
        # As transformers' sdpa does: bias and mask become one tensor of every layer. A kernel adds
        # the bias to the scores as it is, one for all rows and layers.
        whole = (len(query), query.shape[1], query.shape[2], key.shape[2])
        bias = position_bias if position_bias.numel() else value.new_zeros(1, 1, 1, 1)
        mask = bias.to(value.dtype).expand(whole).contiguous()
    output: Tensor = _KernelAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attend)


class _KernelAttention(torch.autograd.Function):
    """Tensors that a fused kernel keeps for backward, and the gradients it makes."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        output = torch.empty_like(query)
        of_queries = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, of_queries)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors[:4]
        slope = torch.empty_like(mask) if mask is not None and ctx.needs_input_grad[3] else None
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), slope
