"""The forward of packed rows by attention kernels that need no mask of every pair of positions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from toque.batch import DecoderBatch, EncoderDecoderBatch
from toque.models.forward.kernels import flex
from toque.models.forward.kernels.flash import flash_attention
from toque.models.forward.kernels.plan import (
    Kernel,
    KernelPlan,
    Runs,
    decoder_plan,
    encoder_decoder_plans,
)
from toque.models.forward.unpadded import embed_both, t5_stack
from toque.models.forward.varlen_attention import as_attended, attending_with, configs_of

NAME: Final = "toque_kernels"
"""Name of this attention in transformers' registry."""


def decoder_hidden(core: PreTrainedModel, batch: DecoderBatch, kernel: Kernel) -> Tensor:
    """The last hidden states [R, L, D] of a decoder-only model."""
    with _kernels(core):
        output = core.base_model(
            # Embeddings, not tokens: without a mask GPT-2 would look for padding among the tokens.
            inputs_embeds=core.get_input_embeddings()(batch.tokens),
            position_ids=batch.positions,
            use_cache=False,
            plan=decoder_plan(batch, kernel),
        )
    hidden: Tensor = output.last_hidden_state
    return hidden


def encoder_decoder_hidden(core: PreTrainedModel, batch: EncoderDecoderBatch) -> Tensor:
    """The decoder's last hidden states [R, T, D] of a T5, before any scaling for the head."""
    own, both = encoder_decoder_plans(batch)
    encoder, decoder = core.get_submodule("encoder"), core.get_submodule("decoder")
    source, target = embed_both(encoder, decoder, batch.source_tokens, batch.target_tokens)
    with _kernels(core):
        states = t5_stack(encoder, source, own, None, longest=source.shape[1])
        return t5_stack(decoder, target, both, states, longest=target.shape[1])


def _kernels(model: PreTrainedModel) -> AbstractContextManager[None]:
    """A context in which the model's layers take `plan=KernelPlan(...)` instead of masks."""
    AttentionInterface.register(NAME, _attend)
    configs = configs_of(model)
    return attending_with(configs, dict.fromkeys(configs, NAME))


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    plan: KernelPlan,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, T, d] each, to [R, T, H, d]."""
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(plan.own, Runs):
        rows, heads, length, size = query.shape
        q, k, v = (t.transpose(1, 2).reshape(-1, heads, size) for t in (query, key, value))
        output = flash_attention(
            q, k, v, plan.own, causal=bool(module.is_causal), scale=scale, dropout=dropout
        )
        return output.view(rows, length, heads, size), None
    # T5 passes its cross-attention a bias of zeros.
    across = getattr(module, "is_decoder", False) and not module.is_causal
    mask = plan.across if across and plan.across is not None else plan.own
    bias = None if mask is plan.across else position_bias
    output = flex.attend(query, key, value, mask, bias=bias, scale=scale, dropout=dropout)
    return output.transpose(1, 2), None
