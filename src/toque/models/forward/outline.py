"""Outline of a training forward: tensors with shapes and no content, to predict its memory.

Under `FakeTensorMode` tensors have no content, so the division into examples is computed outside of
it. Outlined tensors are on the CPU, because gradients on a GPU need a GPU. `as_on_a_gpu` makes them
take the code paths of a GPU.

Letters: R rows, L tokens of a row, N = R * L, D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.models.families import family_of
from toque.models.forward import varlen_attention as varlen
from toque.models.forward.cpu_linear import AS_A_GPU
from toque.models.forward.flex_attention import kernel_shapes
from toque.models.forward.grouped_attention import AttentionPlan, Example
from toque.models.forward.keyed_dropout import masks_of
from toque.models.forward.packed import (
    decoder_hidden_states,
    scale_outputs,
    t5_hidden_states,
)
from toque.models.forward.varlen_attention import attending_by, configs_of

Where = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class OutlinedRows:
    """Sizes of full rows without padding."""

    rows: int
    source: int  # number of tokens on a row's source side; 0 for a decoder-only model
    target: int  # number of tokens on a row's target side, or in the whole row
    examples: int = 1  # number of examples of equal length in a row

    @property
    def tokens(self) -> int:
        """Total tokens of source and target."""
        return self.rows * (self.source + self.target)


def cpu_plans(rows: OutlinedRows) -> tuple[AttentionPlan, AttentionPlan]:
    """Build the attention plans of a T5's encoder and decoder. Call it outside `FakeTensorMode`."""
    examples = rows.rows * rows.examples
    targets = _equal_examples(rows.rows * rows.target, examples)
    sources = _equal_examples(rows.rows * rows.source, examples)
    # A decoder's queries are target tokens, and the keys of its cross-attention source tokens.
    cross_attention = [
        (*target[:2], *source[:2])
        for target, source in zip(targets, sources, strict=True)
    ]
    encoder = AttentionPlan(sources)
    decoder = AttentionPlan(targets, cross_attention if rows.source else None)

    # The groups are cached properties. They cannot be computed in `FakeTensorMode`.
    _ = (decoder.causal_groups, decoder.groups)
    if rows.source:
        _ = (decoder.cross_groups, encoder.groups)
    return encoder, decoder


def outlined_hidden(
    model: PreTrainedModel,
    rows: OutlinedRows,
    plans: tuple[AttentionPlan, AttentionPlan],
) -> Tensor:
    """Outline a training forward on a CPU. Return the input of the output head, [1, N, D]."""
    target = torch.zeros(1, rows.rows * rows.target, dtype=torch.int64)
    source = torch.zeros(1, rows.rows * rows.source, dtype=torch.int64)
    masks = masks_of(model)
    if masks is not None:
        masks.begin(source=source, target=target)
    encoder, decoder = plans
    with attending_by(configs_of(model), varlen.NAME, decoder):
        if not family_of(model.config).is_encoder_decoder:
            return decoder_hidden_states(model, target, target, decoder)
        longest = (encoder.longest, decoder.longest)
        hidden = t5_hidden_states(model, source, target, plans, longest=longest)
        return scale_outputs(model, hidden)


def outlined_batch(rows: OutlinedRows) -> Batch:
    """Build a micro-batch for a GPU, with a label for every target token."""

    def zeros(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(rows.rows, length, dtype=dtype)

    n = rows.target
    ids = (tuple(range(rows.examples)),) * rows.rows
    labelled = (n,) * rows.rows
    if not rows.source:
        return DecoderBatch(
            labels=zeros(n),
            example_ids=ids,
            tokens=zeros(n),
            segments=zeros(n, torch.int32),
            positions=zeros(n),
            labelled=labelled,
        )
    return EncoderDecoderBatch(
        labels=zeros(n),
        example_ids=ids,
        source_tokens=zeros(rows.source),
        source_segments=zeros(rows.source, torch.int32),
        target_tokens=zeros(n),
        target_segments=zeros(n, torch.int32),
        labelled=labelled,
    )


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Context in which tensors on the CPU take the code paths and the memory of a GPU."""
    before = AS_A_GPU.set(True)
    try:
        with _GpuOperators():
            yield
    finally:
        AS_A_GPU.reset(before)


class _GpuOperators(TorchFunctionMode):
    """Context that replaces operators with different memory on a GPU and a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Allocate the tensors that `func` would save and return on a GPU."""
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name == "scaled_dot_product_attention":
            return sdpa_shapes(*args, **kwargs)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    values: Tensor, p: float = 0.5, training: object = 1, *_: Any, **__: Any
) -> Tensor:
    """Save a byte per element for the backward pass, as on a GPU. A CPU saves factors instead."""
    if not training or p == 0.0:
        return values
    return torch.native_dropout(values, p, train=True)[0]


def sdpa_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Outline `F.scaled_dot_product_attention` on a GPU: the tensors that it saves and returns."""
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    # A boolean mask becomes zeros and minus infinity in the precision of the scores.
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    output: Tensor = kernel_shapes(query, key, value, bias=mask)
    return output


def _equal_examples(tokens: int, examples: int) -> list[Example]:
    """Divide `tokens` into consecutive examples with lengths that differ by at most one."""
    edges = [i * tokens // examples for i in range(examples + 1)]
    return [(start, end - start, start, end - start) for start, end in pairwise(edges)]
