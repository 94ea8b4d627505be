"""Forward of a packed batch, up to the input of the output head.

transformers' modules compute it. This module keeps packed examples apart: on a CPU by
variable-length attention (`varlen_attention.py`), on a GPU by FlexAttention (`flex_attention.py`),
elsewhere by masks. On a CPU, padding is removed before the first layer and added as zeros after the
last layer. Packing then changes the order of the work but not its amount. In bfloat16 the number of
tokens is rounded up (`padded_length`).

Letters: R rows, L row length, N real tokens of all rows, S and T tokens of a T5's two sides, D
hidden size, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.umt5.modeling_umt5 import UMT5Attention

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.errors import ConfigError
from toque.models.config_values import max_positions, window_of
from toque.models.families import CAUSAL, family_of, unwrapped
from toque.models.forward import flex_attention as flex
from toque.models.forward import varlen_attention as varlen
from toque.models.forward.attention import attention_of
from toque.models.forward.cpu_linear import in_bf16, padded_length
from toque.models.forward.grouped_attention import AttentionPlan
from toque.models.forward.keyed_dropout import Masks, masks_of
from toque.models.forward.varlen_attention import attending_by, configs_of, examples_in


def hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """Compute the input of the output head at every position, [R, L, D] or [R, T, D].

    In self- and cross-attention, tokens attend only to their own segment. The final norm and the
    factor of models that scale their outputs (`scale_outputs`) are applied. `output_head` and then
    `logit_cap` give the same logits as transformers.

    Raises:
        TypeError: The batch is for another kind of model.
    """
    core = unwrapped(model)
    family = family_of(core.config)
    masks = masks_of(core)
    if isinstance(batch, EncoderDecoderBatch) and family.is_encoder_decoder:
        return _encoder_decoder(core, batch, masks)
    if isinstance(batch, DecoderBatch) and not family.is_encoder_decoder:
        return _decoder_only(core, batch, masks)
    expected = "a DecoderBatch"
    if family.is_encoder_decoder:
        expected = "an EncoderDecoderBatch"
    raise TypeError(
        f"a {family.name} model needs {expected}, not a {type(batch).__name__}"
    )


def output_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the output head's weight [V, D] and bias [V], if it has one.

    Raises:
        ConfigError: The head is not a plain linear layer.
    """
    head = unwrapped(model).get_submodule("lm_head")
    # peft wraps a table to train some of its rows. The wrapper's weight is the entire table.
    has_trained_rows = hasattr(head, "token_adapter")
    inner = getattr(head, "original_module", None) if has_trained_rows else head
    if not isinstance(inner, nn.Linear):
        raise ConfigError(
            f"The model's output head is a {type(head).__name__}, but the loss needs a plain "
            "linear layer. Remove the output head from adapter.target_modules."
        )
    return cast("Tensor", head.weight), inner.bias


def logit_cap(model: nn.Module) -> float | None:
    """Return c of a model with logits c * tanh(logits / c), such as Gemma; None without a cap."""
    config = unwrapped(model).config
    return getattr(config, "final_logit_softcapping", None)


def scale_outputs(model: nn.Module, hidden: Tensor) -> Tensor:
    """Multiply hidden states by the factor of the model's logits (T5, Granite, Cohere)."""
    config = unwrapped(model).config
    if family_of(config).is_encoder_decoder:  # T5 v1.1 and FLAN do not scale
        scales = getattr(config, "scale_decoder_outputs", False)
        return hidden * config.d_model**-0.5 if scales else hidden
    if family_of(config) != CAUSAL:
        return hidden
    multiplier = getattr(config, "logit_scale", None) or 1.0  # Cohere
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    factor = multiplier / divisor
    return hidden if factor == 1.0 else hidden * factor


def _encoder_decoder(
    core: PreTrainedModel, batch: EncoderDecoderBatch, masks: Masks | None
) -> Tensor:
    """Compute the scaled last hidden states of a T5's decoder, [R, T, D]."""
    choice = attention_of(core, batch.labels.device)
    if choice.name == "segments":
        return scale_outputs(core, _t5_by_segments(core, batch, masks))

    if masks is not None:
        source_keys, target_keys = batch.token_keys()
        masks.begin(source=source_keys, target=target_keys)
    if choice.name == "flex":
        with attending_by(configs_of(core), flex.NAME):
            hidden = t5_hidden_states(
                core,
                batch.source_tokens,
                batch.target_tokens,
                flex.encoder_decoder_masks(batch, choice.options),
                longest=(batch.source_tokens.shape[1], batch.target_tokens.shape[1]),
            )
        return scale_outputs(core, hidden)
    return scale_outputs(core, _t5_masked(core, batch))


def _t5_by_segments(
    core: PreTrainedModel, batch: EncoderDecoderBatch, masks: Masks | None
) -> Tensor:
    """Compute a T5 without padding, one example at a time in attention."""
    sources, targets = batch.source_segments, batch.target_segments
    source, target = _RealTokens.of(sources), _RealTokens.of(targets)
    if masks is not None:
        source_keys, target_keys = batch.token_keys()
        masks.begin(
            source=source.without_padding(source_keys),
            target=target.without_padding(target_keys),
        )
    encoder_plan = AttentionPlan(examples_in(sources))
    decoder_plan = AttentionPlan(examples_in(targets), examples_in(targets, sources))
    with attending_by(configs_of(core), varlen.NAME):
        hidden = t5_hidden_states(
            core,
            source.without_padding(batch.source_tokens),
            target.without_padding(batch.target_tokens),
            (encoder_plan, decoder_plan),
            longest=(encoder_plan.longest, decoder_plan.longest),
        )
    return target.with_padding(hidden)


def _t5_masked(core: PreTrainedModel, batch: EncoderDecoderBatch) -> Tensor:
    """Compute a T5 with transformers' forward and masks of all pairs."""
    sources, targets = batch.source_segments, batch.target_segments
    with attending_by(configs_of(core), varlen.MASKED):
        states = core.get_submodule("encoder")(
            input_ids=batch.source_tokens, attention_mask=same_segment(sources, sources)
        ).last_hidden_state
        # Padding attends to every source token, because the softmax of an empty row is undefined.
        cross_mask = same_segment(targets, sources) | (targets == 0)[:, None, :, None]
        output = core.get_submodule("decoder")(
            input_ids=batch.target_tokens,
            attention_mask=same_segment(targets, targets).tril(),
            encoder_hidden_states=states,
            encoder_attention_mask=cross_mask,
            use_cache=False,
        )
    return cast("Tensor", output.last_hidden_state)


def _decoder_only(
    core: PreTrainedModel, batch: DecoderBatch, masks: Masks | None
) -> Tensor:
    """Compute the scaled last hidden states of a decoder-only model, [R, L, D]."""
    choice = attention_of(core, batch.labels.device)
    segments = batch.segments
    is_causal = _needs_only_causality(core, batch, masks)

    # Rows without padding and packing need neither: the fused causal kernel is faster.
    if choice.name == "segments" and not (is_causal and bool((segments > 0).all())):
        return _decoder_by_segments(core, batch, masks)

    if masks is not None:
        masks.begin(target=batch.token_keys())
    if choice.name == "flex" and not is_causal:
        window = window_of(core.config)
        blocks = flex.decoder_masks(batch, choice.options, window=window)
        with attending_by(configs_of(core), flex.NAME, blocks):
            return decoder_hidden_states(core, batch.tokens, batch.positions, blocks)
    # transformers' "sdpa" ignores the caps that a model of this family may have.
    if family_of(core.config) == CAUSAL:
        pairs = same_segment(segments, segments).tril()
        with attending_by(configs_of(core), varlen.NAME, pairs):
            return decoder_hidden_states(core, batch.tokens, batch.positions, pairs)
    return _decoder_masked(core, batch, is_causal=is_causal)


def _needs_only_causality(
    core: PreTrainedModel, batch: DecoderBatch, masks: Masks | None
) -> bool:
    """True if PyTorch's fused causal kernels compute the rows without a mask.

    Each row must have one example and then padding, which causality hides.
    """
    if family_of(core.config) == CAUSAL:  # the kernels ignore caps
        return False
    if masks is not None and masks.in_attention:
        # The kernels' own dropout depends on the rows that are computed together.
        return False
    limit = max_positions(core.config)
    if limit is not None and batch.tokens.shape[1] > limit:
        return False
    # The example ids are on the host, so this does not wait for the device.
    return all(len(row) <= 1 for row in batch.example_ids)


def _decoder_by_segments(
    core: PreTrainedModel, batch: DecoderBatch, masks: Masks | None
) -> Tensor:
    """Compute a decoder-only model without padding, one example at a time in attention."""
    real = _RealTokens.of(batch.segments)
    plan = AttentionPlan(examples_in(batch.segments))
    if masks is not None:
        masks.begin(target=real.without_padding(batch.token_keys()))
    tokens = real.without_padding(batch.tokens)
    positions = real.without_padding(batch.positions)
    with attending_by(configs_of(core), varlen.NAME, plan):
        hidden = decoder_hidden_states(core, tokens, positions, plan)
    return real.with_padding(hidden)


def _decoder_masked(
    core: PreTrainedModel, batch: DecoderBatch, *, is_causal: bool
) -> Tensor:
    """Compute a decoder-only model with transformers' forward, masked unless `is_causal`."""
    mask_inputs: dict[str, Any] = {}
    if not is_causal:
        mask = same_segment(batch.segments, batch.segments).tril()
        mask_inputs = {"attention_mask": mask, "position_ids": batch.positions}
    with attending_by(configs_of(core), varlen.MASKED):
        # Embeddings and not tokens: without a mask, GPT-2 would look for padding in the tokens.
        embeddings = core.get_input_embeddings()(batch.tokens)
        output = core.base_model(
            inputs_embeds=embeddings, use_cache=False, **mask_inputs
        )
    return cast("Tensor", output.last_hidden_state)


def same_segment(queries: Tensor, keys: Tensor) -> Tensor:
    """Compare segment numbers [R, T] and [R, S]: True [R, 1, T, S] for pairs of one segment."""
    return queries[:, None, :, None] == keys[:, None, None, :]


@dataclass(frozen=True)
class _RealTokens:
    """Positions of the real tokens of a batch."""

    indices: Tensor  # [N] positions in the flattened [R * L] batch, ascending
    shape: tuple[int, int]  # (R, L)
    extra: int  # additional tokens for a rounded length; no real token attends to them

    @classmethod
    def of(cls, segments: Tensor) -> _RealTokens:
        """Locate the real tokens in segment numbers [R, L]."""
        indices = segments.reshape(-1).nonzero().squeeze(1)
        extra = padded_length(len(indices)) - len(indices) if in_bf16(segments) else 0
        return cls(indices, (segments.shape[0], segments.shape[1]), extra)

    def without_padding(self, values: Tensor) -> Tensor:
        """Select real tokens of [R, L] to [1, N + extra]. Extra values are zero."""
        return functional.pad(values.reshape(-1)[self.indices], (0, self.extra))[None]

    def with_padding(self, hidden: Tensor) -> Tensor:
        """Copy [1, N + extra, D] to [R, L, D], with zeros at padding."""
        rows, length = self.shape
        real = hidden[0, : len(self.indices)]
        if len(real) == rows * length:
            return real.view(rows, length, -1)
        padded = hidden.new_zeros(rows * length, hidden.shape[-1])
        return padded.index_copy(0, self.indices, real).view(rows, length, -1)


def decoder_hidden_states(
    core: PreTrainedModel, tokens: Tensor, positions: Tensor, plan: object = None
) -> Tensor:
    """Compute a decoder-only model's last hidden states.

    Args:
        core: The model.
        tokens: Token ids.
        positions: Positions of the tokens in their examples, in the shape of `tokens`.
        plan: Argument of the model's attention function, such as an AttentionPlan or block masks.
    """
    output = core.base_model(
        # Embeddings and not tokens: without a mask, GPT-2 would look for padding in the tokens.
        inputs_embeds=core.get_input_embeddings()(tokens),
        position_ids=positions,
        use_cache=False,
        plan=plan,
    )
    hidden: Tensor = output.last_hidden_state
    return scale_outputs(core, hidden)


def t5_hidden_states(
    core: PreTrainedModel,
    source: Tensor,
    target: Tensor,
    plans: tuple[object, object],
    *,
    longest: tuple[int, int],
) -> Tensor:
    """Compute the last hidden states of a T5's decoder, before any scaling for the head.

    Args:
        core: Model without its output head.
        source: Token ids of the encoder, [R, S].
        target: Token ids of the decoder, [R, T].
        plans: Attention plans of encoder and decoder.
        longest: Length of each side's longest example, for the position bias.
    """
    encoder, decoder = core.get_submodule("encoder"), core.get_submodule("decoder")
    source_states, target_states = _embed_both(encoder, decoder, source, target)
    states = _t5_stack(encoder, source_states, plans[0], None, longest=longest[0])
    return _t5_stack(decoder, target_states, plans[1], states, longest=longest[1])


def _embed_both(
    encoder: nn.Module, decoder: nn.Module, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Embed both sides. In bfloat16, one look-up serves both sides if they share the table.

    Each look-up's gradient is a table of zeros with some rows filled, 66 MB for a T5.
    """
    table = encoder.get_submodule("embed_tokens")
    target_table = decoder.get_submodule("embed_tokens")
    are_plain = type(table) is type(target_table) is nn.Embedding
    is_shared = table is target_table or (
        are_plain and table.weight is target_table.weight
    )
    if not (is_shared and in_bf16(source)):
        return table(source), target_table(target)
    both = table(torch.cat([source.reshape(-1), target.reshape(-1)]))
    source_states, target_states = torch.split(both, [source.numel(), target.numel()])
    return source_states.view(*source.shape, -1), target_states.view(*target.shape, -1)


def _t5_stack(
    stack: nn.Module,
    embedded: Tensor,
    plan: object,
    states: Tensor | None,
    *,
    longest: int,
) -> Tensor:
    """Compute T5Stack.forward of transformers 5, with a position bias for the longest example.

    transformers computes a bias [H, N, N]. Here N can be the number of all tokens in a batch.

    Args:
        stack: Encoder or decoder.
        embedded: Input of the first block.
        plan: Attention plan.
        states: The encoder's output, for a decoder.
        longest: Length of the longest example.
    """
    first = stack.get_submodule("block.0.layer.0.SelfAttention")
    arguments: dict[str, Any] = {"encoder_hidden_states": states, "plan": plan}
    has_bias_per_layer = isinstance(first, UMT5Attention)
    if has_bias_per_layer:
        arguments["longest"] = longest
        _use_packed_umt5(stack)
    else:
        if in_bf16(embedded):
            bias = position_bias(cast("T5Attention", first), longest)
        else:
            bias = first.compute_bias(longest, longest)  # type: ignore[operator]
        arguments["position_bias"] = bias
        # Without a bias for cross-attention, the layer would create an unused one of zeros.
        arguments["encoder_decoder_position_bias"] = bias.new_empty(0)

    dropout = stack.get_submodule("dropout")
    hidden = dropout(embedded)
    for block in stack.get_submodule("block").children():
        output = block(hidden, **arguments)
        hidden = output if has_bias_per_layer else output[0]
    normed: Tensor = dropout(stack.get_submodule("final_layer_norm")(hidden))
    return normed


def _use_packed_umt5(stack: nn.Module) -> None:
    """Exchange the class of a UMT5 stack's attention layers in place."""
    for module in stack.modules():
        if type(module) is UMT5Attention:
            module.__class__ = _PackedUMT5Attention


class _PackedUMT5Attention(UMT5Attention):
    """UMT5's attention, with a bias in each layer, for the positions of the longest example."""

    def forward(
        self, hidden_states: Tensor, *args: Any, plan: object = None, **kwargs: Any
    ) -> Any:
        """Map [1, N, D] to [1, N, D] with a plan. Without a plan, call transformers' forward."""
        if plan is None:
            return super().forward(hidden_states, *args, **kwargs)
        states = kwargs.get("encoder_hidden_states")
        attended_states = hidden_states if states is None else states
        projected = (
            self.q(hidden_states),
            self.k(attended_states),
            self.v(attended_states),
        )
        shape = (*hidden_states.shape[:1], -1, self.n_heads, self.key_value_proj_dim)
        query, key, value = (t.view(shape).transpose(1, 2) for t in projected)

        bias = None
        if states is None:
            longest = kwargs["longest"]
            bias = self.compute_bias(longest, longest)  # type: ignore[no-untyped-call]
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]  # noqa: SLF001
        attended, _ = attend(
            self,
            query,
            key,
            value,
            None,
            plan=plan,
            scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            position_bias=bias,
        )
        return self.o(attended.reshape(*hidden_states.shape[:2], -1)), None


class _ByDistance(torch.autograd.Function):
    """Table [H, T, T] of values [2 T - 1, H] by distance, from -(T - 1) to T - 1."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.length = length = (len(values) + 1) // 2
        # Row r of the unfolded tensor has the values r to r + T - 1, for query T - 1 - r.
        return values.T.contiguous().unfold(1, length, 1).flip(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        length, n_heads = ctx.length, len(grads[0])
        # Rows of length 2 T are read as rows of length 2 T - 1. Each row then starts one column
        # further right, so that equal distances are in one column.
        shifted = grads[0].new_zeros(n_heads, length, 2 * length)
        shifted[:, :, :length] = grads[0].flip(1)
        flat = shifted.view(n_heads, -1)[:, : length * (2 * length - 1)]
        return flat.view(n_heads, length, -1).sum(1).T


def position_bias(attention: T5Attention, length: int) -> Tensor:
    """Compute `T5Attention.compute_bias` [1, H, T, T], with a gradient summed in a fixed order.

    The backward pass of the transformers function adds T * T rows. For 508 positions on two Zen 5
    cores it takes 12 ms; the backward pass of this function takes 2 ms.
    """
    values = bias_by_distance(attention, torch.arange(1 - length, length))
    by_distance: Tensor = _ByDistance.apply(values)  # type: ignore[no-untyped-call]
    return by_distance[None]


def bias_by_distance(attention: T5Attention, distances: Tensor) -> Tensor:
    """Look up the bias [n, H] of distances [n]: position of the key minus position of the query."""
    # The method has neither a public name nor types.
    buckets = attention._relative_position_bucket(  # type: ignore[no-untyped-call]  # noqa: SLF001
        distances,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    values: Tensor = attention.relative_attention_bias(buckets)
    return values
