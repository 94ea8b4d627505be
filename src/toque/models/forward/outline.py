"""Outlined forward: a training update's tensors by their shapes alone, for a model of no memory.

Under `FakeTensorMode` a tensor has no content, so which tokens belong together is said beforehand.
Tensors of the outline lie on a CPU, since no others can be differentiated where there is no GPU; a
GPU's outline runs the code of a run on a GPU all the same, `as_on_a_gpu`.

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
from toque.models.forward.packed import decoder_rows, scale_outputs, t5_rows
from toque.models.forward.varlen_attention import attending_by, configs_of

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
    model: PreTrainedModel, rows: OutlinedRows, plans: tuple[AttentionPlan, AttentionPlan]
) -> Tensor:
    """The output head's input [1, N, D] of a training on a CPU."""
    written = torch.zeros(1, rows.rows * rows.target, dtype=torch.int64)
    source = torch.zeros(1, rows.rows * rows.source, dtype=torch.int64)
    masks = masks_of(model)
    if masks is not None:
        masks.begin(source=source, target=written)
    with attending_by(configs_of(model), varlen.NAME, plans[1]):
        if not family_of(model.config).is_encoder_decoder:
            return decoder_rows(model, written, written, plans[1])
        longest = plans[0].longest, plans[1].longest
        return scale_outputs(model, t5_rows(model, source, written, plans, longest=longest))


def outlined_batch(rows: OutlinedRows) -> Batch:
    """The micro-batch as a run on a GPU computes it, with a loss on every token."""

    def filled(length: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.zeros(rows.rows, length, dtype=dtype)

    n, ids = rows.target, (tuple(range(rows.examples)),) * rows.rows
    known = (n,) * rows.rows
    if not rows.source:
        tensors = filled(n), filled(n, torch.int32), filled(n)
        return DecoderBatch(filled(n), ids, *tensors, labelled=known)
    read = filled(rows.source), filled(rows.source, torch.int32)
    return EncoderDecoderBatch(
        filled(n), ids, *read, filled(n), filled(n, torch.int32), labelled=known
    )


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """A context in which tensors of a CPU take the ways and the bytes of a GPU's."""
    before = AS_A_GPU.set(True)
    try:
        with _GpuOperators():
            yield
    finally:
        AS_A_GPU.reset(before)


class _GpuOperators(TorchFunctionMode):
    """Operators that take other bytes on a GPU than on the CPU whose tensors an outline has."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the tensors that `func` keeps and returns on a GPU."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "scaled_dot_product_attention":
            return sdpa_shapes(*args, **kwargs)
        if name == "dropout":
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(values: Tensor, p: float = 0.5, training: object = 1, *_: Any, **__: Any) -> Tensor:
    """A GPU's keeps a byte for each element; a CPU's a factor in the elements' own format."""
    return torch.native_dropout(values, p, train=True)[0] if training and p > 0.0 else values


def sdpa_shapes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> Tensor:
    """`F.scaled_dot_product_attention` of a GPU by the tensors that its kernels keep and make."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # It is added to the scores, in their format: one of truths becomes zeros and minus infinity.
    mask = None if attn_mask is None else attn_mask.to(query.dtype)
    output: Tensor = kernel_shapes(query, key, value, bias=mask)
    return output


def _equal(tokens: int, examples: int) -> list[Example]:
    """`tokens` as `examples` that stand one after the other, as equal as can be."""
    edges = [i * tokens // examples for i in range(examples + 1)]
    return [(start, end - start, start, end - start) for start, end in pairwise(edges)]
