"""Arithmetic of a run: the FLOPs per token of its model and data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from toque.data.loader.batch_stream import BatchStream
from toque.hardware.onednn import has_fast_bf16
from toque.models.flops import flops_by_shape, flops_per_token
from toque.models.forward.attention import AttentionChoice, attention_of
from toque.runs.peak import peak_of
from toque.training.runtime import Runtime


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of the forward and backward passes, per token that is not padding."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """FLOPs per token in matmuls with weights, by the weight's (in, out) size; included in
    `flops_per_token`.
    """
    kind: str = "masked"
    """Kind of attention that separates packed examples: variable-length or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of masked attention, which computes all pairs of positions in a row."""

    def record(self) -> dict[str, Any]:
        """Return the FLOPs per token for the start event of a session."""
        matmuls = sum(self.products.values())
        attention = self.flops_per_token - matmuls
        computed = attention
        if self.kind == "masked":
            computed = max(attention, self.masked_flops_per_token)
        return {
            "products": matmuls,
            "attention": attention,
            "attention_kind": self.kind,
            "attention_computed": computed,
        }


def find_bf16_peak(runtime: Runtime, arithmetic: Arithmetic) -> dict[str, float]:
    """Measure the FLOP/s of the model's matmuls in bf16, if a float32 run could use fast bf16."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def count_flops(
    model: PreTrainedModel,
    stream: BatchStream,
    attention: AttentionChoice | None = None,
) -> Arithmetic:
    """Count the FLOPs of the forward and backward passes, per token that is not padding.

    `attention` is chosen for the model's device if it is None.
    """
    source = stream.plan.source_lengths.astype(float)
    target = stream.plan.target_lengths.astype(float)
    shape = stream.layout.shape
    if shape.source == 0:
        shares = {"labelled_share": _labelled_share(stream)}
    else:
        n_source = float(source.sum())
        shares = {"source_share": n_source / float(source.sum() + target.sum())}

    def mean_context(lengths: np.ndarray, weights: np.ndarray) -> float:
        return float((lengths * weights).sum() / max(1.0, float(weights.sum())))

    flops = flops_per_token(
        model,
        # A causal token attends to half of its example on average.
        context=mean_context(target, target) / 2,
        source_context=mean_context(source, source),
        cross_context=mean_context(source, target),
        **shares,
    )
    padded_flops = flops_per_token(
        model,
        context=shape.target,
        source_context=shape.source,
        cross_context=shape.source,
        **shares,
    )
    products = flops_by_shape(model, **shares)
    chosen = attention or attention_of(model, model.device)
    kind = "masked" if chosen.name == "dense" else "variable-length"
    return Arithmetic(flops, products, kind, padded_flops - sum(products.values()))


def _labelled_share(stream: BatchStream) -> float:
    """Return the fraction of a decoder-only model's input tokens that have a label."""
    # As `BatchStream` counts, the last token is not an input. Without a prompt the first token is
    # not a label.
    prompts, targets = stream.prompt_lengths, stream.target_lengths
    learnt = targets if stream.learnt_lengths is None else stream.learnt_lengths
    labelled = int(learnt.sum()) - int((prompts == 0).sum())
    inputs = int(prompts.sum()) + int(targets.sum()) - len(targets)
    return labelled / max(1, inputs)
