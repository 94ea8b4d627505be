"""A model whose matrix products read packed weights: the same modules, other linear layers.

A decoding step multiplies few rows with every weight, and reading the weights is most of it. They
are packed once, in the order in which oneDNN's kernels read them: laid anew at every call, as
`F.linear` does, costs in bf16 as much as the product up to 8 rows, and a quarter of it at 32
(512 x 1024: 38 against 25 us, 65 against 55 us; float32 115 and 255 us; two Zen 5 cores).

In bf16 only the products round: their inputs and weights to bf16, their sums (float32) once at the
end. Embeddings, the residual stream, norms, softmax and the output head stay float32, so that what
decides a token is as exact as the hidden state it is given. Of 96 texts of a GPT-2 mini 91 are
float32's, of 288 of a T5 mini 270.

In float32 nothing rounds, and it is done where oneDNN is faster than torch's own library
(`models/onednn.py`): 384 x 1024 with 32 rows 95 us against 312.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from functools import cached_property
from typing import Final, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.models.onednn import onednn_is_faster, packed, product
from toque.models.precision import has_fast_bf16

_USUAL_ROWS: Final = 64
"""Rows of a product that the packed order is chosen for; any number runs."""
_MOST_BYTES: Final = 2 << 30
"""Largest model in bytes of which float32 keeps a packed copy."""


class PackedLinear(nn.Module):
    """A linear layer with its weight packed; the output has the input's precision."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        """Keep the weight.

        Args:
            weight: [out, in]; left as it is beside the copy.
            bias: [out], if any.
            dtype: Of the product.
        """
        super().__init__()
        fast = has_fast_bf16(weight.device) if dtype == torch.bfloat16 else onednn_is_faster()
        self.is_packed = weight.device.type == "cpu" and fast
        self.dtype = dtype
        self.of = weight.detach()
        """Weight as it was given."""
        self.bias = None if bias is None else bias.detach().to(dtype)

    @cached_property
    def weight(self) -> Tensor:
        """Rounded and packed when first needed."""
        rounded = self.of.to(self.dtype).contiguous()
        return packed(rounded, _USUAL_ROWS) if self.is_packed else rounded

    def forward(self, states: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        multiplied = product if self.is_packed else functional.linear
        found = multiplied(states.to(self.dtype), self.weight, self.bias)
        return found.to(states.dtype)


Packs = MutableMapping[nn.Module, nn.Module]
"""Packed layer by the layer it stands for; models that share layers share it, too."""


def with_packed_products(
    core: PreTrainedModel, precision: Literal["bf16", "float32"], packs: Packs | None = None
) -> PreTrainedModel:
    """The model with `PackedLinear` in place of every linear layer but the output head.

    The model itself is left as it is. All that is no linear layer is shared with it; changing
    weights of linear layers later changes the one and not the other.

    Args:
        core: A model of one of the families. An adapter that is active now stays active in the
            result, whatever is made active later.
        precision: Of the products. float32 gives the model itself where packing does not pay.
        packs: Keeps what is packed, so that adapters on one base share its copy.
    """
    if precision == "float32" and not _pays_float32(core):
        return core
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return _with_packed(core, dtype, {} if packs is None else packs)


def _pays_float32(core: PreTrainedModel) -> bool:
    """True if packed float32 products are faster here, and their weights not too large."""
    weights = [layer.weight for layer in core.modules() if isinstance(layer, nn.Linear | Conv1D)]
    return (
        core.device.type == "cpu"
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and all(weight.dtype == torch.float32 for weight in weights)
        and sum(weight.nbytes for weight in weights) <= _MOST_BYTES
    )


def has_bf16_products(core: nn.Module) -> bool:
    """True if the model came from `with_packed_products` in bf16."""
    return any(isinstance(m, PackedLinear) and m.dtype == torch.bfloat16 for m in core.modules())


def _with_packed(core: PreTrainedModel, dtype: torch.dtype, packs: Packs) -> PreTrainedModel:
    """The model with a packed layer in place of each linear one."""
    head: nn.Module | None = core.get_output_embeddings()  # type: ignore[no-untyped-call]
    twins: dict[nn.Module, nn.Module] = {} if head is None else {head: head}

    def twin_of(module: nn.Module) -> nn.Module:
        """`twins` keeps what stands in several places (a shared embedding) one module."""
        if module not in twins:
            if isinstance(module, nn.Linear | Conv1D):
                if module not in packs:
                    weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
                    packs[module] = PackedLinear(weight, module.bias, dtype)
                twins[module] = packs[module]
            elif getattr(module, "lora_variant", None):
                twins[module] = module  # DoRA reads the weight itself
            else:
                # Shallow: parameters, hooks and settings are the model's own.
                twin = twins[module] = copy.copy(module)
                twin._compiled_call_impl = None  # noqa: SLF001  # it would run the original's layers
                twin._modules = {  # noqa: SLF001
                    name: None if child is None else twin_of(child)
                    for name, child in module._modules.items()  # noqa: SLF001
                }
        return twins[module]

    return cast("PreTrainedModel", twin_of(core))
