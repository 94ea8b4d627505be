"""Int8 matmuls on a CPU: weights and inputs are rounded to 8 bits, and their products are exact."""

from __future__ import annotations

from typing import Final, cast

import torch
from torch import Tensor, nn

INT8_MAX: Final = 127
ZERO_POINT: Final = 128
"""Unsigned number for zero."""
# The packed order is fastest for this number of rows, and works for any number.
_USUAL_ROWS: Final = 64


def has_fast_int8(device: torch.device) -> bool:
    """True for a CPU with AVX512-VNNI. Without it, sums of int8 products may overflow."""
    # It has no public name.
    return device.type == "cpu" and bool(torch.cpu._is_vnni_supported())  # noqa: SLF001


class Int8Products:
    """Matmul with int8 weights [rows of the weight, columns]."""

    def __init__(self, weight: Tensor, *, rows: int = _USUAL_ROWS) -> None:
        """Copy the weight into the order in which oneDNN reads it, for `rows` rows of an input."""
        self._packed = torch.ops.onednn.qlinear_prepack(weight, [rows, weight.shape[1]])
        self._ones = torch.ones(len(weight))
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)

    def __call__(self, unsigned: Tensor) -> Tensor:
        """Multiply integers from -127 to 127.

        Args:
            unsigned: The integers plus 128, as uint8 [n, columns]. Signed numbers are slow in
                oneDNN.

        Returns:
            Products [n, rows of the weight] in float32. A sum above 2**24 is rounded.
        """
        # `torch._int_mm` reorders the weights in each call, which takes a quarter longer and
        # empties the caches: steps of 96 texts take 4 to 6 % longer (T5 mini).
        inputs = (unsigned, 1.0, ZERO_POINT, self._packed, self._ones, self._zeros)
        # No bias, output scale 1, zero point 0, float32 output, and no operation after the matmul.
        outputs: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        return cast("Tensor", torch.ops.onednn.qlinear_pointwise(*inputs, *outputs))


def to_unsigned(values: Tensor, steps: Tensor) -> Tensor:
    """Round values / steps to integers from -127 to 127, and add 128.

    Args:
        values: [n, columns].
        steps: Step of each row, [n, 1].

    Returns:
        Integers [n, columns] as uint8.
    """
    # The conversion cuts off the fraction.
    return torch.addcdiv(values.new_full((), ZERO_POINT + 0.5), values, steps).to(
        torch.uint8
    )


class Int8Linear(nn.Module):
    """Linear layer with an int8 copy of a weight [out, in], with a scale for each output.

    An input is rounded to 8 bits with a scale for each row (Dettmers et al. 2022, arXiv 2208.07339,
    section 2.1). The products are exact, so a row is the same in every batch.
    """

    weight = None  # transformers' T5 converts its states if this is a tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        steps = _steps_of(weight)
        integers = (weight / steps).round_().to(torch.int8)
        self._products = Int8Products(integers.contiguous())
        self.scales = steps.flatten()
        self.bias = None if bias is None else bias.detach().float()

    def forward(self, states: Tensor) -> Tensor:
        """Map [..., in] to [..., out]. The output has the precision of the input."""
        rows = states.flatten(0, -2).float()
        if not len(rows):  # oneDNN rejects empty tensors
            return states.new_zeros(*states.shape[:-1], len(self.scales))
        steps = _steps_of(rows)
        output = self._products(to_unsigned(rows, steps)).mul_(steps).mul_(self.scales)
        if self.bias is not None:
            output += self.bias
        shaped: Tensor = output.view(*states.shape[:-1], -1)
        return shaped.to(states.dtype)


def _steps_of(rows: Tensor) -> Tensor:
    """Return the step that maps the largest absolute value of each row to 127, [n, 1]."""
    largest = torch.linalg.vector_norm(rows, torch.inf, -1, keepdim=True)
    steps: Tensor = largest.div_(INT8_MAX)
    return steps.clamp_(min=torch.finfo(torch.float32).tiny)
