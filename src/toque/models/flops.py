"""FLOPs per token and parameter counts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from toque.models.families import family_of, head_size, unwrapped


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of weights; a shared weight counts once."""

    total: int
    non_embedding: int
    """Without token and position tables and without the output head (Kaplan et al. 2020)."""
    trainable: int


def parameter_counts(model: nn.Module) -> ParameterCounts:
    """Count a model's parameters, adapters included."""
    tables = {id(p) for module in _tables(model) for p in module.parameters()}
    parameters = list(model.parameters())
    return ParameterCounts(
        total=sum(p.numel() for p in parameters),
        non_embedding=sum(p.numel() for p in parameters if id(p) not in tables),
        trainable=sum(p.numel() for p in parameters if p.requires_grad),
    )


def flops_per_token(
    model: nn.Module,
    *,
    context: float,
    labelled_share: float = 1.0,
    source_share: float = 0.0,
    source_context: float | None = None,
) -> float:
    """Floating-point operations that training spends on one token, forward and backward.

    6 for each weight the token passes through, plus 12 * layers * width * context for attention
    (Chowdhery et al. 2022, PaLM, appendix B). The output head is a matrix product like any other
    and counts for the tokens with a label only (not a prompt's); looking up an embedding costs
    nothing. In an encoder-decoder a token passes one side only: source tokens the encoder and the
    decoder's cross-attention keys and values, target tokens the rest of the decoder and the head.
    Activation checkpointing recomputes without doing more, so it never counts. A frozen weight
    costs 4, since it needs no gradient of its own; that the layers below the first adapter need
    none at all is ignored, so with adapters this is an upper bound.

    Args:
        model: A model of one of the families.
        context: Keys a target token attends on average: half the length for causal attention
            over rows of one example.
        labelled_share: Tokens with a label as a share of the decoder's tokens, in [0, 1].
        source_share: Source tokens as a share of all tokens, in [0, 1]; 0 for decoder-only models.
        source_context: Source tokens a source token and, across, a target token attends.
            By default `context`.

    Returns:
        FLOPs per token, averaged over both sides.

    GPT-NeoX 1.2B at 2048 tokens: 6 * (1.208e9 + 1.03e8) + 12 * 24 * 2048 * 1024 = 8.47e9.
    """
    core = unwrapped(model)
    config = core.config
    head = labelled_share * _products([core.get_submodule("lm_head")])
    tables = {id(p) for module in _tables(core) for p in module.parameters()}
    body = sum(_cost(p) for p in core.parameters() if id(p) not in tables)
    if not family_of(config).is_encoder_decoder:
        width = int(config.num_attention_heads) * head_size(config)
        return body + head + 12.0 * int(config.num_hidden_layers) * width * context

    across = source_context if source_context is not None else context
    width, depth = int(config.num_heads * config.d_kv), int(config.num_decoder_layers)
    encoder = _products(core.get_submodule("encoder").get_submodule("block").children())
    keys_values = _products(
        module
        for name, module in core.get_submodule("decoder").named_modules()
        if name.endswith(("EncDecAttention.k", "EncDecAttention.v"))
    )
    decoder = body - encoder - keys_values
    source = encoder + keys_values + 12.0 * int(config.num_layers) * width * across
    target = decoder + head + 12.0 * depth * width * (context + across)
    return source_share * source + (1.0 - source_share) * target


def _tables(model: nn.Module) -> list[nn.Module]:
    """Token embeddings, learned positions (GPT-2's `wpe`) and the output head."""
    core = unwrapped(model)
    tables: list[nn.Module] = [core.get_input_embeddings(), core.get_submodule("lm_head")]
    positions = getattr(core.base_model, "wpe", None)
    return tables if positions is None else [*tables, positions]


def _products(modules: Iterable[nn.Module]) -> float:
    return sum(_cost(p) for module in modules for p in module.parameters())


def _cost(weight: nn.Parameter) -> float:
    """FLOPs per token: 2 forward, 2 for the input's gradient, 2 for the weight's."""
    return (6.0 if weight.requires_grad else 4.0) * weight.numel()
