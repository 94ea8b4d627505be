"""Linear layers on a CPU: bfloat16 without autocast's copies, and float32 by the faster library.

Autocast casts every weight in every micro-batch, and an input once per layer that reads it. Here a
weight has one bfloat16 copy per update, norms write bfloat16 for the next matmul, and layers with
the same input share a matmul. The residual stream, norms, softmax and the gradients of weights
remain float32. float32 matmuls use oneDNN if it is faster (`hardware/onednn.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from toque.hardware.onednn import onednn_is_faster, onednn_linear

# Attributes of parameters and modules with their cached bfloat16 copies.
_COPY: Final = "_toque_bf16"
_PADDED_COPY: Final = "_toque_bf16_padded"
AS_A_GPU: Final = ContextVar("AS_A_GPU", default=False)
"""True in the outline of a GPU run, which has its tensors on the CPU."""
# The rows of an output head are padded to a multiple of this number (`padded_copy`).
_ROW_MULTIPLE: Final = 64


def padded_length(n: int) -> int:
    """Round `n` up by at most 1/16 or 31, so that matmuls have few different shapes.

    oneDNN generates code for each new shape, which takes a millisecond per matmul.

    >>> padded_length(970), padded_length(3000)
    (992, 3072)
    """
    step = max(32, 1 << max(0, n.bit_length() - 5))
    return -(-n // step) * step


def bf16_copy(weight: Tensor) -> Tensor:
    """Return `weight` in bfloat16. The copy is cached until the weight changes."""
    if weight.dtype == torch.bfloat16:
        return weight.detach()
    return _cached_copy(weight, _COPY, [weight], len(weight))


def padded_copy(weight: Tensor) -> Tensor:
    """Return an output head's weight [V, D] in bfloat16, with zero rows up to a multiple of 64.

    oneDNN computes the gradient of 50,257 rows at 560 GFLOP/s, and the gradient of 50,304 rows at
    760 GFLOP/s (two Zen 5 cores).
    """
    rows = -(-len(weight) // _ROW_MULTIPLE) * _ROW_MULTIPLE
    if weight.dtype == torch.bfloat16 or rows == len(weight):
        return bf16_copy(weight)
    return _cached_copy(weight, _PADDED_COPY, [weight], rows)


def copies_of(module: nn.Module) -> list[Tensor]:
    """List the cached copies of a module's own weights."""
    owners = [vars(module), *(vars(p) for p in module.parameters(recurse=False))]
    cached = (owner.get(name) for owner in owners for name in (_COPY, _PADDED_COPY))
    return [entry[1] for entry in cached if entry is not None]


def _cached_copy(owner: Any, name: str, weights: Sequence[Tensor], rows: int) -> Tensor:
    """Return weights in one bfloat16 tensor, padded to `rows` with zero rows.

    The tensor is cached in an attribute of `owner`, and updated if one of the weights has changed.
    """
    # An update in place increases the version, and new memory has another storage. The storage
    # identifies the memory, because a `FakeTensor` has no data address.
    state = [
        (weight._version, weight.untyped_storage()._cdata)  # noqa: SLF001  # no public names
        for weight in weights
    ]
    cached: tuple[list[tuple[int, int]], Tensor] | None = getattr(owner, name, None)
    if cached is not None and cached[0] == state:
        return cached[1]

    shape = (rows, *weights[0].shape[1:])
    # Generation may create the copy in inference mode, and training must be able to save it.
    with torch.inference_mode(mode=False), torch.no_grad():
        if cached is not None and cached[1].shape == shape:
            copy = cached[1]
        else:
            copy = weights[0].new_zeros(shape, dtype=torch.bfloat16)
        sizes = [len(weight) for weight in weights]
        parts = torch.split(copy[: sum(sizes)], sizes)
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(weight)
    setattr(owner, name, (state, copy))
    return copy


def kind_of(tensor: Tensor) -> str:
    """Return a tensor's device type, or "cuda" for every tensor in the outline of a GPU run."""
    is_gpu_outline = not torch.compiler.is_compiling() and AS_A_GPU.get()
    return "cuda" if is_gpu_outline else tensor.device.type


def in_bf16(tensor: Tensor) -> bool:
    """True if a CPU computes in bfloat16: under its autocast, outside of compiled code."""
    return (
        kind_of(tensor) == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and not torch.compiler.is_compiling()
    )


def joint_linear(
    owner: nn.Module, values: Tensor, layers: Sequence[nn.Linear]
) -> Tensor:
    """Compute several plain layers of `owner` with one matmul: [..., I] to [..., sum of O] bf16."""
    weights = [layer.weight for layer in layers]
    copy = _cached_copy(owner, _COPY, weights, sum(map(len, weights)))
    return _multiply(values, copy, None, weights)


def bf16_linear(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer in bfloat16: [..., I] by weight [O, I] and bias [O] to [..., O]."""
    return _multiply(values, bf16_copy(weight), bias, [weight])


def is_plain(*layers: nn.Module) -> bool:
    """True if layers can share a matmul: they have no bias and no adapter around them."""
    return all(type(layer) is CpuLinear and layer.bias is None for layer in layers)


def by_onednn(device: torch.device) -> bool:
    """True if float32 matmuls use oneDNN: it is faster on this CPU, and autocast is off."""
    return (
        device.type == "cpu"
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def _matmul_transposed(
    left: Tensor, right: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Compute `left @ right.T + bias` of matrices, in float32 by oneDNN or in bfloat16."""
    if left.dtype == torch.float32:
        return onednn_linear(left, right, bias)
    if bias is None:
        return torch.mm(left, right.T)
    return torch.addmm(bf16_copy(bias), left, right.T)


class _Product(torch.autograd.Function):
    """x @ W.T + b with several weights [O, I] stacked in `copy`. Transposed: x @ W + b.

    The weights themselves are arguments, so that they receive their gradients.
    """

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
        ctx.dtype, ctx.transposed = values.dtype, transposed
        ctx.rows = [len(weight) for weight in weights]
        output = _matmul_transposed(flat, copy.T if transposed else copy, bias)
        # The caller may change a matrix in place, so it must not be a view.
        return output if values.dim() == 2 else output.view(*values.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, copy = ctx.saved_tensors
        needs_values, _, needs_bias, _, *needs_weights = ctx.needs_input_grad
        grad_output = grads[0].reshape(len(flat), -1).to(copy.dtype)
        grad_values = grad_bias = None
        grad_weights: Sequence[Tensor | None] = [None for _ in ctx.rows]
        if needs_values:
            weight = copy if ctx.transposed else copy.T
            grad_flat = _matmul_transposed(grad_output, weight)
            grad_values = grad_flat.to(ctx.dtype).view(*grads[0].shape[:-1], -1)
        if needs_bias:
            grad_bias = grad_output.sum(0, dtype=torch.float32)
        if any(needs_weights):
            left, right = grad_output.T, flat.T
            if ctx.transposed:
                left, right = right, left
            grad_copy = _matmul_transposed(left, right)
            grad_weights = torch.split(grad_copy.float(), ctx.rows)
        return grad_values, None, grad_bias, None, *grad_weights


def _multiply(
    values: Tensor,
    copy: Tensor,
    bias: Tensor | None,
    weights: Sequence[Tensor],
    *,
    transposed: bool = False,
) -> Tensor:
    output: Tensor = _Product.apply(values, copy, bias, transposed, *weights)  # type: ignore[no-untyped-call]
    return output


def _copy_for(values: Tensor, weight: Tensor) -> Tensor | None:
    """Return the weight in the matmul's precision; None if torch's own layer computes it."""
    if in_bf16(values):
        return bf16_copy(weight)
    is_float32 = values.dtype == weight.dtype == torch.float32
    if is_float32 and values.numel() > 0 and by_onednn(values.device):
        return weight.detach()
    return None


class CpuLinear(nn.Linear):
    """`nn.Linear` with faster matmuls. Its weights, their names and saved files do not change."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """Map [..., I] to [..., O]."""
        copy = _copy_for(input, self.weight)
        if copy is None:
            return super().forward(input)
        return _multiply(input, copy, self.bias, [self.weight])


class CpuConv1D(Conv1D):
    """`Conv1D`, GPT-2's linear layer, with faster matmuls."""

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., I] to [..., O]."""
        copy = _copy_for(x, self.weight)
        if copy is None:
            return cast("Tensor", super().forward(x))  # type: ignore[no-untyped-call]
        return _multiply(x, copy, self.bias, [self.weight], transposed=True)
