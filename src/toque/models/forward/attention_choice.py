"""Attention of packed rows, the choice of it: by rule, and on a GPU by trying it.

By rule and no timing: what a run computes must not depend on the machine's load. Before a kernel is
used it computes a small packed batch of the model's head size, forward and backward, and is
compared with attention by its definition; one that fails, or needs a compiler that is not there,
is passed over, and the reason told.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.batch import DecoderBatch
from toque.models.families import family_of, head_size, unwrapped
from toque.models.forward import flex_attention as flex
from toque.models.forward import gpu_attention
from toque.models.forward.attention_plan import Kernel, Runs, decoder_plan

Attention = Literal["segments", "flash", "flex", "dense"]
Asked = Literal["auto", "segments", "flash", "flex", "dense"]
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
    """The attention of packed forwards of this model on `device`, in the precision of here.

    segments: example by example, on a CPU. flash, flex: kernels without a mask of all pairs, on a
    GPU. dense: masks, which work everywhere.
    """
    core = unwrapped(model)
    asked = _ASKED.get(core, "auto")
    if asked == "dense" or not _takes_functions(core):
        return Choice("dense")
    if asked in {"auto", "segments"} and device.type == "cpu":
        return Choice("dense" if _is_compiled(core) else "segments")
    if asked == "segments":
        return Choice(
            "dense", (f"attention by segments is not used: it needs a CPU, not {device}",)
        )
    if device.type not in {"cpu", "cuda"}:
        return Choice("dense")
    dtype = core.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    encoder = family_of(core.config).is_encoder_decoder
    size = core.config.d_kv if encoder else head_size(core.config)
    wanted: tuple[Kernel, ...] = ("flash", "flex")
    if asked in wanted:
        wanted = (asked,)
    notes: list[str] = []
    for kernel in wanted:
        why = _unfit(kernel, dtype, size, encoder=encoder, device=device)
        why = why or _failure(kernel, device, dtype, size)
        if why is None:
            return Choice(kernel, tuple(notes))
        if not (kernel == "flash" and encoder and asked == "auto"):  # a rule, no news
            notes.append(f"attention without masks by {kernel} is not used: {why}")
    return Choice("dense", tuple(notes))


def _takes_functions(core: PreTrainedModel) -> bool:
    """Eager attention takes masks alone, and transformers' own checkpointing forgets the plan."""
    sdpa = core.config._attn_implementation == "sdpa"  # noqa: SLF001  # it has no public name
    return sdpa and not any(getattr(m, "gradient_checkpointing", False) for m in core.modules())


def _is_compiled(core: PreTrainedModel) -> bool:
    """True for compiled modules, which would be compiled anew for every filling of a row."""
    return torch.compiler.is_compiling() or any(
        getattr(module, "_compiled_call_impl", None) is not None for module in core.modules()
    )


def _unfit(
    kernel: Kernel, dtype: torch.dtype, size: int, *, encoder: bool, device: torch.device
) -> str | None:
    if kernel == "flex":
        return None
    if encoder:
        return "T5 adds a bias to its scores"
    if device.type == "cuda" and dtype not in gpu_attention.DTYPES:
        return f"it computes in 16 bits, and this run in {str(dtype).removeprefix('torch.')}"
    if size % 8 or size > gpu_attention.LARGEST_HEAD:
        return f"a head of {size} is no multiple of 8 up to {gpu_attention.LARGEST_HEAD}"
    return None


@cache
def _failure(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> str | None:
    """Reason that a kernel cannot be used; None if it computes what it should."""
    if device.type == "cpu":
        return None  # there it is the definition itself
    try:
        with (
            torch.random.fork_rng([device]),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            distance = _distance(kernel, device, dtype, size)
    except Exception as error:  # noqa: BLE001 - whatever the kernel or its compiler raises
        return (str(error).strip() or repr(error)).splitlines()[0]
    if not distance <= _TOLERANCE[dtype]:
        return f"its numbers are off by {distance:.1e}"
    return None


def _distance(kernel: Kernel, device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The largest distance of outputs and gradients from attention by its definition."""
    torch.manual_seed(0)
    rows, length, heads = 2, 320, 2
    segments = torch.zeros(rows, length, dtype=torch.int32)
    for row, ends in enumerate(((70, 200, 310), (250, 256, 320))):
        for number, end in reversed(list(enumerate(ends, start=1))):
            segments[row, :end] = number
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    batch = DecoderBatch(
        labels=tokens, example_ids=((0, 1, 2), (3, 4, 5)), tokens=tokens, segments=segments,
        positions=tokens,
    ).to(device)  # fmt: skip
    drawn = [torch.randn(rows, heads, length, size, device=device) for _ in range(4)]
    slope = drawn.pop()
    bias = torch.randn(1, heads, length, length, device=device) if kernel == "flex" else None

    def computed(*, ours: bool) -> list[Tensor]:
        leaves = [t.to(dtype if ours else torch.float32).requires_grad_() for t in drawn]
        q, k, v = leaves
        if bias is not None:
            leaves.append(bias.clone().requires_grad_())
        added = leaves[3] if bias is not None else None
        out = _attended(kernel if ours else None, batch, q, k, v, added)
        return [out.detach(), *torch.autograd.grad(out, leaves, slope.to(out.dtype))]

    real = (segments > 0).to(device)[:, None, :, None]
    pairs: Any = zip(computed(ours=True), computed(ours=False), strict=True)
    found = []
    for number, (mine, true) in enumerate(pairs):
        seen = real if number < 4 else torch.ones_like(true, dtype=torch.bool)
        gap = ((mine.float() - true) * seen).abs().max() / (true * seen).abs().max()
        found.append(float(gap))
    return max(found)


def _attended(
    kernel: Kernel | None, batch: DecoderBatch, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> Tensor:
    """[rows, heads, length, size]; by its definition with None."""
    scale = q.shape[-1] ** -0.5
    plan = decoder_plan(batch, kernel or "flex").own
    if isinstance(plan, Runs):
        heads, size = q.shape[1], q.shape[3]
        q, k, v = (t.transpose(1, 2).reshape(-1, heads, size) for t in (q, k, v))
        out = gpu_attention.flash_attention(q, k, v, plan, causal=True, scale=scale, dropout=0.0)
        return out.view(len(batch.segments), -1, heads, size).transpose(1, 2)
    if kernel == "flex":
        return flex.attend(q, k, v, plan, bias=bias, scale=scale, dropout=0.0)
    rows = None if bias is None else bias.expand(len(q), -1, -1, -1)
    score_mod = flex.with_bias(rows)
    found: Tensor = flex.reference(q, k, v, score_mod=score_mod, block_mask=plan, scale=scale)
    return found
