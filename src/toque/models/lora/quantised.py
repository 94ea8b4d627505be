"""Quantised linear layers: a frozen matrix in 8 or 4 bits, turned back at each product.

QLoRA (Dettmers et al. 2023, arXiv 2305.14314): gradients flow through the base to the adapters
below, none is computed for it.

* int8: each row divided by its largest value, 127 steps to either side; one float32 a row besides.
* nf4: 16 levels at the quantiles of a normal distribution, one scale for each block of 64 weights,
  itself in 8 bits with one float32 for each 256 of them: 4.127 bits a weight (section 3).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from toque.errors import needing

FormName = Literal["int8", "nf4"]
BLOCK: Final = 64  # weights of nf4 that share a scale
NESTED: Final = 256  # scales of nf4 that share one of theirs
_INT8_STEPS: Final = 127


class Int8:
    """8 bits: one scale for each row."""

    name: FormName = "int8"

    def held(self, matrix: Tensor) -> dict[str, Tensor]:
        """Codes int8 [O, I] and scales float32 [O, 1]."""
        scales = matrix.float().abs().amax(1, keepdim=True) / _INT8_STEPS
        codes = (matrix.float() / scales.clamp(min=torch.finfo(torch.float32).tiny)).round()
        return {"codes": codes.to(torch.int8), "scales": scales}

    def matrix(self, held: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """[O, I]; multiplied in float32 and rounded once, without a float32 copy."""
        made = torch.empty(shape, dtype=dtype, device=held["codes"].device)
        return torch.mul(held["codes"], held["scales"], out=made)


class Nf4:
    """4 bits: one scale for each block of 64 weights, held in 8 bits."""

    name: FormName = "nf4"

    def __init__(self) -> None:
        silence_bitsandbytes()
        otherwise = ", or take int8, which needs no package, or null for a base of 16 bits"
        with needing("quant", "adapter.quantize_base=nf4", otherwise=otherwise):
            from bitsandbytes import functional as found
        self._functional: Any = found

    def held(self, matrix: Tensor) -> dict[str, Tensor]:
        """Codes uint8 [O I / 2], scales uint8 [O I / 64], and the scales' own scales."""
        codes, state = self._functional.quantize_4bit(
            matrix.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
        )
        nested = state.state2
        return {
            "codes": codes,
            "scales": state.absmax,
            "nested": nested.absmax,
            "code_book": nested.code,
            "mean": state.offset,
        }

    def matrix(self, held: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The turned back matrix [O, I]."""
        scales = self._functional.dequantize_blockwise(
            held["scales"], absmax=held["nested"], code=held["code_book"], blocksize=NESTED
        )
        state = self._functional.QuantState(
            absmax=scales + held["mean"],
            shape=shape,
            dtype=dtype,
            blocksize=BLOCK,
            quant_type="nf4",
        )
        made: Tensor = self._functional.dequantize_4bit(held["codes"], state)
        return made


class Outlined:
    """A form by the sizes of its tensors alone, for a plan; nf4's as QLoRA, section 3, has them."""

    def __init__(self, name: FormName) -> None:
        self.name = name

    def held(self, matrix: Tensor) -> dict[str, Tensor]:
        """Tensors without content."""
        n, rows = matrix.numel(), len(matrix)
        if self.name == "int8":
            codes = torch.empty(n, dtype=torch.uint8)
            return {"codes": codes, "scales": torch.empty(rows, 1)}
        blocks = -(-n // BLOCK)
        return {
            "codes": torch.empty(-(-n // 2), dtype=torch.uint8),
            "scales": torch.empty(blocks, dtype=torch.uint8),
            "nested": torch.empty(-(-blocks // NESTED)),
            "code_book": torch.empty(256),
            "mean": torch.empty(()),
        }

    def matrix(self, held: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The turned back matrix; nf4's scales are float32 for that moment."""
        scales = held["scales"].float()
        return torch.empty(shape, dtype=dtype, device=scales.device)


Form = Int8 | Nf4 | Outlined  # a way to hold a matrix in fewer bits, to within its rounding


def form_named(name: FormName) -> Form:
    """The form called `name` in a configuration; ConfigError without the package it needs."""
    return Int8() if name == "int8" else Nf4()


class QuantisedLinear(nn.Module):
    """A frozen linear layer, or Conv1D, held in a `Form`; its only parameter is a bias."""

    def __init__(self, matrix: Tensor, bias: nn.Parameter | None, form: Form) -> None:
        """Hold a matrix [O, I] as it was read, and the frozen bias [O], in the form."""
        super().__init__()
        self.shape, self.form, self.bias = matrix.shape, form, bias
        held = form.held(matrix)
        self._names = tuple(held)
        for name, tensor in held.items():
            self.register_buffer(name, tensor, persistent=False)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """[O, I] in `dtype`."""
        held = {name: self.get_buffer(name) for name in self._names}
        return self.form.matrix(held, self.shape, dtype)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of the codes, and of all constants that turn them back."""
        sizes = {name: self.get_buffer(name).nbytes for name in self._names}
        codes = sizes.pop("codes")
        return {"codes": codes, "constants": sum(sizes.values())}

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as nn.Linear calls it
        """[..., I] -> [..., O], in the dtype that autocast asks for, or the input's."""
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        product: Tensor = _Product.apply(input.to(dtype), self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    """x @ W.T, where W is turned back for the product and again in backward, and never kept."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return functional.linear(values, layer.matrix(values.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        slope = grads[0]
        return slope @ ctx.layer.matrix(slope.dtype), None


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    """The layers of a model that are quantised, by path."""
    for name, module in model.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module


def silence_bitsandbytes() -> None:
    """Let its import, which is also peft's, not speak of a kernel that nothing here calls."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
