"""Outlined forward: a training update's tensors by their shapes alone, for a model of no memory.

Under `FakeTensorMode` a tensor has a shape and no content, so what depends on content must be said
beforehand: which tokens belong together. A packed forward otherwise reads it from the segments.
On a GPU attention keeps its inputs, its output and a number for each query (Dao et al. 2022, arXiv
2205.14135); `_KernelAttention` has these shapes. On a CPU the layers are those that train.

Letters: R rows, L tokens of a row, N = R * L, D hidden size, H heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from toque.models.families import family_of
from toque.models.forward.packed import scale_decoder_outputs
from toque.models.forward.unpadded import decoder_rows, t5_rows
from toque.models.forward.varlen_attention import (
    AttentionPlan,
    Span,
    as_attended,
    attending_by,
    varlen_attention,
)

NAME: Final = "toque_outline"
"""Name of the GPU's attention in transformers' registry."""
Where = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class OutlinedRows:
    """Rows that are filled to the last token.

    Attributes:
        rows: R.
        source: tokens of a row's source side; 0 for a decoder-only model.
        target: tokens of its target side, or of the row.
        examples: that share a row, of equal length.
    """

    rows: int
    source: int
    target: int
    examples: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of both sides."""
        return self.rows * (self.source + self.target)


@dataclass(frozen=True)
class CpuPlans:
    """Plans of attention on a CPU: of a T5's encoder, and of the decoder."""

    encoder: AttentionPlan
    decoder: AttentionPlan

    @classmethod
    def of(cls, rows: OutlinedRows) -> CpuPlans:
        """Made of numbers, so outside of `FakeTensorMode`."""
        targets = _spans(rows.rows * rows.target, rows.rows * rows.examples)
        sources = _spans(rows.rows * rows.source, rows.rows * rows.examples)
        pairs = zip(targets, sources, strict=True)
        across = [(0, a, b, c, d) for (_, a, b, *_), (_, c, d, *_) in pairs]
        encoder = AttentionPlan(sources)
        decoder = AttentionPlan(targets, across if rows.source else None)
        # Grouped now: later there would be nothing to group by.
        _ = (decoder.causal_groups, decoder.groups)
        if rows.source:
            _ = (decoder.across_groups, encoder.groups)
        return cls(encoder, decoder)


def outlined_hidden(
    model: PreTrainedModel,
    rows: OutlinedRows,
    where: Where,
    plans: CpuPlans,
    *,
    masked: bool = False,
) -> Tensor:
    """The output head's input [1, N, D] (CPU) or [R, L, D]; call it under `FakeTensorMode`.

    Args:
        model: outlined.
        rows: of the micro-batch.
        where: the kind of device.
        plans: for a CPU.
        masked: on a GPU, dense masks keep examples apart; otherwise kernels that need none.
    """
    encoder = family_of(model.config).is_encoder_decoder
    if where == "cpu":
        return _on_cpu(model, rows, plans, encoder=encoder)
    with attending_by(model, NAME, _attend):
        return _on_gpu(model, rows, encoder=encoder, masked=masked)


def _on_cpu(
    model: PreTrainedModel, rows: OutlinedRows, plans: CpuPlans, *, encoder: bool
) -> Tensor:
    written = torch.zeros(1, rows.rows * rows.target, dtype=torch.int64)
    with varlen_attention(model):
        if not encoder:
            return decoder_rows(model, written, written, plans.decoder)
        read = torch.zeros(1, rows.rows * rows.source, dtype=torch.int64)
        both = plans.encoder, plans.decoder
        longest = plans.encoder.longest, plans.decoder.longest
        return scale_decoder_outputs(model, t5_rows(model, read, written, both, longest=longest))


def _on_gpu(model: PreTrainedModel, rows: OutlinedRows, *, encoder: bool, masked: bool) -> Tensor:
    written = torch.zeros(rows.rows, rows.target, dtype=torch.int64)

    def mask(queries: int, keys: int) -> Tensor | None:
        return torch.ones(rows.rows, 1, queries, keys, dtype=torch.bool) if masked else None

    if not encoder:
        hidden: Tensor = model.base_model(
            inputs_embeds=model.get_input_embeddings()(written),
            attention_mask=mask(rows.target, rows.target) if rows.examples > 1 else None,
            position_ids=written,
            use_cache=False,
        ).last_hidden_state
        return hidden
    read = torch.zeros(rows.rows, rows.source, dtype=torch.int64)
    inside, across = mask(rows.source, rows.source), mask(rows.target, rows.source)
    states = model.get_submodule("encoder")(input_ids=read, attention_mask=inside)
    hidden = model.get_submodule("decoder")(
        input_ids=written,
        attention_mask=mask(rows.target, rows.target),
        encoder_hidden_states=states.last_hidden_state,
        encoder_attention_mask=across,
        use_cache=False,
    ).last_hidden_state
    return scale_decoder_outputs(model, hidden)


def _spans(tokens: int, examples: int) -> list[Span]:
    """`tokens` as `examples` that stand one after the other, as equal as can be."""
    edges = [i * tokens // examples for i in range(examples + 1)]
    return [(0, a, b, a, b) for a, b in pairwise(edges)]


def _attend(
    _module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, L, d] each, to [R, L, H, d]."""
    bias = more.get("position_bias")
    query, key, value = as_attended(query, key, value)
    if bias is not None and mask is None:
        mask = bias  # a kernel adds it to the scores as it is, one for all rows and layers
    elif bias is not None:
        # As transformers' sdpa does: bias and mask become one tensor of every layer.
        whole = (len(query), query.shape[1], query.shape[2], key.shape[2])
        mask = bias.to(value.dtype).expand(whole).contiguous()
    output: Tensor = _KernelAttention.apply(query, key, value, mask)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2).contiguous(), None


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
