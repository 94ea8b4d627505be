"""Linear layers on a CPU: bfloat16 without autocast's copies, float32 by the faster library.

Autocast casts every weight for every micro-batch and every input once for each layer that reads it.
Here a weight has one bfloat16 copy, made anew after an update, norms write what the next product
reads, and layers that read the same input share one product. The residual stream, norms, softmax
and gradients of weights stay float32, which goes by oneDNN where that is faster (`onednn.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from toque.models.onednn import onednn_is_faster, product

_NAME, _PADDED = "_toque_bf16", "_toque_bf16_padded"
AS_A_GPU: Final = ContextVar("AS_A_GPU", default=False)  # in outlines alone
_WHOLE_ROWS = 64  # rows of an output head are padded to a multiple of it, see `padded_copy`


def padded_length(n: int) -> int:
    """`n` rounded up, by at most 1/16 or 31, so that few different shapes of products occur.

    oneDNN generates code for each shape it has not seen, a millisecond a product.

    >>> padded_length(970), padded_length(3000)
    (992, 3072)
    """
    step = max(32, 1 << max(0, n.bit_length() - 5))
    return -(-n // step) * step


def bf16_copy(weight: Tensor) -> Tensor:
    """`weight` in bfloat16; the same until its version counter changes (`optimizer_step`)."""
    if weight.dtype == torch.bfloat16:
        return weight.detach()
    return _kept(weight, _NAME, [weight], len(weight))


def padded_copy(weight: Tensor) -> Tensor:
    """An output head's weight [V, D] as `bf16_copy`'s, with rows of zeros up to a multiple of 64.

    oneDNN computes the gradient of 50,257 rows at 560 GFLOP/s and of 50,304 at 760 (two Zen 5
    cores).
    """
    rows = -(-len(weight) // _WHOLE_ROWS) * _WHOLE_ROWS
    if weight.dtype == torch.bfloat16 or rows == len(weight):
        return bf16_copy(weight)
    return _kept(weight, _PADDED, [weight], rows)


def copies_of(module: nn.Module) -> list[Tensor]:
    """The copies that are kept of a module's own weights."""
    own = [vars(p) for p in module.parameters(recurse=False)]
    held = (kept.get(name) for kept in (vars(module), *own) for name in (_NAME, _PADDED))
    return [one[1] for one in held if one is not None]


def _kept(owner: Any, name: str, weights: Sequence[Tensor], rows: int) -> Tensor:
    """The weights one above the other in bfloat16, zeros below; kept until one of them changes."""
    # State that differs once the weight was changed or its memory exchanged: by the storage, not by
    # its data's address, which a tensor without memory (`FakeTensor`) lacks.
    now = [
        (weight._version, weight.untyped_storage()._cdata)  # noqa: SLF001  # no public names
        for weight in weights
    ]
    held: tuple[list[tuple[int, int]], Tensor] | None = getattr(owner, name, None)
    if held is not None and held[0] == now:
        return held[1]
    shape = (rows, *weights[0].shape[1:])
    # Texts may be written before the first update, and training saves the copy for its backward.
    with torch.inference_mode(mode=False), torch.no_grad():
        if held is not None and held[1].shape == shape:
            copy = held[1]
        else:
            copy = weights[0].new_zeros(shape, dtype=torch.bfloat16)
        for part, weight in zip(
            torch.split(copy[: sum(map(len, weights))], [*map(len, weights)]), weights, strict=True
        ):
            part.copy_(weight)
    setattr(owner, name, (now, copy))
    return copy


def kind_of(tensor: Tensor) -> str:
    """Kind of the device whose ways a tensor takes: its own, or a GPU's in the outline of one."""
    outlined = not torch.compiler.is_compiling() and AS_A_GPU.get()
    return "cuda" if outlined else tensor.device.type


def in_bf16(tensor: Tensor) -> bool:
    """True if bfloat16 is requested: autocast to it on a CPU, outside of compiled code."""
    return (
        kind_of(tensor) == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
    )


def one_product(owner: nn.Module, values: Tensor, layers: Sequence[nn.Linear]) -> Tensor:
    """Outputs of plain layers of `owner`, side by side: [..., I] to [..., sum of O] in bfloat16."""
    weights = [layer.weight for layer in layers]
    copy = _kept(owner, _NAME, weights, sum(map(len, weights)))
    return _product(values, copy, None, weights)


def product_of(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in bfloat16: [..., I] by weight [O, I] and bias [O] to [..., O]."""
    return _product(values, bf16_copy(weight), bias, [weight])


def is_plain(*layers: nn.Module) -> bool:
    """True if these layers' products may be one: they have no bias, and no adapter around them."""
    return all(type(layer) is CpuLinear and layer.bias is None for layer in layers)


def by_onednn(device: torch.device) -> bool:
    """True if float32 products go by oneDNN now: on such a CPU, outside autocast and compiling."""
    return (
        device.type == "cpu"
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _times(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias` of matrices, float32 by oneDNN or bfloat16."""
    if left.dtype == torch.float32:
        return product(left, right, bias)
    return torch.mm(left, right.T) if bias is None else torch.addmm(bf16_copy(bias), left, right.T)


class _Product(torch.autograd.Function):
    """x @ W.T + b of weights [O, I] one above the other in `copy`; transposed, x @ W + b of one."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        copy: Tensor,
        bias: Tensor | None,
        transposed: bool,  # noqa: FBT001  # autograd functions take arguments by position
        *weights: Tensor,
    ) -> Tensor:
        flat = values.reshape(-1, values.shape[-1]).to(copy.dtype)
        ctx.save_for_backward(flat, copy)
        ctx.dtype, ctx.transposed, ctx.rows = values.dtype, transposed, [len(w) for w in weights]
        found = _times(flat, copy.T if transposed else copy, bias)
        # A view must not leave a function whose result the caller changes in place.
        return found if values.dim() == 2 else found.view(*values.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, copy = ctx.saved_tensors
        wants = ctx.needs_input_grad
        slope = grads[0].reshape(len(flat), -1).to(copy.dtype)
        back = of_bias = None
        of_weights: Sequence[Tensor | None] = [None] * len(ctx.rows)
        if wants[0]:
            back = _times(slope, copy if ctx.transposed else copy.T)
            back = back.to(ctx.dtype).view(*grads[0].shape[:-1], -1)
        if wants[2]:
            of_bias = slope.sum(0, dtype=torch.float32)
        if any(wants[4:]):
            pair = (flat.T, slope.T) if ctx.transposed else (slope.T, flat.T)
            of_weights = torch.split(_times(*pair).float(), ctx.rows)
        return back, None, of_bias, None, *of_weights


def _product(
    values: Tensor,
    copy: Tensor,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    *,
    transposed: bool = False,
) -> Tensor:
    made: Tensor = _Product.apply(values, copy, bias, transposed, *weights)  # type: ignore[no-untyped-call]
    return made


def _copy_for(values: Tensor, weight: Tensor) -> Tensor | None:
    """The weight as its product with `values` reads it; None where torch's own layer computes."""
    if in_bf16(values):
        return bf16_copy(weight)
    exact = values.dtype == weight.dtype == torch.float32 and values.numel() > 0
    return weight.detach() if exact and by_onednn(values.device) else None


class CpuLinear(nn.Linear):
    """`nn.Linear`; its weights, names and what is saved stay the same."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """[..., I] -> [..., O]."""
        copy = _copy_for(input, self.weight)
        if copy is None:
            return super().forward(input)
        return _product(input, copy, self.bias, [self.weight])


class CpuConv1D(Conv1D):
    """GPT-2's linear layer, the same."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        copy = _copy_for(x, self.weight)
        if copy is None:
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        return _product(x, copy, self.bias, [self.weight], transposed=True)
