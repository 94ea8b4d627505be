"""FLOPs per token, FLOPs by matmul shape, and parameter counts of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from toque.models.config_values import head_size, window_of
from toque.models.families import family_of, unwrapped
from toque.models.lora.quantised import QuantisedLinear, quantised_layers


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights. A shared weight counts once."""

    total: int
    non_embedding: int  # without embeddings and output head (Kaplan et al. 2020)
    trainable: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Count the parameters of a model with its adapters."""
    core = unwrapped(model)
    tables: list[nn.Module] = [
        core.get_input_embeddings(),
        core.get_submodule("lm_head"),
    ]
    positions = getattr(core.base_model, "wpe", None)
    if positions is not None:  # GPT-2 learns its positions
        tables.append(positions)
    table_ids = {id(p) for module in tables for p in module.parameters()}

    # A quantised matrix is not a parameter.
    quantised = sum(layer.shape.numel() for _, layer in quantised_layers(model))
    total = non_embedding = quantised
    trainable = 0
    for parameter in model.parameters():
        size = parameter.numel()
        total += size
        if id(parameter) not in table_ids:
            non_embedding += size
        if parameter.requires_grad:
            trainable += size
    return ParameterCounts(total, non_embedding, trainable)


def flops_per_token(
    model: nn.Module,
    *,
    context: float,
    labelled_share: float = 1.0,
    source_share: float = 0.0,
    source_context: float | None = None,
    cross_context: float | None = None,
) -> float:
    """Count the training FLOPs per token, averaged over both sides.

    The FLOPs are the sum of `flops_by_shape` and 12 * layers * width * context for attention
    (Chowdhery et al. 2022, PaLM, appendix B), for the forward and backward passes. Norms,
    activations, the optimizer and the recomputation of activation checkpointing do not count. A
    sliding window limits a layer's context (Jiang et al. 2023, Mistral 7B, section 2). The shorter
    context at the beginning of an example is ignored.

    Example: GPT-NeoX 1.2B at 2048 tokens has
    6 * (1.208e9 + 1.03e8) + 12 * 24 * 2048 * 1024 = 8.47e9.

    Args:
        model: Model to count.
        context: Average number of keys per target token: half the length of causal examples.
        labelled_share: Fraction of the target tokens with a label.
        source_share: Fraction of source tokens among all tokens.
        source_context: Average keys per source token; `context` by default.
        cross_context: Average source keys per target token; `source_context` by default.
    """
    config = unwrapped(model).config
    by_shape = flops_by_shape(
        model, labelled_share=labelled_share, source_share=source_share
    )
    weights = sum(by_shape.values())
    if not family_of(config).is_encoder_decoder:
        width = int(config.num_attention_heads) * head_size(config)
        return weights + 12.0 * width * sum(_context_by_layer(config, context))

    if source_context is None:
        source_context = context
    if cross_context is None:
        cross_context = source_context
    per_key = 12.0 * int(config.num_heads * config.d_kv)
    encoder = per_key * int(config.num_layers) * source_context
    decoder = per_key * int(config.num_decoder_layers) * (context + cross_context)
    return weights + source_share * encoder + (1.0 - source_share) * decoder


def _context_by_layer(config: Any, context: float) -> list[float]:
    """Return the number of keys per token in each layer of a decoder-only model."""
    window = window_of(config)
    narrow = context if window is None else min(context, float(window))
    layer_types = getattr(config, "layer_types", None)
    if not layer_types:  # all layers have the window, if there is one
        return [narrow for _ in range(config.num_hidden_layers)]
    return [narrow if t == "sliding_attention" else context for t in layer_types]


def flops_by_shape(
    model: nn.Module, *, labelled_share: float = 1.0, source_share: float = 0.0
) -> dict[tuple[int, int], float]:
    """Count the FLOPs per token of matmuls with weights, by (input width, output width).

    A matmul costs 6 FLOPs per weight and token: 2 in the forward pass, 2 for the gradient of the
    input and 2 for the gradient of the weight, which frozen weights do not need. With adapters this
    is an upper bound. The output head counts for target tokens with a label. In an encoder-decoder,
    source tokens pass the encoder and the cross-attention's keys and values. Target tokens pass all
    other layers.
    """
    flops: dict[tuple[int, int], float] = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, QuantisedLinear):
            rows, columns = module.shape
            per_weight = 4.0
        elif isinstance(module, nn.Linear | Conv1D):
            rows, columns = module.weight.shape
            per_weight = 6.0 if module.weight.requires_grad else 4.0
        else:
            continue
        share = source_share if _reads_source(name) else 1.0 - source_share
        if name.startswith("lm_head"):
            share *= labelled_share
        size = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        flops[size] = flops.get(size, 0.0) + share * per_weight * rows * columns
    return flops


def _reads_source(path: str) -> bool:
    """True if the layer at a path computes source tokens of an encoder-decoder."""
    is_cross_key = ".EncDecAttention.k." in f"{path}."
    is_cross_value = ".EncDecAttention.v." in f"{path}."
    return path.startswith("encoder.") or is_cross_key or is_cross_value
