"""Unpadded forward: the padding of a packed batch removed, one row of all real tokens, for a CPU.

Variable-length attention does not care where a row ends, and every other layer works token by
token. So on a CPU the padding is removed before the first layer and put back, as zeros, after the
last. How rows are packed then changes the order of the work and not its amount.

In bfloat16 the number of tokens is rounded up, see `padded_length`.

Letters: R rows, L row length, N real tokens of all rows, D hidden size, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.t5.modeling_t5 import T5Attention

from toque.batch import DecoderBatch, EncoderDecoderBatch
from toque.models.forward.bf16_linear import in_bf16, padded_length
from toque.models.forward.varlen_attention import AttentionPlan, spans, varlen_attention


@dataclass(frozen=True)
class RealTokens:
    """Indices of a batch's real tokens.

    Attributes:
        where: [N] their indices in the flattened [R * L] batch, ascending.
        numbers: [1, N] segment numbers, different for every example of the batch.
        shape: (R, L).
        extra: Tokens to compute besides, which no other sees.
    """

    where: Tensor
    numbers: Tensor
    shape: tuple[int, int]
    extra: int

    @classmethod
    def of(cls, segments: Tensor, *, step: int) -> RealTokens:
        """The real tokens of [R, L] segment numbers; `step` is above all numbers of a row."""
        rows, length = segments.shape
        where = segments.reshape(-1).nonzero().squeeze(1)
        unique = segments + step * torch.arange(rows, dtype=segments.dtype)[:, None]
        extra = padded_length(len(where)) - len(where) if in_bf16(segments) else 0
        return cls(where, unique.reshape(-1)[where][None], (rows, length), extra)

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


def unpadded_decoder(core: PreTrainedModel, batch: DecoderBatch) -> Tensor:
    """The last hidden states [R, L, D] of a decoder-only model."""
    real = RealTokens.of(batch.segments, step=_step(batch.segments))
    plan = AttentionPlan(spans(real.numbers))
    with varlen_attention(core):
        hidden = decoder_rows(core, real.taken(batch.tokens), real.taken(batch.positions), plan)
    return real.put_back(hidden)


def unpadded_encoder_decoder(core: PreTrainedModel, batch: EncoderDecoderBatch) -> Tensor:
    """The decoder's last hidden states [R, T, D] of a T5, before any scaling for the head."""
    step = max(_step(batch.source_segments), _step(batch.target_segments))
    source = RealTokens.of(batch.source_segments, step=step)
    target = RealTokens.of(batch.target_segments, step=step)
    own = AttentionPlan(spans(source.numbers))
    both = AttentionPlan(spans(target.numbers), spans(target.numbers, source.numbers))
    tokens = source.taken(batch.source_tokens), target.taken(batch.target_tokens)
    with varlen_attention(core):
        hidden = t5_rows(core, *tokens, (own, both), longest=(own.longest, both.longest))
    return target.put_back(hidden)


def decoder_rows(core: PreTrainedModel, tokens: Tensor, positions: Tensor, plan: object) -> Tensor:
    """The last hidden states of a decoder-only model, its layers' attention handed a plan."""
    output = core.base_model(
        # Embeddings, not tokens: without a mask GPT-2 would look for padding among the tokens.
        inputs_embeds=core.get_input_embeddings()(tokens),
        position_ids=positions,
        use_cache=False,
        plan=plan,
    )
    hidden: Tensor = output.last_hidden_state
    return hidden


def t5_rows(
    core: PreTrainedModel,
    source: Tensor,
    target: Tensor,
    plans: tuple[object, object],
    *,
    longest: tuple[int, int],
) -> Tensor:
    """The last hidden states of a T5's decoder, before any scaling for the head.

    Args:
        core: The model.
        source: Rows of tokens that the encoder reads.
        target: Rows of tokens that the decoder reads.
        plans: Handed to the encoder's and the decoder's attention.
        longest: Positions that attention looks at, at most, in encoder and decoder.
    """
    encoder, decoder = core.get_submodule("encoder"), core.get_submodule("decoder")
    read, written = embed_both(encoder, decoder, source, target)
    states = t5_stack(encoder, read, plans[0], None, longest=longest[0])
    return t5_stack(decoder, written, plans[1], states, longest=longest[1])


def embed_both(
    encoder: nn.Module, decoder: nn.Module, source: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Both sides' embeddings; in bfloat16 by one look-up where they share the table.

    The gradient of a look-up is a table of zeros with some rows filled: one instead of two, each of
    66 MB for T5's 32,100 tokens of 512. In float32 the sums keep their order.
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


def _step(segments: Tensor) -> int:
    return int(segments.max()) + 1


def t5_stack(
    stack: nn.Module, embedded: Tensor, plan: object, states: Tensor | None, *, longest: int
) -> Tensor:
    """T5Stack.forward of transformers 5, with the position bias of the longest example only.

    The stock one makes a bias for every pair of the row's positions, [H, N, N]; here N may be the
    whole batch, and an example never looks further than its own length.

    Args:
        stack: Encoder or decoder.
        embedded: Rows of tokens' embeddings.
        plan: Handed to every layer's attention.
        states: The encoder's, for a decoder.
        longest: Positions that attention looks at, at most.
    """
    first = stack.get_submodule("block.0.layer.0.SelfAttention")
    if in_bf16(embedded):
        bias = position_bias(cast("T5Attention", first), longest)
    else:
        bias = first.compute_bias(longest, longest)  # type: ignore[operator]
    # Cross-attention has no bias; the stock layer would make one of zeros. `_attend` ignores it.
    no_bias = bias.new_empty(0)
    dropout = stack.get_submodule("dropout")
    hidden = dropout(embedded)
    for block in stack.get_submodule("block").children():
        hidden, _, _ = block(
            hidden,
            position_bias=bias,
            encoder_hidden_states=states,
            encoder_decoder_position_bias=no_bias,
            plan=plan,
        )
    normed: Tensor = dropout(stack.get_submodule("final_layer_norm")(hidden))
    return normed


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

    The stock one looks a row up for each of T * T pairs, and its backward adds as many rows: 12 ms
    for 508 positions, here 2 (two Zen 5 cores).
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
