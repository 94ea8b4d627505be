"""FLOPs per token, matrix products by size, and parameter counts of a model."""

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
    non_embedding: int  # weights without tables and output head (Kaplan et al. 2020)
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
    parameters = list(model.parameters())
    quantised = sum(layer.shape.numel() for _, layer in quantised_layers(model))
    return ParameterCounts(
        total=quantised + sum(p.numel() for p in parameters),
        non_embedding=quantised
        + sum(p.numel() for p in parameters if id(p) not in table_ids),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def flops_per_token(
    model: nn.Module,
    *,
    context: float,
    labelled_share: float = 1.0,
    source_share: float = 0.0,
    source_context: float | None = None,
    cross_context: float | None = None,
) -> float:
    """Count the FLOPs of training per average token of both sides, forward and backward.

    The sum of `products_of` and 12 * layers * width * context for attention (Chowdhery et al. 2022,
    PaLM, appendix B). Norms, activations, the optimizer and the recomputation by activation
    checkpointing do not count. A sliding window limits the context of a layer (Jiang et al. 2023,
    Mistral 7B, section 2). The shorter context at the beginning of an example is ignored.

    Example: GPT-NeoX 1.2B at 2048 tokens has
    6 * (1.208e9 + 1.03e8) + 12 * 24 * 2048 * 1024 = 8.47e9.

    Args:
        model: The model.
        context: Average keys per target token. For causal examples this is half their length.
        labelled_share: Share of the target tokens with a label.
        source_share: Share of source tokens among all tokens.
        source_context: Average keys per source token; `context` by default.
        cross_context: Average source keys per target token; `source_context` by default.
    """
    config = unwrapped(model).config
    products = products_of(
        model, labelled_share=labelled_share, source_share=source_share
    )
    weights = sum(products.values())
    if not family_of(config).is_encoder_decoder:
        columns = int(config.num_attention_heads) * head_size(config)
        return weights + 12.0 * columns * sum(_attended(config, context))

    if source_context is None:
        source_context = context
    if cross_context is None:
        cross_context = source_context
    width = 12.0 * int(config.num_heads * config.d_kv)
    encoder = width * int(config.num_layers) * source_context
    decoder = width * int(config.num_decoder_layers) * (context + cross_context)
    return weights + source_share * encoder + (1.0 - source_share) * decoder


def _attended(config: Any, context: float) -> list[float]:
    """Keys per token in each layer of a decoder-only model."""
    layers, window = int(config.num_hidden_layers), window_of(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    narrow = context if window is None else min(context, float(window))
    return [narrow if kind == "sliding_attention" else context for kind in kinds]


def products_of(
    model: nn.Module, *, labelled_share: float = 1.0, source_share: float = 0.0
) -> dict[tuple[int, int], float]:
    """Count the FLOPs of products with weights per token, forward and backward, by (in, out).

    A product costs 6 FLOPs per weight and token: 2 in forward, 2 for the gradient of the input and
    2 for the gradient of the weight, which frozen weights do not need. With adapters this is an
    upper bound. The output head counts for target tokens with a label. In an encoder-decoder,
    source tokens pass the encoder and the keys and values of the cross-attention. Target tokens
    pass the rest.
    """
    flops: dict[tuple[int, int], float] = {}
    for name, module in unwrapped(model).named_modules():
        if not isinstance(module, nn.Linear | Conv1D | QuantisedLinear):
            continue
        is_source = name.startswith("encoder.") or any(
            f".EncDecAttention.{side}." in f"{name}." for side in "kv"
        )
        passes = source_share if is_source else 1.0 - source_share
        if name.startswith("lm_head"):
            passes *= labelled_share
        shape = (
            module.shape if isinstance(module, QuantisedLinear) else module.weight.shape
        )
        is_trained = (
            not isinstance(module, QuantisedLinear) and module.weight.requires_grad
        )
        rows, columns = shape
        size = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        cost = passes * (6.0 if is_trained else 4.0) * rows * columns
        flops[size] = flops.get(size, 0.0) + cost
    return flops
