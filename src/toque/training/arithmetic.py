"""Arithmetic of a run: FLOPs of one useful token of its data, by its model and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from toque.data.loader.batch_stream import BatchStream
from toque.models.flops import flops_per_token, products_of
from toque.models.forward.attention_choice import Choice, attention_of
from toque.models.precision import has_fast_bf16
from toque.runs.peak_flops import peak_of
from toque.training.runtime import Runtime


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of one useful token of a run's data, forward and backward."""

    flops_per_token: float
    products: dict[tuple[int, int], float]
    """FLOPs of products with weights, a part of these, by the matrix' (in, out)."""
    kind: str = "masked"
    """Kind of attention that keeps packed examples apart: variable-length or masked."""
    masked_flops_per_token: float = 0.0
    """FLOPs of attention as it is computed where it is masked: every pair of a row's positions."""

    def record(self) -> dict[str, Any]:
        """FLOPs per useful token, for the start event."""
        products = sum(self.products.values())
        needed = self.flops_per_token - products
        masked = self.kind == "masked"
        return {
            "products": products,
            "attention": needed,
            "attention_kind": self.kind,
            "attention_computed": max(needed, self.masked_flops_per_token) if masked else needed,
        }


def rate_of_bf16(runtime: Runtime, arithmetic: Arithmetic) -> dict[str, float]:
    """The rate of the model's products in bf16, where a float32 run leaves it unused."""
    if runtime.precision != "float32" or not has_fast_bf16(runtime.device):
        return {}
    peak = peak_of(runtime.device, torch.bfloat16, arithmetic.products)
    return {"bf16_peak": peak.flops_per_second}


def arithmetic_of(
    model: PreTrainedModel, stream: BatchStream, attention: Choice | None = None
) -> Arithmetic:
    """Forward and backward arithmetic of one useful token of this data, by some attention."""
    source, target = (
        side.astype(float) for side in (stream.plan.source_lengths, stream.plan.target_lengths)
    )

    def context(lengths: np.ndarray, of: np.ndarray) -> float:  # for an average token of `of`
        return float((lengths * of).sum() / max(1.0, float(of.sum())))

    own, shape = context(target, target) / 2, stream.layout.shape
    if shape.source == 0:
        # As `BatchStream` counts: a last token is no input; without a prompt a first is no label.
        prompts, targets = stream.prompt_lengths, stream.target_lengths
        labelled = int(targets.sum()) - int((prompts == 0).sum())
        tokens = int(prompts.sum()) + int(targets.sum()) - len(targets)
        shares = {"labelled_share": labelled / max(1, tokens)}
        flops = flops_per_token(model, context=own, **shares)
        everything = flops_per_token(model, context=shape.target, **shares)
    else:
        shares = {"source_share": float(source.sum()) / float(source.sum() + target.sum())}
        flops = flops_per_token(
            model,
            context=own,
            source_context=context(source, source),
            cross_context=context(source, target),
            **shares,
        )
        sides = {"source_context": shape.source, "cross_context": shape.source}
        everything = flops_per_token(model, context=shape.target, **sides, **shares)
    products = products_of(model, **shares)
    chosen = attention or attention_of(model, model.device)
    kind = "masked" if chosen.name == "dense" else "variable-length"
    return Arithmetic(flops, products, kind, everything - sum(products.values()))
