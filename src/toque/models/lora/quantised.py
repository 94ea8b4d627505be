"""Quantised linear layers: a frozen matrix in 8 or 4 bits that every matmul dequantises.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314): gradients pass through the frozen base to adapters
in lower layers.

* int8: each row divided by its largest absolute value, with 127 steps per sign and one float32 per
  row.
* nf4: 16 levels at the quantiles of a normal distribution, and one scale per block of 64 weights.
  Scales have 8 bits, and 256 scales share a float32: 4.127 bits per weight (section 3).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toque.errors import needing

FormName = Literal["int8", "nf4"]
BLOCK: Final = 64  # number of weights in nf4 that share a scale
NESTED: Final = 256  # number of scales in nf4 that share a scale
_INT8_STEPS: Final = 127


class Int8:
    """8 bits, with one scale per row."""

    name: FormName = "int8"

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """Compute codes int8 [O, I] and scales float32 [O, 1]."""
        scales = matrix.float().abs().amax(1, keepdim=True) / _INT8_STEPS
        # A row may be zero.
        divisors = scales.clamp(min=torch.finfo(torch.float32).tiny)
        codes = (matrix.float() / divisors).round()
        return {"codes": codes.to(torch.int8), "scales": scales}

    def matrix(
        self, parts: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Dequantise to [O, I]. The kernel computes in float32 and rounds to `dtype` once."""
        output = torch.empty(shape, dtype=dtype, device=parts["codes"].device)
        return torch.mul(parts["codes"], parts["scales"], out=output)


class Nf4:
    """4 bits, with one scale of 8 bits per block of 64 weights."""

    name: FormName = "nf4"

    def __init__(self) -> None:
        silence_bitsandbytes()
        alternatives = (
            ", or use int8, which needs no package, or null for a base in 16 bits"
        )
        with needing("quant", "adapter.quantize_base=nf4", otherwise=alternatives):
            from bitsandbytes import functional
        self._functional: Any = functional

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """Compute codes uint8 [O * I / 2], scales uint8 [O * I / 64], and the scales' scales."""
        codes, state = self._functional.quantize_4bit(
            matrix.contiguous(),
            blocksize=BLOCK,
            compress_statistics=True,
            quant_type="nf4",
        )
        nested = state.state2
        return {
            "codes": codes,
            "scales": state.absmax,
            "nested": nested.absmax,
            "code_book": nested.code,
            "mean": state.offset,
        }

    def matrix(
        self, parts: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Dequantise to [O, I]."""
        scales = self._functional.dequantize_blockwise(
            parts["scales"],
            absmax=parts["nested"],
            code=parts["code_book"],
            blocksize=NESTED,
        )
        state = self._functional.QuantState(
            absmax=scales + parts["mean"],
            shape=shape,
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        output: Tensor = self._functional.dequantize_4bit(parts["codes"], state)
        return output


class Outlined:
    """Sizes of a form's tensors, to plan memory. nf4 has the sizes of QLoRA, section 3."""

    def __init__(self, name: FormName) -> None:
        self.name = name

    def quantise(self, matrix: Tensor) -> dict[str, Tensor]:
        """Allocate tensors without content."""
        n, rows = matrix.numel(), len(matrix)
        if self.name == "int8":
            codes = torch.empty(n, dtype=torch.uint8)
            return {"codes": codes, "scales": torch.empty(rows, 1)}
        n_bytes = math.ceil(n / 2)
        n_blocks = math.ceil(n / BLOCK)
        return {
            "codes": torch.empty(n_bytes, dtype=torch.uint8),
            "scales": torch.empty(n_blocks, dtype=torch.uint8),
            "nested": torch.empty(math.ceil(n_blocks / NESTED)),
            "code_book": torch.empty(256),
            "mean": torch.empty(()),
        }

    def matrix(
        self, parts: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        """Allocate the dequantised matrix, and temporary float32 scales for nf4."""
        scales = parts["scales"].float()
        return torch.empty(shape, dtype=dtype, device=scales.device)


Form = Int8 | Nf4 | Outlined  # method that stores a matrix in fewer bits


def form_named(name: FormName) -> Form:
    """Return the form with this name. Raise a ConfigError if its package is not installed."""
    return Int8() if name == "int8" else Nf4()


class QuantisedLinear(nn.Module):
    """Frozen and quantised replacement of a linear layer or Conv1D. It has a plain bias or none."""

    def __init__(self, matrix: Tensor, bias: nn.Parameter | None, form: Form) -> None:
        """Quantise a matrix [O, I]. The bias [O] is frozen too."""
        super().__init__()
        self.shape = matrix.shape
        self.form = form
        self.bias = bias
        parts = form.quantise(matrix)
        self._names = tuple(parts)
        for name, tensor in parts.items():
            self.register_buffer(name, tensor, persistent=False)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the matrix [O, I]."""
        parts = {name: self.get_buffer(name) for name in self._names}
        return self.form.matrix(parts, self.shape, dtype)

    def stored_bytes(self) -> dict[str, int]:
        """Count the bytes of the codes, and of the constants that dequantise them."""
        sizes = {name: self.get_buffer(name).nbytes for name in self._names}
        codes = sizes.pop("codes")
        return {"codes": codes, "constants": sum(sizes.values())}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear calls it
        """Map [..., I] to [..., O] in autocast's precision, or in the input's precision."""
        device_type = input.device.type
        dtype = input.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        output: Tensor = _QuantisedMatmul.apply(input.to(dtype), self)  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias.to(dtype)


class _QuantisedMatmul(torch.autograd.Function):
    """x @ W.T with a matrix that is not saved. Forward and backward each dequantise it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(values, layer.matrix(values.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        grad_output = grads[0]
        return grad_output @ ctx.layer.matrix(grad_output.dtype), None


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """Yield the quantised layers of a model, with their paths."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module


def silence_bitsandbytes() -> None:
    """Suppress warnings about a kernel that is not used. peft's import shows them too."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
