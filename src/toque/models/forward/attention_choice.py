"""Attention of packed rows, the choice of it: by rule, and on a GPU by trying it.

By rule and no timing: what a run computes must not depend on the machine's load. Before a GPU's
kernel is used it computes a small packed batch of the model's head size, forward and backward, and
is compared with attention by its definition; one that fails, or needs a compiler that is not there,
is passed over, and the reason reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from toque.batch import DecoderBatch
from toque.models.families import family_of, head_size, unwrapped
from toque.models.forward import flex_attention as flex

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

    segments: example by example, on a CPU. flex: FlexAttention, on a GPU. dense: masks of all pairs
    of positions, which work everywhere.
    """
    core = unwrapped(model)
    asked = _ASKED.get(core, "auto")
    if asked == "dense" or device.type not in {"cpu", "cuda"}:
        return Choice("dense")
    if device.type == "cpu":
        if asked == "flex":
            return Choice("flex")  # by its definition
        # A compiled module would be compiled anew for every filling of a row.
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
    mask = flex.decoder_masks(batch).own
    shapes = [(rows, heads, length, size)] * 4 + [(1, heads, length, length)]
    *drawn, slope, bias = (torch.randn(shape, device=device) for shape in shapes)

    def computed(dtype: torch.dtype, *, exact: bool) -> list[Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in drawn)
        added, scale = bias.clone().requires_grad_(), size**-0.5
        if exact:
            score = flex.with_bias(added.expand(rows, -1, -1, -1))
            out = flex.reference(q, k, v, score_mod=score, block_mask=mask, scale=scale)
        else:
            out = flex.attend(q, k, v, mask, bias=added, scale=scale, dropout=0.0)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, added), slope.to(out.dtype))]

    real = (segments > 0).to(device)[:, None, :, None]
    pairs = zip(computed(dtype, exact=False), computed(torch.float32, exact=True), strict=True)
    apart = []
    for mine, true in pairs:
        seen = real if true.shape[-1] == size else torch.ones_like(true, dtype=torch.bool)
        gap = ((mine.float() - true) * seen).abs().max() / (true * seen).abs().max()
        apart.append(float(gap))
    return max(apart)
