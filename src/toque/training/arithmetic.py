"""Arithmetic of a run: the FLOPs that its model and data need per token."""

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
    """Forward and backward FLOPs per useful token of a run's data."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """FLOPs of matmuls with weights, a part of `flops_per_token`, by the matrix's (in, out)."""
    kind: str = "masked"
    """Kind of attention that separates packed examples: variable-length or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of masked attention, which computes every pair of a row's positions."""

    def record(self) -> dict[str, Any]:
        """Return the FLOPs per useful token for the start event."""
        products = sum(self.products.values())
        needed = self.flops_per_token - products
        masked = self.kind == "masked"
        return {
            "products": products,
            "attention": needed,
            "attention_kind": self.kind,
            "attention_computed": max(needed, self.masked_flops_per_token)
            if masked
            else needed,
        }


def find_bf16_peak(runtime: Runtime, arithmetic: Arithmetic) -> dict[str, float]:
    """Return the FLOP/s of the model's matmuls in bf16, if a float32 run leaves bf16 unused."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def count_flops(
    model: PreTrainedModel,
    stream: BatchStream,
    attention: AttentionChoice | None = None,
) -> Arithmetic:
    """Count the forward and backward FLOPs per useful token of this data."""
    source = stream.plan.source_lengths.astype(float)
    target = stream.plan.target_lengths.astype(float)

    def mean_context(lengths: np.ndarray, weights: np.ndarray) -> float:
        return float((lengths * weights).sum() / max(1.0, float(weights.sum())))

    target_context = mean_context(target, target) / 2
    shape = stream.layout.shape
    if shape.source == 0:
        # As `BatchStream` counts, the last token is not an input. Without a prompt the first token
        # is not a label.
        prompts, targets = stream.prompt_lengths, stream.target_lengths
        learnt = targets if stream.learnt_lengths is None else stream.learnt_lengths
        labelled = int(learnt.sum()) - int((prompts == 0).sum())
        tokens = int(prompts.sum()) + int(targets.sum()) - len(targets)
        shares = {"labelled_share": labelled / max(1, tokens)}
    else:
        shares = {
            "source_share": float(source.sum()) / float(source.sum() + target.sum())
        }

    flops = flops_per_token(
        model,
        context=target_context,
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
