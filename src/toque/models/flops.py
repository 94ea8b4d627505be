"""FLOPs per token, the matrix products they are spent in, and parameter counts of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from toque.models.families import family_of, head_size, unwrapped, window_of
from toque.models.lora.quantised import QuantisedLinear, quantised_layers


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights; a shared weight counts once."""

    total: int
    non_embedding: int  # without token and position tables and output head (Kaplan et al. 2020)
    trainable: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Count a model's parameters, adapters included."""
    core = unwrapped(model)
    found: list[nn.Module] = [core.get_input_embeddings(), core.get_submodule("lm_head")]
    positions = getattr(core.base_model, "wpe", None)  # GPT-2's are learned
    found += [] if positions is None else [positions]
    tables = {id(p) for module in found for p in module.parameters()}
    parameters = list(model.parameters())
    quantised = sum(layer.shape.numel() for _, layer in quantised_layers(model))
    return ParameterCounts(
        total=quantised + sum(p.numel() for p in parameters),
        non_embedding=quantised + sum(p.numel() for p in parameters if id(p) not in tables),
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
    """FLOPs that training spends on an average token of both sides, forward and backward.

    Those of `products_of`, plus 12 * layers * width * context for attention (Chowdhery et al. 2022,
    PaLM, appendix B); no norms, activations, optimizer, or recomputation by activation
    checkpointing. A layer with a sliding window attends no more than that (Jiang et al. 2023,
    Mistral 7B, section 2); at the beginning of an example it has fewer, which is not taken off.

    `context` are the keys a target token attends on average, half the length of causal examples;
    `source_context` those a source token attends, `cross_context` the source tokens a target token
    attends, by default as many. `source_share` is the share of source tokens among all.

    GPT-NeoX 1.2B at 2048 tokens: 6 * (1.208e9 + 1.03e8) + 12 * 24 * 2048 * 1024 = 8.47e9.
    """
    config = unwrapped(model).config
    products = products_of(model, labelled_share=labelled_share, source_share=source_share)
    weights = sum(products.values())
    if not family_of(config).is_encoder_decoder:
        width = int(config.num_attention_heads) * head_size(config)
        return weights + 12.0 * width * sum(_attended(config, context))

    inside = source_context if source_context is not None else context
    across = cross_context if cross_context is not None else inside
    width, depth = int(config.num_heads * config.d_kv), int(config.num_decoder_layers)
    source = 12.0 * int(config.num_layers) * width * inside
    target = 12.0 * depth * width * (context + across)
    return weights + source_share * source + (1.0 - source_share) * target


def _attended(config: Any, context: float) -> list[float]:
    """Keys that a token attends in each layer of a decoder-only model."""
    layers, window = int(config.num_hidden_layers), window_of(config)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    narrow = context if window is None else min(context, float(window))
    return [narrow if kind == "sliding_attention" else context for kind in kinds]


def products_of(
    model: nn.Module, *, labelled_share: float = 1.0, source_share: float = 0.0
) -> dict[tuple[int, int], float]:
    """Products with the model's weights: FLOPs per token, forward and backward, by (in, out).

    6 for each weight the token passes: 2 forward, 2 for the input's gradient and 2 for the
    weight's, which a frozen one does not need; with adapters an upper bound. The output head counts
    for the share of the decoder's tokens with a label. In an encoder-decoder source tokens pass the
    encoder and the decoder's cross-attention keys and values, target tokens all else.
    """
    found: dict[tuple[int, int], float] = {}
    for name, module in unwrapped(model).named_modules():
        if not isinstance(module, nn.Linear | Conv1D | QuantisedLinear):
            continue
        is_source = name.startswith("encoder.") or any(
            f".EncDecAttention.{side}." in f"{name}." for side in "kv"
        )
        passes = source_share if is_source else 1.0 - source_share
        if name.startswith("lm_head"):
            passes *= labelled_share
        if isinstance(module, QuantisedLinear):
            (rows, columns), trained = module.shape, False
        else:
            (rows, columns), trained = module.weight.shape, module.weight.requires_grad
        sides = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        cost = passes * (6.0 if trained else 4.0) * rows * columns
        found[sides] = found.get(sides, 0.0) + cost
    return found
