"""The forward of a packed batch, up to the tensor the output head reads.

Stock transformers modules do the work; ours are the means that keep packed examples apart: on a CPU
variable-length attention (`varlen_attention.py`), on a GPU FlexAttention (`flex_attention.py`),
masks where neither works. On a CPU the padding is removed before the first layer and put back, as
zeros, after the last: how rows are packed changes the order of the work and not its amount. In
bfloat16 the number of tokens is rounded up, see `padded_length`.

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
from toque.models.families import CAUSAL, family_of, max_positions, unwrapped, window_of
from toque.models.forward import flex_attention as flex
from toque.models.forward import varlen_attention as varlen
from toque.models.forward.cpu_linear import in_bf16, padded_length
from toque.models.forward.flex_attention import attention_of
from toque.models.forward.grouped_attention import AttentionPlan
from toque.models.forward.keyed_dropout import Masks, masks_of
from toque.models.forward.varlen_attention import attending_by, configs_of, examples_in


def hidden_states(model: nn.Module, batch: Batch) -> Tensor:
    """The output head's input at every position, [R, L, D] or [R, T, D].

    In self- and cross-attention, tokens see only their own segment. It comes after the final norm,
    and after the factor of models that scale their outputs (`scale_outputs`), so that `output_head`
    and then `logit_cap` applied to it give the stock logits. A batch of the other kind raises
    TypeError.
    """
    core = unwrapped(model)
    family = family_of(core.config)
    masks = masks_of(core)
    if family.is_encoder_decoder != isinstance(batch, EncoderDecoderBatch):
        reads = "an EncoderDecoderBatch" if family.is_encoder_decoder else "a DecoderBatch"
        raise TypeError(f"a {family.name} model reads {reads}, not {type(batch).__name__}")
    if isinstance(batch, EncoderDecoderBatch):
        return _encoder_decoder(core, batch, masks)
    return _decoder_only(core, batch, masks)


def output_head(model: nn.Module) -> tuple[Tensor, Tensor | None]:
    """The output head's weight [V, D] and bias [V], if any; ConfigError if it is no plain layer."""
    head = unwrapped(model).get_submodule("lm_head")
    # peft's wrapper of a table of which some rows are trained: its weight is the whole table with
    # those rows in it, computed.
    inner = getattr(head, "original_module", None) if hasattr(head, "token_adapter") else head
    if not isinstance(inner, nn.Linear):
        raise ConfigError(
            f"The model's output head is a {type(head).__name__}, and the loss needs a plain "
            "linear layer. Leave the output head out of the adapter's target modules."
        )
    return cast("Tensor", head.weight), inner.bias


def logit_cap(model: nn.Module) -> float | None:
    """Cap c of models whose logits are c * tanh(logits / c) (Gemma); None for all others."""
    config = unwrapped(model).config
    return getattr(config, "final_logit_softcapping", None)


def scale_outputs(model: nn.Module, hidden: Tensor) -> Tensor:
    """Hidden states times what the model's logits are scaled by: of T5, Granite, Cohere."""
    config = unwrapped(model).config
    if family_of(config).is_encoder_decoder:  # v1.1 and FLAN have none
        scales = getattr(config, "scale_decoder_outputs", False)
        return hidden * config.d_model**-0.5 if scales else hidden
    if family_of(config) != CAUSAL:
        return hidden
    factor = (getattr(config, "logit_scale", None) or 1.0) / (
        getattr(config, "logits_scaling", None) or 1.0
    )
    return hidden if factor == 1.0 else hidden * factor


def _encoder_decoder(
    core: PreTrainedModel, batch: EncoderDecoderBatch, masks: Masks | None
) -> Tensor:
    chosen = attention_of(core, batch.labels.device)
    sources, targets = batch.source_segments, batch.target_segments
    if masks is not None and chosen.name != "segments":
        read, written = batch.token_keys()
        masks.begin(source=read, target=written)
    if chosen.name == "segments":
        source, target = _RealTokens.of(sources), _RealTokens.of(targets)
        if masks is not None:
            read, written = batch.token_keys()
            masks.begin(source=source.taken(read), target=target.taken(written))
        plans = (
            AttentionPlan(examples_in(sources)),
            AttentionPlan(examples_in(targets), examples_in(targets, sources)),
        )
        tokens = source.taken(batch.source_tokens), target.taken(batch.target_tokens)
        with attending_by(configs_of(core), varlen.NAME):
            hidden = t5_rows(core, *tokens, plans, longest=(plans[0].longest, plans[1].longest))
        hidden = target.put_back(hidden)
    elif chosen.name == "flex":
        tokens = batch.source_tokens, batch.target_tokens
        with attending_by(configs_of(core), flex.NAME):
            blocks = flex.encoder_decoder_masks(batch, chosen.options)
            hidden = t5_rows(core, *tokens, blocks, longest=(sources.shape[1], targets.shape[1]))
    else:
        with attending_by(configs_of(core), varlen.MASKED):
            states = core.get_submodule("encoder")(
                input_ids=batch.source_tokens, attention_mask=same_segment(sources, sources)
            ).last_hidden_state
            across = same_segment(targets, sources) | (targets == 0)[:, None, :, None]
            hidden = core.get_submodule("decoder")(
                input_ids=batch.target_tokens,
                attention_mask=same_segment(targets, targets).tril(),
                encoder_hidden_states=states,
                encoder_attention_mask=across,  # of padding every source: an empty row has no mean
                use_cache=False,
            ).last_hidden_state
    return scale_outputs(core, hidden)


def _decoder_only(core: PreTrainedModel, batch: DecoderBatch, masks: Masks | None) -> Tensor:
    chosen = attention_of(core, batch.labels.device)
    # Of a model that may have windows and caps, whose stock kernels leave caps out.
    plainly = family_of(core.config) == CAUSAL
    # Where each row holds one example and then padding, which causality alone hides, no mask at all
    # lets PyTorch's fused causal kernels run. Read from the example ids, which live on the host:
    # looking at the segments would wait for the device in every micro-batch.
    limit = max_positions(core.config)
    fits = limit is None or batch.tokens.shape[1] <= limit
    causal = not plainly and fits and all(len(row) <= 1 for row in batch.example_ids)
    # Those kernels draw masks of their own, which depend on the rows that are computed together.
    causal = causal and not (masks is not None and masks.in_attention)
    if chosen.name == "segments" and not (causal and bool((batch.segments > 0).all())):
        real, plan = _RealTokens.of(batch.segments), AttentionPlan(examples_in(batch.segments))
        if masks is not None:
            masks.begin(target=real.taken(batch.token_keys()))
        with attending_by(configs_of(core), varlen.NAME, plan):
            hidden = decoder_rows(core, real.taken(batch.tokens), real.taken(batch.positions), plan)
        return real.put_back(hidden)
    if masks is not None:
        masks.begin(target=batch.token_keys())
    if chosen.name == "flex" and not causal:
        blocks = flex.decoder_masks(batch, chosen.options, window=window_of(core.config))
        with attending_by(configs_of(core), flex.NAME, blocks):
            return decoder_rows(core, batch.tokens, batch.positions, blocks)
    if plainly:
        pairs = same_segment(batch.segments, batch.segments).tril()
        with attending_by(configs_of(core), varlen.NAME, pairs):
            return decoder_rows(core, batch.tokens, batch.positions, pairs)
    # Embeddings instead of tokens: without a mask GPT-2 would look for padding among the tokens.
    masked: dict[str, Any] = {}
    if not causal:
        mask = same_segment(batch.segments, batch.segments).tril()
        masked = {"attention_mask": mask, "position_ids": batch.positions}
    with attending_by(configs_of(core), varlen.MASKED):
        embeddings = core.get_input_embeddings()(batch.tokens)
        output = core.base_model(inputs_embeds=embeddings, use_cache=False, **masked)
    return cast("Tensor", output.last_hidden_state)


def same_segment(queries: Tensor, keys: Tensor) -> Tensor:
    """[R, T] and [R, S] segment numbers -> [R, 1, T, S]: pairs of one segment."""
    return queries[:, None, :, None] == keys[:, None, None, :]


@dataclass(frozen=True)
class _RealTokens:
    """Indices of a batch's real tokens."""

    where: Tensor  # [N] their indices in the flattened [R * L] batch, ascending
    shape: tuple[int, int]  # (R, L)
    extra: int  # tokens to compute besides, which no other sees

    @classmethod
    def of(cls, segments: Tensor) -> _RealTokens:
        where = segments.reshape(-1).nonzero().squeeze(1)
        extra = padded_length(len(where)) - len(where) if in_bf16(segments) else 0
        return cls(where, (segments.shape[0], segments.shape[1]), extra)

    def taken(self, values: Tensor) -> Tensor:
        """[R, L] values -> [1, N + extra], zero for those."""
        return functional.pad(values.reshape(-1)[self.where], (0, self.extra))[None]

    def put_back(self, hidden: Tensor) -> Tensor:
        """[1, N + extra, D] -> [R, L, D], zero at padding."""
        rows, length = self.shape
        real = hidden[0, : len(self.where)]
        if len(real) == rows * length:
            return real.view(rows, length, -1)
        whole = hidden.new_zeros(rows * length, hidden.shape[-1])
        return whole.index_copy(0, self.where, real).view(rows, length, -1)


def decoder_rows(
    core: PreTrainedModel, tokens: Tensor, positions: Tensor, plan: object = None
) -> Tensor:
    """The last hidden states of a decoder-only model, its layers' attention handed a plan."""
    output = core.base_model(
        # Embeddings, not tokens: without a mask GPT-2 would look for padding among the tokens.
        inputs_embeds=core.get_input_embeddings()(tokens),
        position_ids=positions,
        use_cache=False,
        plan=plan,
    )
    hidden: Tensor = output.last_hidden_state
    return scale_outputs(core, hidden)


def t5_rows(
    core: PreTrainedModel,
    source: Tensor,
    target: Tensor,
    plans: tuple[object, object],
    *,
    longest: tuple[int, int],
) -> Tensor:
    """The last hidden states of a T5's decoder, before any scaling for the head.

    `plans` are handed to the attention of encoder and decoder, which looks at `longest` positions.
    """
    encoder, decoder = core.get_submodule("encoder"), core.get_submodule("decoder")
    read, written = _embed_both(encoder, decoder, source, target)
    states = _t5_stack(encoder, read, plans[0], None, longest=longest[0])
    return _t5_stack(decoder, written, plans[1], states, longest=longest[1])


def _embed_both(
    encoder: nn.Module, decoder: nn.Module, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Both sides' embeddings; in bfloat16 by one look-up where they share the table.

    Its gradient is one table of zeros with some rows filled instead of two, each of 66 MB for a T5.
    """
    reads, writes = (stack.get_submodule("embed_tokens") for stack in (encoder, decoder))
    shared = reads is writes or (
        type(reads) is type(writes) is nn.Embedding and reads.weight is writes.weight
    )
    if not (shared and in_bf16(source)):
        return reads(source), writes(target)
    both = reads(torch.cat([source.reshape(-1), target.reshape(-1)]))
    parts = torch.split(both, [source.numel(), target.numel()])
    read, written = (p.view(*t.shape, -1) for p, t in zip(parts, (source, target), strict=True))
    return read, written


def _t5_stack(
    stack: nn.Module, embedded: Tensor, plan: object, states: Tensor | None, *, longest: int
) -> Tensor:
    """T5Stack.forward of transformers 5, with the position bias of the longest example only.

    The stock one makes [H, N, N]; here N may be the whole batch. `states` are the encoder's.
    """
    first = stack.get_submodule("block.0.layer.0.SelfAttention")
    how: dict[str, Any] = {"encoder_hidden_states": states, "plan": plan}
    if isinstance(first, UMT5Attention):  # whose layers have a bias each
        how["longest"] = longest
        for module in stack.modules():
            if type(module) is UMT5Attention:
                module.__class__ = _PackedUMT5Attention
    else:
        if in_bf16(embedded):
            bias = position_bias(cast("T5Attention", first), longest)
        else:
            bias = first.compute_bias(longest, longest)  # type: ignore[operator]
        # Cross-attention has none; the stock layer would make one of zeros. `_attend` ignores it.
        how |= {"position_bias": bias, "encoder_decoder_position_bias": bias.new_empty(0)}
    dropout = stack.get_submodule("dropout")
    hidden = dropout(embedded)
    for block in stack.get_submodule("block").children():
        found = block(hidden, **how)
        hidden = found if "longest" in how else found[0]
    normed: Tensor = dropout(stack.get_submodule("final_layer_norm")(hidden))
    return normed


class _PackedUMT5Attention(UMT5Attention):
    """UMT5's, of which each layer has a bias, with that of the longest example only."""

    def forward(self, hidden_states: Tensor, *args: Any, plan: object = None, **kwargs: Any) -> Any:
        """[1, N, D] -> [1, N, D] where there is a plan; anything else is transformers' own."""
        if plan is None:
            return super().forward(hidden_states, *args, **kwargs)
        across = kwargs.get("encoder_hidden_states")
        shape = (*hidden_states.shape[:1], -1, self.n_heads, self.key_value_proj_dim)
        read = hidden_states if across is None else across
        query, key, value = (
            project(of).view(shape).transpose(1, 2)
            for project, of in ((self.q, hidden_states), (self.k, read), (self.v, read))
        )
        longest = kwargs["longest"]
        seen, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](  # noqa: SLF001
            self, query, key, value, None, plan=plan, scaling=self.scaling,
            dropout=self.dropout if self.training else 0.0,
            position_bias=None if across is not None else self.compute_bias(longest, longest),  # type: ignore[no-untyped-call]
        )  # fmt: skip
        return self.o(seen.reshape(*hidden_states.shape[:2], -1)), None


class _ByDistance(torch.autograd.Function):
    """[2 T - 1, H] values by distance, the most negative first, to [H, T, T]."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.length = length = (len(values) + 1) // 2
        # Row r of the unfolded holds values r to r + T - 1, which query T - 1 - r reads.
        return values.T.contiguous().unfold(1, length, 1).flip(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        length, n_heads = ctx.length, len(grads[0])
        # Rows of 2 T read as rows of 2 T - 1: each stands one column further to the right than the
        # one above it, so that equal distances stand in one column.
        room = grads[0].new_zeros(n_heads, length, 2 * length)
        room[:, :, :length] = grads[0].flip(1)
        flat = room.view(n_heads, -1)[:, : length * (2 * length - 1)]
        return flat.view(n_heads, length, -1).sum(1).T


def position_bias(attention: T5Attention, length: int) -> Tensor:
    """`T5Attention.compute_bias` [1, H, T, T] of `length` positions, its gradient summed in order.

    The stock backward adds T * T rows: 12 ms for 508 positions, here 2 (two Zen 5 cores).
    """
    distances = torch.arange(1 - length, length)
    # It has neither a public name nor types.
    buckets = attention._relative_position_bucket(  # type: ignore[no-untyped-call]  # noqa: SLF001
        distances,
        bidirectional=not attention.is_decoder,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    values = attention.relative_attention_bias(buckets)  # [2 T - 1, H]
    by_distance: Tensor = _ByDistance.apply(values)  # type: ignore[no-untyped-call]
    return by_distance[None]
