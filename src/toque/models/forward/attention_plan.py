"""Plan of attention: what kernels are told of packed rows, ends of examples or blocks of a mask.

Made for a whole update's batch at once, where the batch is made; its micro-batches are cut from it
row by row. Everything is computed by tensor operations whose shapes the host knows, so that on a
GPU nothing waits, and shapes are the same from batch to batch.

Letters: R rows, L tokens of a row, K examples of a row and its padding, Q and S blocks of queries
and of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from toque.batch import DecoderBatch, EncoderDecoderBatch

Kernel = Literal["flash", "flex"]
AnyBatch = TypeVar("AnyBatch", DecoderBatch, EncoderDecoderBatch)
BLOCK: Final = 128
"""Tokens of a block of the mask, as FlexAttention's kernels take it."""
_SLOTS: Final = 8
"""The number of ends of a row is rounded up to a multiple: few shapes to compile for."""
_PADDING: Final = 1 << 30
"""Segment number of padding here, where rows are in ascending order."""
_BEYOND: Final = _PADDING + 1
"""Segment number of what fills a row's last block."""
_BLOCK_TENSORS: Final = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


@dataclass(frozen=True)
class Runs:
    """Examples of all rows, one after the other, as variable-length kernels take them.

    Attributes:
        ends: [R * K + 1] int32, where each begins, and the end; some are empty.
        longest: tokens of one, at most.
    """

    ends: Tensor
    longest: int


@dataclass(frozen=True)
class KernelPlan:
    """Who attends to whom in a micro-batch, for every layer."""

    own: Runs | BlockMask
    """Self-attention."""
    across: BlockMask | None = None
    """Cross-attention, decoder to encoder; None without one."""


def planned(batch: AnyBatch, kernel: Kernel) -> AnyBatch:
    """The same batch with what `kernel` needs to know of its rows.

    In every row examples are numbered in ascending order and padding comes last.
    """
    if batch.attention and ("ends" in batch.attention) == (kernel == "flash"):
        return batch
    if isinstance(batch, DecoderBatch):
        if kernel == "flash":
            ends = _ends(batch.segments, batch.example_ids)
            return replace(batch, attention={"ends": ends}, longest=_longest(ends))
        return replace(batch, attention=_named("own", _blocks(batch.segments, causal=True)))
    source, target = batch.source_segments, batch.target_segments
    blocks = {
        "source": _blocks(source),
        "own": _blocks(target, causal=True),
        "across": _blocks(target, source),
    }
    return replace(
        batch, attention={k: t for name, of in blocks.items() for k, t in _named(name, of).items()}
    )


def decoder_plan(batch: DecoderBatch, kernel: Kernel) -> KernelPlan:
    """The plan of a decoder-only model's micro-batch."""
    batch = planned(batch, kernel)
    rows, length = batch.segments.shape
    if kernel == "flex":
        return KernelPlan(_block_mask(batch.attention, "own", batch.segments, causal=True))
    begins = length * torch.arange(rows, dtype=torch.int32, device=batch.segments.device)
    ends = (batch.attention["ends"] + begins[:, None]).view(-1)
    return KernelPlan(
        Runs(torch.cat((ends.new_zeros(1), ends)), min(length, batch.longest or length))
    )


def encoder_decoder_plans(batch: EncoderDecoderBatch) -> tuple[KernelPlan, KernelPlan]:
    """The plans of a T5's encoder and decoder, for FlexAttention."""
    known = planned(batch, "flex").attention
    source, target = batch.source_segments, batch.target_segments
    return (
        KernelPlan(_block_mask(known, "source", source)),
        KernelPlan(
            _block_mask(known, "own", target, causal=True),
            _block_mask(known, "across", target, source),
        ),
    )


def _ends(segments: Tensor, example_ids: tuple[tuple[int, ...], ...]) -> Tensor:
    """[R, K] int32: the end of each example in its row; from the last one on, of the padding.

    >>> _ends(torch.tensor([[1, 1, 2, 0]]), ((7, 9),)).tolist()
    [[2, 3, 4, 4, 4, 4, 4, 4]]
    """
    rows, length = segments.shape
    # From the host's list: counting segments would wait for the device.
    examples = max(map(len, example_ids), default=0)
    slots = -(-(examples + 1) // _SLOTS) * _SLOTS
    numbers = torch.arange(2, slots + 2, dtype=segments.dtype, device=segments.device)
    numbers[examples:] = _BEYOND  # padding's run ends with the row
    found = torch.searchsorted(_ascending(segments), numbers.expand(rows, slots).contiguous())
    return found.clamp_(max=length).int()


def _longest(ends: Tensor) -> int | None:
    """Tokens of the longest run, rounded up to a power of two; None where the host would wait.

    A kernel begins work for as many tokens of every run, so that the row's length is too much.
    """
    if ends.device.type != "cpu":
        return None
    longest = int(ends.diff(prepend=ends.new_zeros(len(ends), 1)).amax()) if ends.numel() else 1
    return max(BLOCK, 1 << (longest - 1).bit_length())


def _ascending(segments: Tensor) -> Tensor:
    return torch.where(segments == 0, _PADDING, segments).contiguous()


def _named(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}


def _blocks(
    queries: Tensor, keys: Tensor | None = None, *, causal: bool = False
) -> dict[str, Tensor]:
    """The mask's blocks with something in them, as FlexAttention lists them, row by row.

    A block of queries and one of keys meet where their ranges of segments do. A block is full, and
    needs no mask, where all of both is one segment and causality hides nothing.
    """
    low, high = _range_of_blocks(queries)
    least, most = (low, high) if keys is None else _range_of_blocks(keys)
    q, s = low.shape[1], least.shape[1]
    meet = (low[:, :, None] <= most[:, None]) & (least[:, None] <= high[:, :, None])
    one = (low == high)[:, :, None] & (least == most)[:, None]
    full = meet & one & (low[:, :, None] == least[:, None])
    if causal:
        ranks = torch.arange(max(q, s), device=queries.device)
        meet &= ranks[:q, None] >= ranks[None, :s]
        full &= ranks[:q, None] > ranks[None, :s]
    mask = BlockMask.from_kv_blocks(*_listed(meet & ~full), *_listed(full), BLOCK_SIZE=BLOCK)
    found = {name: getattr(mask, name) for name in _BLOCK_TENSORS}
    # Of one layout, so that each forward of a compiled block finds what it was compiled for.
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _range_of_blocks(segments: Tensor) -> tuple[Tensor, Tensor]:
    """[R, blocks] the lowest and the highest segment number of each block."""
    rows, length = segments.shape
    blocks = -(-length // BLOCK)
    whole = segments.new_full((rows, blocks * BLOCK), _BEYOND)
    whole[:, :length] = _ascending(segments)
    parts = whole.view(rows, blocks, BLOCK)
    return parts.amin(-1), parts.amax(-1)


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """[R, Q, S] bool -> how many of each row of blocks, and which: [R, 1, Q] and [R, 1, Q, S]."""
    order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]


def _block_mask(
    known: Mapping[str, Tensor],
    name: str,
    queries: Tensor,
    keys: Tensor | None = None,
    *,
    causal: bool = False,
) -> BlockMask:
    others = queries if keys is None else keys

    def together(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[b, i] == others[b, j]

    def together_and_earlier(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == others[b, j]) & (i >= j)

    tensors: dict[str, Any] = {key: known[f"{name}.{key}"] for key in _BLOCK_TENSORS}
    return BlockMask(
        seq_lengths=(queries.shape[1], others.shape[1]),
        **tensors,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=together_and_earlier if causal else together,
    )
