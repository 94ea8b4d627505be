"""FlexAttention (Dong et al. 2024, arXiv 2412.05496) over packed rows, and the choice of attention.

FlexAttention has no dropout, since its kernels never hold the attention weights. Here it is exact
in two passes. With scores of dropped pairs at minus infinity, a pass gives the sum over the kept
ones divided by *their* sum of exponentials; its logarithm, and that of all pairs from a second
pass, turn this into a division by the sum over all:

    sum_kept(e^s v) / sum_all(e^s) / (1 - p) = pass_1 * e^(lse_1 - lse_2) / (1 - p)

Which pairs are dropped is a hash of (update, layer, head, query, key), where a query and a key are
tokens of an example: the same wherever the example stands (`keyed_dropout.py`). The attention is
chosen by rule and no timing: what a run computes must not depend on the machine's load. A GPU's
kernels that fail on a small batch, or compute other numbers than the definition, are passed over
for some of smaller blocks, and the reason reported.

Letters: R rows, H heads, T queries, S keys, d head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
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
from toque.models.forward.cpu_linear import kind_of
from toque.models.forward.keyed_dropout import PAIR_STEPS, Pair, drawn, next_pair, of_heads
from toque.models.forward.varlen_attention import as_attended, planned

NAME: Final = "toque_flex"  # name of this attention in transformers' registry
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_RECOMPILES: Final = 64
"""Kernels of one process: an encoder's, a decoder's, across, each trained, evaluated, dropped, and
for whole and for last micro-batches."""
_LSE_COLUMNS: Final = 16  # of values in the pass that only sums up: the fewest a kernel takes
Options = Mapping[str, int]  # `kernel_options` of `flex_attention`
Kernels = tuple[Options, Options]  # of kernels that add no bias, and of those that add one
# One kind of kernel: rows of fewer than 128 queries would have another. torch chooses the blocks.
_TORCHS: Final[Options] = {"FORCE_USE_FLEX_ATTENTION": 1}
_SIZES: Final = ((128, 64), (64, 64), (64, 32), (32, 32))
_FORWARD: Final = tuple({"BLOCK_M": m, "BLOCK_N": n} for m, n in _SIZES)
"""Tried in turn: blocks of M queries x N keys. A bias takes shared memory and registers; with
128 x 64 one like T5's was faster on an H100 (github.com/pytorch/pytorch/issues/138493)."""
_BACKWARD: Final = tuple({f"BLOCK_{m}": n for m in ("M1", "N1", "M2", "N2")} for n in (64, 32))


@dataclass(frozen=True)
class BlockMasks:
    """Pairs of positions that attend in a micro-batch, for every layer."""

    own: BlockMask  # self-attention
    across: BlockMask | None = None  # cross-attention, decoder to encoder; None without one
    by: Kernels = (_TORCHS, _TORCHS)
    near: BlockMask | None = None  # `own` within the sliding window, of layers that have one


def decoder_masks(
    batch: DecoderBatch, by: Kernels = (_TORCHS, _TORCHS), *, window: int | None = None
) -> BlockMasks:
    """The masks of a decoder-only model's micro-batch."""
    numbers = batch.segments
    own = _block_mask(numbers, numbers, causal=True)
    if window is None or window >= numbers.shape[1]:
        return BlockMasks(own, by=by)
    return BlockMasks(own, None, by, _block_mask(numbers, numbers, window=window))


def encoder_decoder_masks(batch: EncoderDecoderBatch, by: Kernels) -> tuple[BlockMasks, BlockMasks]:
    """The masks of a T5's encoder and decoder."""
    source, target = batch.source_segments, batch.target_segments
    own, across = _block_mask(target, target, causal=True), _block_mask(target, source)
    return BlockMasks(_block_mask(source, source), by=by), BlockMasks(own, across, by)


def _block_mask(
    queries: Tensor, keys: Tensor, *, causal: bool = False, window: int = 0
) -> BlockMask:
    """The mask of [R, T] and [R, S] segment numbers: within a segment, and not to later keys.

    With a window also not to keys that lie so far back; segments are runs of consecutive tokens.
    """

    def together(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[b, i] == keys[b, j]

    def together_and_earlier(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == keys[b, j]) & (i >= j)

    def near(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == keys[b, j]) & (i >= j) & (i - j < window)

    # Compiled on a GPU, it looks at every pair without a tensor of all of them.
    make = create_block_mask if queries.device.type == "cpu" else _compiled(create_block_mask)
    mask: BlockMask = make(
        near if window else together_and_earlier if causal else together,
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
    _mask: Tensor | None = None,
    *,
    plan: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it: [R, H, T, d] each, to [R, T, H, d]."""
    plan = planned(plan, more)
    query, key, value = as_attended(query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    across = plan.across if getattr(module, "is_decoder", False) and not module.is_causal else None
    mask = plan.own if across is None else across
    if sliding_window and plan.near is not None:
        mask = plan.near
    bias = position_bias if across is None else None  # T5 passes its cross-attention one of zeros
    how: Any = {"scale": scale, "dropout": dropout, "options": plan.by[bias is not None]}
    how["pair"] = next_pair(module, dropout)
    return attend(query, key, value, mask, bias=bias, cap=softcap, **how).transpose(1, 2), None


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
    pair: Pair | None = None,
    cap: float | None = None,
    options: Options = _TORCHS,
    by: Callable[..., Any] | None = None,
) -> Tensor:
    """softmax(scale * q @ k.T + bias) @ v where the mask allows; 0 where it allows nothing.

    With a cap c, scores s are c * tanh(s / c); such a model has no bias.
    Queries are [R, H, T, d], keys and values [R, H, S, d]. Of the bias [1, H, T, S] each row adds
    to a gradient of its own, summed in order: the same bits every time. What is dropped depends on
    the keys of a `pair`; without one it is random. `by` replaces the kernels.
    """
    rows = None if bias is None else bias.expand(len(query), -1, -1, -1)
    by = by or _kernel(query, rows)
    how: dict[str, Any] = {"block_mask": block_mask, "scale": scale, "kernel_options": options}
    first = with_bias(rows) if cap is None else _capped(cap)
    if dropout == 0.0:
        output: Tensor = by(query, key, value, score_mod=first, **how)
        return output
    if pair is None:
        sizes = ((len(query), side.shape[2]) for side in (query, key))
        first_key, second_key = (
            torch.randint(-(2**31), 2**31, size, device=query.device) for size in sizes
        )
        pair = (first_key, second_key)
    how["return_aux"] = AuxRequest(lse=True)
    capped = None if cap is None else first
    numbers = of_heads(pair[0], query.shape[1])
    drop = _dropped(rows, (numbers, pair[1].int()), round(dropout * PAIR_STEPS), capped)
    kept, of_kept = by(query, key, value, score_mod=drop, **how)
    few = value.detach()[..., :_LSE_COLUMNS]
    _, of_all = by(query, key, few, score_mod=first, **how)
    # Where nothing is kept, of a whole row of padding say, both may be minus infinity.
    nothing = of_kept.lse.isneginf()
    share = (of_kept.lse - of_all.lse.masked_fill(nothing, 0.0)).masked_fill(nothing, -torch.inf)
    factor = share.exp() * (PAIR_STEPS / (PAIR_STEPS - round(dropout * PAIR_STEPS)))
    scaled: Tensor = (kept * factor[..., None]).to(value.dtype)
    return scaled


def _capped(cap: float) -> ScoreMod:
    def capped(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


def with_bias(bias: Tensor | None) -> ScoreMod | None:
    """Add [R, H, T, S] to the scores; None without one."""
    if bias is None:
        return None

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, i, j]

    return add_bias


def _dropped(
    bias: Tensor | None, pair: Pair, threshold: int, capped: ScoreMod | None = None
) -> ScoreMod:
    """Drop pairs of numbers [R, H, T] of the queries and [R, S] of the keys, all int32."""
    queries, keys = pair

    def drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = drawn(queries[b, h, i], keys[b, j]) >= threshold
        return torch.where(kept, score, -float("inf"))

    if capped is not None:

        def cap_and_drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            kept = drawn(queries[b, h, i], keys[b, j]) >= threshold
            return torch.where(kept, capped(score, b, h, i, j), -float("inf"))

        return cap_and_drop
    if bias is None:
        return drop

    def add_bias_and_drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = drawn(queries[b, h, i], keys[b, j]) >= threshold
        return torch.where(kept, score + bias[b, h, i, j], -float("inf"))

    return add_bias_and_drop


def _kernel(query: Tensor, bias: Tensor | None) -> Callable[..., Any]:
    if query.device.type == "cpu":
        return reference if kind_of(query) == "cpu" else partial(kernel_shapes, bias=bias)
    if torch.compiler.is_compiling():
        return cast("Callable[..., Any]", flex_attention)
    return _compiled(flex_attention)


def kernel_shapes(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    return_aux: AuxRequest | None = None,
    **_: Any,
) -> Any:
    """`flex_attention` by the tensors that its kernels keep and make, without content."""
    output, sums = _KernelShapes.apply(query, key, value, bias)  # type: ignore[no-untyped-call]
    return output if return_aux is None else (output, AuxOutput(lse=sums))


class _KernelShapes(torch.autograd.Function):
    """Attention keeps its inputs, its output and a number for each query (arXiv 2205.14135)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, bias, output, sums)
        return output, sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, bias, _, sums = ctx.saved_tensors
        _products = torch.empty_like(sums)  # of each output with its slope
        slopes = [torch.empty_like(tensor) for tensor in inputs]
        # Each row's own: an expanded bias has a gradient of its whole shape.
        wanted = bias is not None and ctx.needs_input_grad[3]
        return (*slopes, bias.new_empty(bias.shape) if wanted else None)


@cache
def _compiled(function: Callable[..., Any], *, strict: bool = False) -> Callable[..., Any]:
    """FlexAttention's kernels are made by the compiler for each pair of mask and score function.

    Strict: too much shared memory is an error; torch 2.13 would make loads wait for each other.
    """
    from torch._dynamo import config  # takes a second to load, and only here it is needed

    # Past the limit the scores of all pairs would be computed instead, without a word.
    config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
    known = torch._inductor.list_options() if strict else []  # noqa: SLF001
    retry = "triton.dynamic_disable_pipelining"
    return torch.compile(function, options={retry: False} if retry in known else None)


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: float,
    return_aux: AuxRequest | None = None,
    **_: Any,
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
_RAISED_BY: Final = re.compile(r"^\S+ raised:\s+")  # in front of a compiler's own words
_SHARED_MEMORY: Final = re.compile(r"Required: (\d+)\D+limit: ?(\d+)")
_TOO_MUCH: Final = "torch's own need {:,} bytes of shared memory and the card has {:,}"
_TOLERANCE: Final = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest distance from the definition in float32, as a share of the largest number; products of
float32 may be in TF32. A kernel that sees a neighbour is off by about 1."""


@dataclass(frozen=True)
class KernelChoice:
    """The largest blocks whose kernels work, and why torch's own do not."""

    options: Options | None  # None: there are none
    why: str = ""

    def __str__(self) -> str:
        """Name the blocks and the reason: "blocks of 64 x 64, since torch's own need ..."."""
        if not self.why:
            return "torch's own blocks"
        of, m1 = self.options or {}, "BLOCK_M1"
        sizes = [f"blocks of {of['BLOCK_M']} x {of['BLOCK_N']}"] if "BLOCK_M" in of else []
        sizes += [f"backward blocks of {of[m1]} x {of[m1]}"] if m1 in of else []
        return f"{' and '.join(sizes) or 'none'}, since {self.why}"


@dataclass(frozen=True)
class Choice:
    """An attention, and why no better one was taken."""

    name: Attention
    notes: tuple[str, ...] = ()
    options: Kernels = (_TORCHS, _TORCHS)
    blocks: str = ""  # of FlexAttention on a GPU, in words


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
    encoder, size = family_of(core.config).is_encoder_decoder, head_size(core.config)
    plain, biased = (kernels_on(device, dtype, size, biased=b) for b in (False, encoder))
    if plain.options is None or biased.options is None:
        why = (plain if plain.options is None else biased).why
        return Choice("dense", (f"attention without masks by flex is not used: {why}",))
    words = str(plain) if plain == biased else f"{plain}; with T5's bias, {biased}"
    return Choice("flex", options=(plain.options, biased.options), blocks=words)


@cache
def kernels_on(
    device: torch.device, dtype: torch.dtype, size: int, *, biased: bool
) -> KernelChoice:
    """The kernels, those of dropout too, that work on a GPU with heads of `size` columns."""
    forward, backward, options, first = [*_FORWARD], [*_BACKWARD], _TORCHS, ""
    while True:
        try:
            with (
                torch.random.fork_rng([device]),
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast(device.type, enabled=False),
            ):
                distance = _distance(device, dtype, size, options, biased=biased)
            if distance <= _TOLERANCE[dtype]:
                return KernelChoice(options, first)
            said = f"torch's own are off by {distance:.1e}"
        except Exception as error:  # noqa: BLE001 - whatever the kernel or its compiler raises
            said = _RAISED_BY.sub("", str(error).strip()) or repr(error)
        needs = _SHARED_MEMORY.search(said)
        why = _TOO_MUCH.format(*map(int, needs.groups())) if needs else said.splitlines()[0]
        first = first or why
        smaller = backward if "_backward" in said else forward
        if not smaller:
            return KernelChoice(None, first)
        options = {**options, **smaller.pop(0)}


def _distance(
    device: torch.device, dtype: torch.dtype, size: int, by: Options, *, biased: bool
) -> float:
    """The largest distance of outputs and gradients from attention by its definition."""
    torch.manual_seed(0)
    rows, length, heads = 2, 320, 2
    segments = torch.zeros(rows, length, dtype=torch.int32)
    for row, ends in enumerate(((70, 200, 310), (250, 256, 320))):
        for number, end in reversed(list(enumerate(ends, start=1))):
            segments[row, :end] = number
    mask = _block_mask(segments.to(device), segments.to(device), causal=True)
    shapes = [(rows, heads, length, size)] * 4 + [(1, heads, length, length)] * biased
    slope, *drawn = (torch.randn(shape, device=device) for shape in shapes)
    how: Any = {"scale": size**-0.5, "dropout": 0.1, "options": by}

    def computed(dtype: torch.dtype, by: Callable[..., Any] | None) -> list[Tensor]:
        torch.manual_seed(1)  # of the pairs that are dropped
        q, k, v = (t.to(dtype).requires_grad_() for t in drawn[:3])
        added = [t.clone().requires_grad_() for t in drawn[3:]]
        out = attend(q, k, v, mask, bias=added[0] if added else None, by=by, **how)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *added), slope.to(out.dtype))]

    real = (segments > 0).to(device)[:, None, :, None]
    kernels = None if device.type == "cpu" else _compiled(flex_attention, strict=True)
    pairs = zip(computed(dtype, kernels), computed(torch.float32, reference), strict=True)
    apart = []
    for mine, true in pairs:
        seen = real if true.shape[-1] == size else torch.ones_like(true, dtype=torch.bool)
        apart.append(((mine.float() - true) * seen).abs().max() / (true * seen).abs().max())
    return float(torch.stack(apart).max())  # NaN if there is one
