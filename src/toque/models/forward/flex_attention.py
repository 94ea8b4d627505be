"""FlexAttention (Dong et al. 2024, arXiv 2412.05496) over packed rows, and the choice of attention.

FlexAttention has no dropout, since its kernels never hold the attention weights. Here it is exact
in two passes. With scores of dropped pairs at minus infinity, a pass gives the sum over the kept
ones divided by *their* sum of exponentials; its logarithm, and that of all pairs from a second
pass, turn this into a division by the sum over all:

    sum_kept(e^s v) / sum_all(e^s) / (1 - p) = pass_1 * e^(lse_1 - lse_2) / (1 - p)

Which pairs are dropped is a hash of (seed, row, head, query, key), so that backward and activation
checkpointing drop the same ones. The attention is chosen by rule and no timing: what a run computes
must not depend on the machine's load. A GPU's kernel that fails on a small batch, or computes other
numbers than the definition, is passed over, and the reason reported.

Letters: R rows, H heads, T queries, S keys, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxOutput,
    AuxRequest,
    BlockMask,
    create_block_mask,
    create_mask,
    flex_attention,
)
from transformers import AttentionInterface

from toque.batch import DecoderBatch, EncoderDecoderBatch
from toque.models.families import family_of, head_size, unwrapped
from toque.models.forward.varlen_attention import as_attended

NAME: Final = "toque_flex"  # name of this attention in transformers' registry
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_RECOMPILES: Final = 64
"""Kernels of one process: an encoder's, a decoder's, across, each trained, evaluated, dropped, and
for whole and for last micro-batches."""
_STEPS: Final = 1 << 24
_LSE_COLUMNS: Final = 16  # of values in the pass that only sums up: the fewest a kernel takes


@dataclass(frozen=True)
class BlockMasks:
    """Pairs of positions that attend in a micro-batch, for every layer."""

    own: BlockMask  # self-attention
    across: BlockMask | None = None  # cross-attention, decoder to encoder; None without one


def decoder_masks(batch: DecoderBatch) -> BlockMasks:
    """The masks of a decoder-only model's micro-batch."""
    return BlockMasks(_block_mask(batch.segments, batch.segments, causal=True))


def encoder_decoder_masks(batch: EncoderDecoderBatch) -> tuple[BlockMasks, BlockMasks]:
    """The masks of a T5's encoder and decoder."""
    source, target = batch.source_segments, batch.target_segments
    own = _block_mask(target, target, causal=True)
    return BlockMasks(_block_mask(source, source)), BlockMasks(own, _block_mask(target, source))


def _block_mask(queries: Tensor, keys: Tensor, *, causal: bool = False) -> BlockMask:
    """The mask of [R, T] and [R, S] segment numbers: within a segment, and not to later keys."""

    def together(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[b, i] == keys[b, j]

    def together_and_earlier(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == keys[b, j]) & (i >= j)

    # Compiled on a GPU, it looks at every pair without a tensor of all of them.
    make = create_block_mask if queries.device.type == "cpu" else _compiled(create_block_mask)
    mask: BlockMask = make(
        together_and_earlier if causal else together,
        len(queries),
        None,
        queries.shape[1],
        keys.shape[1],
        device=str(queries.device),
    )
    return mask


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    plan: BlockMasks,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, T, d] each, to [R, T, H, d]."""
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    across = plan.across if getattr(module, "is_decoder", False) and not module.is_causal else None
    mask = plan.own if across is None else across
    bias = position_bias if across is None else None  # T5 passes its cross-attention one of zeros
    output = attend(query, key, value, mask, bias=bias, scale=scale, dropout=dropout)
    return output.transpose(1, 2), None


AttentionInterface.register(NAME, _attend)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block_mask: BlockMask,
    *,
    bias: Tensor | None,
    scale: float,
    dropout: float,
) -> Tensor:
    """softmax(scale * q @ k.T + bias) @ v where the mask allows; 0 where it allows nothing.

    Queries are [R, H, T, d], keys and values [R, H, S, d]. Of the bias [1, H, T, S] each row adds
    to a gradient of its own, summed in order: the bits are the same every time.
    """
    rows = None if bias is None else bias.expand(len(query), -1, -1, -1)
    how: dict[str, Any] = {"block_mask": block_mask, "scale": scale}
    if dropout == 0.0:
        output: Tensor = _kernel(query)(query, key, value, score_mod=with_bias(rows), **how)
        return output
    seeds = torch.randint(-(2**31), 2**31, (len(query),), dtype=torch.int32, device=query.device)
    how["return_aux"] = AuxRequest(lse=True)
    kept, of_kept = _kernel(query)(
        query, key, value, score_mod=_dropped(rows, seeds, round(dropout * _STEPS)), **how
    )
    few = value.detach()[..., :_LSE_COLUMNS]
    _, of_all = _kernel(query)(query, key, few, score_mod=with_bias(rows), **how)
    # Where nothing is kept, of a whole row of padding say, both may be minus infinity.
    nothing = of_kept.lse.isneginf()
    share = (of_kept.lse - of_all.lse.masked_fill(nothing, 0.0)).masked_fill(nothing, -torch.inf)
    factor = share.exp() * (_STEPS / (_STEPS - round(dropout * _STEPS)))
    scaled: Tensor = (kept * factor[..., None]).to(value.dtype)
    return scaled


def with_bias(bias: Tensor | None) -> ScoreMod | None:
    """Add [R, H, T, S] to the scores; None without one."""
    if bias is None:
        return None

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, i, j]

    return add_bias


def _dropped(bias: Tensor | None, seeds: Tensor, threshold: int) -> ScoreMod:
    def drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = drawn(seeds[b], h, i, j) >= threshold
        return torch.where(kept, score, -float("inf"))

    if bias is None:
        return drop

    def add_bias_and_drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = drawn(seeds[b], h, i, j) >= threshold
        return torch.where(kept, score + bias[b, h, i, j], -float("inf"))

    return add_bias_and_drop


def drawn(seed: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A number from 0 to 2^24 - 1 for each pair, all int32: even, and the same every time."""
    number = _mixed(seed + head * -1640531527)
    number = _mixed(number + query * -1640531527)
    return (_mixed(number + key * -1640531527) >> 8) & (_STEPS - 1)


def _mixed(number: Tensor) -> Tensor:
    """Wellons' lowbias32 (2018), a bijection of 32 bits; copies of the sign are masked away."""
    number = number ^ ((number >> 16) & 0xFFFF)
    number = number * 2146121005
    number = number ^ ((number >> 15) & 0x1FFFF)
    number = number * -2073254261
    return number ^ ((number >> 16) & 0xFFFF)


def _kernel(query: Tensor) -> Callable[..., Any]:
    if query.device.type == "cpu":
        return reference
    if torch.compiler.is_compiling():
        return cast("Callable[..., Any]", flex_attention)
    return _compiled(flex_attention)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlexAttention's kernels are made by the compiler for each pair of mask and score function."""
    from torch._dynamo import config  # takes a second to load, and only here it is needed

    # Past the limit the scores of all pairs would be computed instead, without a word.
    config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
    return torch.compile(function)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: float,
    return_aux: AuxRequest | None = None,
) -> Any:
    """`flex_attention` by its definition; PyTorch's own has no backward on a CPU."""
    rows, heads, queries, keys = *query.shape[:3], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(exact) * scale
    if score_mod is not None:
        sizes = (rows, heads, queries, keys)
        indices = [torch.arange(n, dtype=torch.int32, device=query.device) for n in sizes]
        each: Callable[..., Tensor] = score_mod
        for dim in (3, 2, 1, 0):
            each = torch.vmap(each, in_dims=(0, *(0 if n == dim else None for n in range(4))))
        scores = each(scores, *indices)
    allowed = create_mask(block_mask.mask_mod, rows, None, queries, keys, device=query.device)
    scores = scores.masked_fill(~allowed, -torch.inf)
    nothing = scores.isneginf().all(-1, keepdim=True)
    shares = scores.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
    output = shares.to(value.dtype) @ value
    if return_aux is None:
        return output
    lse = scores.masked_fill(nothing, 0.0).logsumexp(-1).masked_fill(nothing[..., 0], -torch.inf)
    return output, AuxOutput(lse=lse)


Attention = Literal["segments", "flex", "dense"]
Asked = Literal["auto", "segments", "flex", "dense"]
_ASKED: WeakKeyDictionary[nn.Module, Asked] = WeakKeyDictionary()
_TOLERANCE: Final = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest distance from the definition in float32, as a share of the largest number; products of
float32 may be in TF32. A kernel that sees a neighbour is off by about 1."""


@dataclass(frozen=True)
class Choice:
    """An attention, and why no better one was taken."""

    name: Attention
    notes: tuple[str, ...] = ()


def use_attention(model: nn.Module, asked: Asked) -> None:
    """Let this model's packed forward use one attention; auto: the best that works."""
    _ASKED[unwrapped(model)] = asked


def attention_of(model: nn.Module, device: torch.device) -> Choice:
    """The attention of packed forwards of this model on `device`, in the current precision.

    segments: by example, on a CPU. flex: on a GPU. dense: masks of all pairs, which work
    everywhere.
    """
    core = unwrapped(model)
    asked = _ASKED.get(core, "auto")
    if asked == "dense" or device.type not in {"cpu", "cuda"}:
        return Choice("dense")
    if device.type == "cpu":
        if asked == "flex":
            return Choice("flex")  # by its definition
        # a compiled module would be compiled anew for every filling of a row.
        compiled = torch.compiler.is_compiling() or any(
            getattr(module, "_compiled_call_impl", None) is not None for module in core.modules()
        )
        return Choice("dense" if compiled else "segments")
    if asked == "segments":
        note = f"attention by segments is not used: it needs a CPU, not {device}"
        return Choice("dense", (note,))
    dtype = core.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    encoder = family_of(core.config).is_encoder_decoder
    why = _failure(device, dtype, core.config.d_kv if encoder else head_size(core.config))
    if why is None:
        return Choice("flex")
    return Choice("dense", (f"attention without masks by flex is not used: {why}",))


@cache
def _failure(device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Reason that FlexAttention cannot be used; None if it computes what it should."""
    try:
        with (
            torch.random.fork_rng([device]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            distance = _distance(device, dtype, size)
    except Exception as error:  # noqa: BLE001 - whatever the kernel or its compiler raises
        return (str(error).strip() or repr(error)).splitlines()[0]
    return None if distance <= _TOLERANCE[dtype] else f"its numbers are off by {distance:.1e}"


def _distance(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The largest distance of outputs and gradients from attention by its definition."""
    torch.manual_seed(0)
    rows, length, heads = 2, 320, 2
    segments = torch.zeros(rows, length, dtype=torch.int32)
    for row, ends in enumerate(((70, 200, 310), (250, 256, 320))):
        for number, end in reversed(list(enumerate(ends, start=1))):
            segments[row, :end] = number
    batch = DecoderBatch(segments, ((), ()), segments, segments, segments).to(device)
    mask = decoder_masks(batch).own
    shapes = [(rows, heads, length, size)] * 4 + [(1, heads, length, length)]
    *drawn, slope, bias = (torch.randn(shape, device=device) for shape in shapes)

    def computed(dtype: torch.dtype, *, exact: bool) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in drawn)
        added, scale = bias.clone().requires_grad_(), size**-0.5
        if exact:
            score = with_bias(added.expand(rows, -1, -1, -1))
            out = reference(q, k, v, score_mod=score, block_mask=mask, scale=scale)
        else:
            out = attend(q, k, v, mask, bias=added, scale=scale, dropout=0.0)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, added), slope.to(out.dtype))]

    real = (segments > 0).to(device)[:, None, :, None]
    pairs = zip(computed(dtype, exact=False), computed(torch.float32, exact=True), strict=True)
    apart = []
    for mine, true in pairs:
        seen = real if true.shape[-1] == size else torch.ones_like(true, dtype=torch.bool)
        gap = ((mine.float() - true) * seen).abs().max() / (true * seen).abs().max()
        apart.append(float(gap))
    return max(apart)
