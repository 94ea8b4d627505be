"""A model whose matrix products are in bf16: the same modules, other linear layers.

Only the products round: their inputs and weights to bf16, their sums (float32) once at the end.
Embeddings, the residual stream, norms, activations, softmax and the output head stay float32, so
that what decides a token is as exact as the hidden state it is given.

A decoding step multiplies few rows with every weight, and reading the weights is most of it. They
are packed once, in the order in which oneDNN's kernels read them: laid anew at every call, as
`F.linear` does, costs as much as the product up to 8 rows, and a quarter of it at 32 (512 x 1024:
38 against 25 us, 65 against 55 us; float32 115 and 255 us; two Zen 5 cores).
"""

from __future__ import annotations

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.models.precision import has_fast_bf16

_USUAL_ROWS = 64
"""Rows of a product that the packed order is chosen for; any number runs."""


class Bf16Linear(nn.Module):
    """A linear layer with products in bf16; the output has the input's precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Round and pack the weight.

        Args:
            weight: [out, in]; left as it is beside the copy.
            bias: [out], if any.
        """
        super().__init__()
        rounded = weight.detach().to(torch.bfloat16).contiguous()
        self._packed = rounded.device.type == "cpu" and has_fast_bf16(rounded.device)
        if self._packed:
            rounded = torch.ops.mkldnn._reorder_linear_weight(rounded, _USUAL_ROWS)  # noqa: SLF001
        self.weight = rounded
        self.bias = None if bias is None else bias.detach().to(torch.bfloat16)

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        rounded = states.to(torch.bfloat16)
        if self._packed:
            product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001  # no public name
            found = product(rounded, self.weight, self.bias, "none", [], "")
        else:
            found = functional.linear(rounded, self.weight, self.bias)
        return cast("Tensor", found).to(states.dtype)


def with_bf16_products(core: PreTrainedModel) -> PreTrainedModel:
    """The model with `Bf16Linear` in place of every linear layer but the output head.

    The model itself is left as it is. All that is no linear layer is shared with it; changing
    weights of linear layers later changes the one and not the other.
    """
    head: nn.Module | None = core.get_output_embeddings()  # type: ignore[no-untyped-call]
    return cast("PreTrainedModel", _with_bf16(core, head, {}))


def _with_bf16(module: nn.Module, head: nn.Module | None, made: dict[int, nn.Module]) -> nn.Module:
    """`made` keeps what stands in several places (a shared embedding) one module."""
    if id(module) not in made:
        if module is head:
            made[id(module)] = module
        elif isinstance(module, nn.Linear):
            made[id(module)] = Bf16Linear(module.weight, module.bias)
        elif isinstance(module, Conv1D):  # GPT-2's: [in, out]
            made[id(module)] = Bf16Linear(module.weight.T, module.bias)
        else:
            # Shallow: parameters, hooks and settings are the model's own.
            twin = copy.copy(module)
            twin._compiled_call_impl = None  # noqa: SLF001  # it would run the original's layers
            twin._modules = {  # noqa: SLF001
                name: None if child is None else _with_bf16(child, head, made)
                for name, child in module._modules.items()  # noqa: SLF001
            }
            made[id(module)] = twin
    return made[id(module)]


def has_bf16_products(core: nn.Module) -> bool:
    """Whether the model came from `with_bf16_products`."""
    return any(isinstance(module, Bf16Linear) for module in core.modules())
