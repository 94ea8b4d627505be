"""The C kernels as functions of tensors.

Each is called only where `available()` is true. Tensors are contiguous and bfloat16 unless said
otherwise. Tensors without memory (`FakeTensor`) get results without memory, so that an outline of a
training step sees the tensors that a step would make.

Letters: R rows, W width, V vocabulary; of attention: H heads, G examples, t queries, s keys.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from toque.models.cpu_kernels.library import library

Activation = Literal["silu", "gelu_tanh", "gelu"]
_KINDS: Final[dict[Activation, int]] = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
_DTYPES: Final = {"b": torch.bfloat16, "f": torch.float32, "i": torch.int64}
_TYPES: Final = {
    **dict.fromkeys(_DTYPES, ctypes.c_void_p),
    "n": ctypes.c_long,
    "x": ctypes.c_float,
}
_ARGUMENTS: Final = {
    "head_slopes": "bnnnfif",
    "attention_weights": "bnnnnxfnin",
    "attention_weights_backward": "bbnnnnxfnin",
    "stack": "biibnnnnn",
    "unstack": "biibnnnn",
    "rotate": "bffnnnnnx",
    "activate": "bbnnnn",
    "activate_backward": "bbbnnnn",
    "rms_norm": "ffbfnnx",
    "rms_norm_backward": "ffbfffnn",
    "add": "fbnn",
    "column_sums": "bfnn",
}
"""What each kernel takes, in order, before the number of threads: tensors by `_DTYPES`, integers n,
numbers x."""
_PART_ROWS: Final = 64
"""Rows whose gradients of an RMSNorm's weight are summed by one thread; as in `lanes.h`."""


def available() -> bool:
    """Whether this process has the kernels."""
    return library() is not None


def head_slopes(logits: Tensor, targets: Tensor, bias: Tensor | None, vocabulary: int) -> Tensor:
    """Logits [R, P] in place to softmax minus one at the target; returns the losses [R] in nats.

    Args:
        logits: [R, P]; what stands from column V on is set to zero.
        targets: [R] int64.
        bias: [V] or None, added to the logits.
        vocabulary: V.
    """
    if not isinstance(targets, FakeTensor) and len(targets):
        least, most = (int(end) for end in targets.aminmax())
        if not 0 <= least <= most < vocabulary:  # a kernel would write beside the logits
            raise IndexError(f"labels from {least} to {most}, and a vocabulary of {vocabulary}")
    losses = torch.empty(len(logits), dtype=torch.float32)
    exact = None if bias is None else bias.detach().float().contiguous()
    _call("head_slopes", logits, *logits.shape, vocabulary, exact, targets, losses)
    return losses


def attention_weights(
    scores: Tensor, keys: Tensor, *, scale: float, bias: Tensor | None, causal: bool
) -> Tensor:
    """Softmax of scale * scores + bias over the keys that a query may see, in place.

    Args:
        scores: [H, G, t, s].
        keys: [G] int64, how many of each example's keys are real; at least one.
        scale: of the scores.
        bias: [H, 2 T - 1] float32 by distance of key to query, the most negative first; or None.
        causal: hide keys after the query.
    """
    exact, zero = (None, 0) if bias is None else (bias.detach(), _zero(bias, scores))
    _call("attention_weights", scores, *scores.shape, scale, exact, zero, keys, int(causal))
    return scores


def attention_weights_backward(
    weights: Tensor,
    slopes: Tensor,
    keys: Tensor,
    *,
    scale: float,
    of_bias: Tensor | None,
    causal: bool,
) -> Tensor:
    """`slopes` by the weights, in place to those by the scores; adds to `of_bias` [H, 2 T - 1]."""
    zero = 0 if of_bias is None else _zero(of_bias, weights)
    shape = weights.shape
    name = "attention_weights_backward"
    _call(name, weights, slopes, *shape, scale, of_bias, zero, keys, int(causal))
    return slopes


def stack(
    tokens: Tensor, where: Tensor, counts: Tensor, length: int, *, hollow: bool = False
) -> Tensor:
    """[N, H, d] to [H, G, length, d]: each place has its token.

    Args:
        tokens: of all examples.
        where: [G * length] int64, the token at each place.
        counts: [G] int64, places of each example that are its own; the others are padding.
        length: places of each example.
        hollow: leave zeros at padding.
    """
    _, heads, size = tokens.shape
    out = tokens.new_empty(heads, len(counts), length, size)
    shape = (len(where), length, heads, size)
    _call("stack", tokens, where, counts, out, *shape, int(hollow))
    return out


def unstack(stacked: Tensor, where: Tensor, counts: Tensor, out: Tensor) -> None:
    """The way back, into the tokens `out` [N, H, d] that have a place."""
    heads, _, length, size = stacked.shape
    _call("unstack", stacked, where, counts, out, len(where), length, heads, size)


def rotate(packed: Tensor, cos: Tensor, sin: Tensor, heads: int, *, back: bool = False) -> None:
    """Rotary positions of the first heads of [N, H, d] in place.

    Args:
        packed: queries, keys and maybe more.
        cos: [N, at most d] float32, of each token's angles; what is beyond stays.
        sin: the same.
        heads: that turn.
        back: the other way round.
    """
    turned, turn = cos.shape[1], -1.0 if back else 1.0
    _call("rotate", packed, cos, sin, *packed.shape[:2], heads, packed.shape[2], turned, turn)


def activate(values: Tensor, kind: Activation, *, gated: bool) -> Tensor:
    """act(x) of [..., W]; gated, act(a) * b of [..., 2 W] that hold a and b side by side."""
    width = values.shape[-1] // 2 if gated else values.shape[-1]
    out = values.new_empty(*values.shape[:-1], width)
    rows = out.numel() // max(1, width)
    _call("activate", values, out, rows, width, _KINDS[kind], int(gated))
    return out


def activate_backward(values: Tensor, slopes: Tensor, kind: Activation, *, gated: bool) -> Tensor:
    """The gradient by `values`."""
    back = torch.empty_like(values)
    width = slopes.shape[-1]
    rows = slopes.numel() // max(1, width)
    _call("activate_backward", values, slopes, back, rows, width, _KINDS[kind], int(gated))
    return back


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm of float32 [..., W] in bfloat16, and 1 / sqrt(mean(x^2) + eps) of each row [R]."""
    width = values.shape[-1]
    out = torch.empty_like(values, dtype=torch.bfloat16)
    scales = values.new_empty(values.numel() // width)
    _call("rms_norm", values, weight.detach(), out, scales, len(scales), width, float(eps))
    return out, scales


def rms_norm_backward(
    values: Tensor, weight: Tensor, slopes: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients by values and weight, in float32."""
    rows, width = len(scales), values.shape[-1]
    back = torch.empty_like(values)
    parts = values.new_empty(-(-rows // _PART_ROWS), width)
    exact = weight.detach()
    _call("rms_norm_backward", values, exact, slopes, scales, back, parts, rows, width)
    return back, parts.sum(0)


def add(total: Tensor, part: Tensor, *, first: bool) -> None:
    """`total += part`, float32 and bfloat16 of one shape; the first part sets it."""
    _call("add", total, part, part.numel(), int(first))


def column_sums(values: Tensor) -> Tensor:
    """Of [R, W]: [W] float32."""
    rows, width = values.shape
    parts = values.new_empty(-(-rows // _PART_ROWS), width, dtype=torch.float32)
    _call("column_sums", values, parts, rows, width)
    return parts.sum(0)


def _zero(by_distance: Tensor, scores: Tensor) -> int:
    """Where distance 0 stands in [H, 2 T - 1]; T must be as long as the scores' sides."""
    zero = by_distance.shape[1] // 2
    if len(by_distance) != len(scores) or max(scores.shape[2:]) > zero + 1:
        raise ValueError(f"a bias {tuple(by_distance.shape)} for scores {tuple(scores.shape)}")
    return zero


def _call(name: str, *arguments: Tensor | float | None) -> None:
    """A kernel with tensors as addresses, by all of torch's threads."""
    if any(isinstance(one, FakeTensor) for one in arguments):
        return
    kinds = _ARGUMENTS[name]
    given = [_address(one, kind) for one, kind in zip(arguments, kinds, strict=True)]
    _kernel(name)(*given, torch.get_num_threads())


@cache
def _kernel(name: str) -> Callable[..., None]:
    found = library()
    assert found is not None, "called without the kernels"
    kernel: Any = getattr(found, name)
    kernel.restype = None
    kernel.argtypes = [*(_TYPES[kind] for kind in _ARGUMENTS[name]), ctypes.c_int]
    return cast("Callable[..., None]", kernel)


def _address(value: Tensor | float | None, kind: str) -> float | None:
    """A tensor's memory, if it is what the kernel reads; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype != _DTYPES[kind] or not value.is_contiguous() or value.device.type != "cpu":
        raise ValueError(
            f"a kernel reads contiguous {_DTYPES[kind]} on the CPU, and was given {value.dtype} "
            f"{tuple(value.shape)} with strides {value.stride()} on {value.device}"
        )
    return value.data_ptr()
