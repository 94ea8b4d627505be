"""FlexAttention (Dong et al. 2024, arXiv 2412.05496) over packed rows, with dropout.

FlexAttention has no dropout, because its kernels never store the attention weights. Here dropout is
exact and needs two passes. In the first pass, the scores of dropped pairs are minus infinity, so
its output is divided by the sum over the kept pairs. The second pass computes the sum over all
pairs. The logarithms of both sums (lse) correct the output:

    sum_kept(e^s v) / sum_all(e^s) / (1 - p) = pass_1 * e^(lse_1 - lse_2) / (1 - p)

A hash of (update, layer, head, query, key) selects the dropped pairs. A query or key is identified
by its example and its position in that example, so masks do not depend on packing
(`keyed_dropout.py`).

A GPU's kernels are first tried on a small batch. If they fail, or differ from the definition of
attention, kernels with smaller blocks are tried, and the reason is reported.

Letters: R rows, H heads, T queries, S keys, d head size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, cast

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
from toque.models.forward.cpu_linear import kind_of
from toque.models.forward.keyed_dropout import (
    PAIR_STEPS,
    Pair,
    head_numbers,
    next_pair,
    pair_number,
)
from toque.models.forward.varlen_attention import (
    as_attended,
    is_cross_attention,
    planned,
)

NAME: Final = "toque_flex"  # name of this attention in transformers' registry
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
_MAX_RECOMPILES: Final = 64
"""Maximum number of compiled kernels per process: for encoder, decoder and cross-attention, for
training, evaluation and dropout, and for full and last micro-batches.
"""
_LSE_COLUMNS: Final = 16  # columns of values in the second pass, the kernels' minimum
Options = Mapping[str, int]  # `kernel_options` of `flex_attention`
Kernels = tuple[Options, Options]  # options for kernels without and with a bias
# Rows of fewer than 128 queries would otherwise use another kind of kernel.
_TORCH_BLOCKS: Final[Options] = {"FORCE_USE_FLEX_ATTENTION": 1}
DEFAULT_KERNELS: Final[Kernels] = (_TORCH_BLOCKS, _TORCH_BLOCKS)
"""Kernels with the block sizes that torch selects."""
_FORWARD: Final[tuple[Options, ...]] = tuple(
    {"BLOCK_M": queries, "BLOCK_N": keys}
    for queries, keys in ((128, 64), (64, 64), (64, 32), (32, 32))
)
"""Block sizes of the forward kernels, in the order of the attempts. A bias needs shared memory and
registers: on an H100, a bias like T5's was faster with 128 x 64 than with torch's own block size
(github.com/pytorch/pytorch/issues/138493)."""
_BACKWARD: Final[tuple[Options, ...]] = tuple(
    {"BLOCK_M1": size, "BLOCK_N1": size, "BLOCK_M2": size, "BLOCK_N2": size}
    for size in (64, 32)
)
"""Block sizes of the backward kernels, in the order of the attempts."""


@dataclass(frozen=True)
class BlockMasks:
    """Pairs of positions that attend to each other, for every layer of a micro-batch."""

    self_attention: BlockMask
    cross_attention: BlockMask | None = None  # from decoder to encoder
    kernels: Kernels = DEFAULT_KERNELS
    # Self-attention within the sliding window, for layers with a window.
    windowed: BlockMask | None = None


def decoder_masks(
    batch: DecoderBatch,
    kernels: Kernels = DEFAULT_KERNELS,
    *,
    window: int | None = None,
) -> BlockMasks:
    """Build the masks of a decoder-only model's micro-batch."""
    segments = batch.segments
    causal = _block_mask(segments, segments, causal=True)
    windowed = None
    if window is not None and window < segments.shape[1]:
        windowed = _block_mask(segments, segments, window=window)
    return BlockMasks(causal, kernels=kernels, windowed=windowed)


def encoder_decoder_masks(
    batch: EncoderDecoderBatch, kernels: Kernels
) -> tuple[BlockMasks, BlockMasks]:
    """Build the masks of a T5's encoder and decoder."""
    source, target = batch.source_segments, batch.target_segments
    encoder = BlockMasks(_block_mask(source, source), kernels=kernels)
    causal = _block_mask(target, target, causal=True)
    cross = _block_mask(target, source)
    return encoder, BlockMasks(causal, cross, kernels)


def _block_mask(
    queries: Tensor, keys: Tensor, *, causal: bool = False, window: int = 0
) -> BlockMask:
    """Build a mask from segment numbers [R, T] and [R, S]. Pairs of the same segment attend.

    A causal mask also hides later keys. A window hides later keys and all keys before the window.
    Segments are runs of consecutive tokens.
    """

    def same_segment(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[b, i] == keys[b, j]

    def earlier(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == keys[b, j]) & (i >= j)

    def in_window(b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (queries[b, i] == keys[b, j]) & (i >= j) & (i - j < window)

    attends = earlier if causal else same_segment
    if window:
        attends = in_window
    # The compiled function checks every pair without a tensor of all pairs.
    is_on_cpu = queries.device.type == "cpu"
    create = create_block_mask if is_on_cpu else _compiled(create_block_mask)
    mask: BlockMask = create(
        attends,
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
    """Attention function for transformers: [R, H, T, d] each, to [R, T, H, d]."""
    plan = planned(plan, more)
    query, key, value = as_attended(query, key, value)
    is_cross = is_cross_attention(module, plan)
    mask = plan.cross_attention if is_cross else plan.self_attention
    if sliding_window and plan.windowed is not None:
        mask = plan.windowed
    # T5 passes a bias of zeros to its cross-attention.
    bias = None if is_cross else position_bias
    plain_options, biased_options = plan.kernels

    output = attend(
        query,
        key,
        value,
        mask,
        bias=bias,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        dropout=dropout,
        pair=next_pair(module, dropout),
        cap=softcap,
        options=plain_options if bias is None else biased_options,
    )
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
    pair: Pair | None = None,
    cap: float | None = None,
    options: Options = _TORCH_BLOCKS,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Compute softmax(scale * q @ k.T + bias) @ v over the pairs of the mask, [R, H, T, d].

    A query without any pair gets 0. Each row of the expanded bias has its own gradient. The rows
    are summed in a fixed order, so the gradient is bitwise reproducible.

    Args:
        query: [R, H, T, d].
        key: [R, H, S, d].
        value: [R, H, S, d].
        block_mask: Pairs of positions that attend to each other.
        bias: [1, H, T, S], added to the scores; None without one.
        scale: Factor of the scores.
        dropout: Probability that a pair is dropped.
        pair: Hash keys that determine the dropped pairs; None for random pairs.
        cap: c of a model with scores c * tanh(s / c). Such a model has no bias.
        options: Options for the kernels.
        kernel: Replacement for `flex_attention`, for tests.
    """
    rows = None if bias is None else bias.expand(len(query), -1, -1, -1)
    kernel = kernel or _select_kernel(query, rows)
    score_mod = bias_score_mod(rows) if cap is None else _cap_score_mod(cap)
    settings: dict[str, Any] = {
        "block_mask": block_mask,
        "scale": scale,
        "kernel_options": options,
    }
    if dropout == 0.0:
        output: Tensor = kernel(query, key, value, score_mod=score_mod, **settings)
        return output

    query_keys, key_keys = pair or (_random_keys(query), _random_keys(key))
    query_numbers = head_numbers(query_keys, query.shape[1])
    threshold = round(dropout * PAIR_STEPS)
    dropping = _dropout_score_mod(score_mod, query_numbers, key_keys.int(), threshold)

    settings["return_aux"] = AuxRequest(lse=True)
    output_kept, sums_kept = kernel(query, key, value, score_mod=dropping, **settings)
    few_values = value.detach()[..., :_LSE_COLUMNS]
    _, sums_all = kernel(query, key, few_values, score_mod=score_mod, **settings)

    # A query without a kept pair, such as padding, has sums of zero, and both logarithms may be
    # minus infinity.
    is_empty = sums_kept.lse.isneginf()
    log_ratio = sums_kept.lse - sums_all.lse.masked_fill(is_empty, 0.0)
    ratio = log_ratio.masked_fill(is_empty, -torch.inf).exp()
    factor = ratio * (PAIR_STEPS / (PAIR_STEPS - threshold))
    scaled: Tensor = (output_kept * factor[..., None]).to(value.dtype)
    return scaled


def _random_keys(tokens: Tensor) -> Tensor:
    """Sample hash keys [R, T] for queries or keys [R, H, T, d]."""
    shape = (len(tokens), tokens.shape[2])
    return torch.randint(-(2**31), 2**31, shape, device=tokens.device)


def _cap_score_mod(cap: float) -> ScoreMod:
    def capped(score: Tensor, _b: Tensor, _h: Tensor, _i: Tensor, _j: Tensor) -> Tensor:
        return torch.tanh(score / cap) * cap

    return capped


def bias_score_mod(bias: Tensor | None) -> ScoreMod | None:
    """Return a score function that adds [R, H, T, S]; None without a bias."""
    if bias is None:
        return None

    def add_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + bias[b, h, i, j]

    return add_bias


def _dropout_score_mod(
    score_mod: ScoreMod | None, queries: Tensor, keys: Tensor, threshold: int
) -> ScoreMod:
    """Extend a score function to drop pairs, by the numbers [R, H, T] and [R, S] int32.

    A pair is dropped if its number is below the threshold.
    """

    def drop(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if score_mod is not None:
            score = score_mod(score, b, h, i, j)
        is_kept = pair_number(queries[b, h, i], keys[b, j]) >= threshold
        return torch.where(is_kept, score, -float("inf"))

    return drop


def _select_kernel(query: Tensor, bias: Tensor | None) -> Callable[..., Any]:
    """Return the function that computes `flex_attention` on the device of a query."""
    if query.device.type == "cpu":
        is_outline = kind_of(query) != "cpu"
        return partial(kernel_shapes, bias=bias) if is_outline else reference
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
    """Outline `flex_attention`: the tensors that its kernels save and return, without content."""
    output, sums = _KernelShapes.apply(query, key, value, bias)  # type: ignore[no-untyped-call]
    return output if return_aux is None else (output, AuxOutput(lse=sums))


class _KernelShapes(torch.autograd.Function):
    """Attention that saves its inputs, its output and a number per query (arXiv 2205.14135)."""

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
        # The kernel also allocates the dot product of each output and its gradient.
        _dot_products = torch.empty_like(sums)
        gradients = [torch.empty_like(tensor) for tensor in inputs]
        grad_bias = None
        if bias is not None and ctx.needs_input_grad[3]:
            # Each row has its own gradient: the shape is the shape of the expanded bias.
            grad_bias = bias.new_empty(bias.shape)
        return (*gradients, grad_bias)


@cache
def _compiled(
    function: Callable[..., Any], *, strict: bool = False
) -> Callable[..., Any]:
    """Return a function that compiles itself for each pair of mask and score function.

    Args:
        function: `flex_attention`, or `create_block_mask`.
        strict: Raise an error if a kernel needs too much shared memory. By default torch 2.13
            disables the prefetching of loads instead.
    """
    from torch._dynamo import config  # this import takes a second

    # Above this limit, torch would silently compute the scores of all pairs.
    config.recompile_limit = max(config.recompile_limit, _MAX_RECOMPILES)
    options: dict[str, Any] | None = None
    disable_pipelining = "triton.dynamic_disable_pipelining"
    if strict and disable_pipelining in torch._inductor.list_options():  # noqa: SLF001
        options = {disable_pipelining: False}
    return torch.compile(function, options=options)


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
    """Compute `flex_attention` by its definition, because PyTorch's has no backward on a CPU."""
    rows = len(query)
    n_queries, n_keys = query.shape[2], key.shape[2]
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = (query @ key.transpose(-1, -2)).to(exact) * scale
    if score_mod is not None:
        indices = [
            torch.arange(size, dtype=torch.int32, device=query.device)
            for size in scores.shape
        ]
        modify: Callable[..., Tensor] = score_mod
        # The function of one score becomes a function of all: one dimension per `vmap`.
        for dim in (3, 2, 1, 0):
            index_dims = (0 if n == dim else None for n in range(4))
            modify = torch.vmap(modify, in_dims=(0, *index_dims))
        scores = modify(scores, *indices)
    attends = create_mask(
        block_mask.mask_mod, rows, None, n_queries, n_keys, device=query.device
    )
    scores = scores.masked_fill(~attends, -torch.inf)

    # A query without any pair gets zeros. Its softmax would be NaN.
    is_empty = scores.isneginf().all(-1, keepdim=True)
    filled = scores.masked_fill(is_empty, 0.0)
    weights = filled.softmax(-1).masked_fill(is_empty, 0.0)
    output = weights.to(value.dtype) @ value
    if return_aux is None:
        return output
    lse = filled.logsumexp(-1).masked_fill(is_empty[..., 0], -torch.inf)
    return output, AuxOutput(lse=lse)


_RAISED_BY: Final = re.compile(r"^\S+ raised:\s+")  # start of a compiler's message
_SHARED_MEMORY: Final = re.compile(r"Required: (\d+)\D+limit: ?(\d+)")
_TOO_MUCH: Final = "torch's own need {:,} bytes of shared memory and the card has {:,}"
_TOLERANCE: Final = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Largest allowed error relative to the definition in float32, as a fraction of the largest value.
float32 matmuls may use TF32. If tokens attend to another example, the error is about 1."""


@dataclass(frozen=True)
class KernelChoice:
    """Largest blocks with working kernels, and the reason against torch's own blocks."""

    options: Options | None  # None if no kernel works
    why: str = ""

    def __str__(self) -> str:
        """Describe the blocks and the reason: "blocks of 64 x 64, since torch's own need ..."."""
        if not self.why:
            return "torch's own blocks"
        options = self.options or {}
        sizes = []
        if "BLOCK_M" in options:
            sizes.append(f"blocks of {options['BLOCK_M']} x {options['BLOCK_N']}")
        if "BLOCK_M1" in options:
            sizes.append(
                f"backward blocks of {options['BLOCK_M1']} x {options['BLOCK_M1']}"
            )
        return f"{' and '.join(sizes) or 'none'}, since {self.why}"


@cache
def kernels_on(
    device: torch.device, dtype: torch.dtype, size: int, *, biased: bool
) -> KernelChoice:
    """Try kernels on a GPU for heads of `size` columns, with and without dropout.

    After each failure, the blocks of the failed forward or backward kernel become smaller.

    Returns:
        The first kernels that work, and the reason why torch's own did not.
    """
    forward, backward = [*_FORWARD], [*_BACKWARD]
    options, first_reason = _TORCH_BLOCKS, ""
    while True:
        message = _try_kernels(device, dtype, size, options, biased=biased)
        if not message:
            return KernelChoice(options, first_reason)
        first_reason = first_reason or _shorten_reason(message)
        smaller = backward if "_backward" in message else forward
        if not smaller:
            return KernelChoice(None, first_reason)
        options = {**options, **smaller.pop(0)}


def _try_kernels(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    options: Options,
    *,
    biased: bool,
) -> str:
    """Compute a small batch. Return the error message, or "" if the kernels work."""
    try:
        with (
            torch.random.fork_rng([device]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            error_share = _largest_error(device, dtype, size, options, biased=biased)
        if error_share <= _TOLERANCE[dtype]:
            return ""
    except Exception as error:  # noqa: BLE001 - any error from a kernel or its compiler
        return _RAISED_BY.sub("", str(error).strip()) or repr(error)
    return f"torch's own are off by {error_share:.1e}"


def _shorten_reason(message: str) -> str:
    """Reduce a kernel's error message to the shared memory that it needs, or to its first line."""
    needs = _SHARED_MEMORY.search(message)
    if needs is None:
        return message.splitlines()[0]
    required, limit = map(int, needs.groups())
    return _TOO_MUCH.format(required, limit)


def _largest_error(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    options: Options,
    *,
    biased: bool,
) -> float:
    """Return the largest error in outputs and gradients, relative to the definition of attention.

    The result is NaN if a number is NaN.
    """
    torch.manual_seed(0)
    rows = heads = 2
    length = 320
    segments = _sample_segments(length)
    mask = _block_mask(segments.to(device), segments.to(device), causal=True)

    shape = (rows, heads, length, size)
    shapes = [shape, shape, shape, shape]
    if biased:
        shapes.append((1, heads, length, length))
    grad_output, *inputs = (torch.randn(shape, device=device) for shape in shapes)

    def compute(dtype: torch.dtype, kernel: Callable[..., Any] | None) -> list[Tensor]:
        torch.manual_seed(1)  # determines the dropped pairs
        q, k, v = (t.to(dtype).requires_grad_() for t in inputs[:3])
        biases = [t.clone().requires_grad_() for t in inputs[3:]]
        output = attend(
            q,
            k,
            v,
            mask,
            bias=biases[0] if biases else None,
            scale=size**-0.5,
            dropout=0.1,
            options=options,
            kernel=kernel,
        )
        gradients = torch.autograd.grad(
            output, (q, k, v, *biases), grad_output.to(output.dtype)
        )
        return [output.detach(), *gradients]

    kernel = None if device.type == "cpu" else _compiled(flex_attention, strict=True)
    results = compute(dtype, kernel)
    expected_results = compute(torch.float32, reference)
    is_real = (segments > 0).to(device)[:, None, :, None]
    errors = []
    for result, expected in zip(results, expected_results, strict=True):
        # Padding does not count. The gradient of the bias is a sum over rows and counts entirely.
        has_padding = expected.shape[-1] == size
        counted = is_real if has_padding else torch.ones_like(is_real[:1])
        difference = (result.float() - expected) * counted
        errors.append(difference.abs().max() / (expected * counted).abs().max())
    return float(torch.stack(errors).max())


def _sample_segments(length: int) -> Tensor:
    """Build segment numbers [2, length] for examples with edges inside and between blocks."""
    segments = torch.zeros(2, length, dtype=torch.int32)
    for row, ends in enumerate(((70, 200, 310), (250, 256, 320))):
        starts = (0, *ends[:-1])
        for number, (start, end) in enumerate(zip(starts, ends, strict=True), start=1):
            segments[row, start:end] = number
    return segments
