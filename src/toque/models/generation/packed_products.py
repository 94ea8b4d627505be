"""A model whose matrix products read packed weights: the same modules, other linear layers.

Weights are packed once, in the order in which oneDNN reads them: laying them anew at every call, as
`F.linear` does, takes in bf16 as long as the product up to 8 rows. In bf16 only products round, not
embeddings, residual stream, norms, softmax and output head: of 96 texts of a GPT-2 mini 91 are
float32's, of 288 of a T5 mini 270. In float32 nothing rounds, and it is done where oneDNN is faster
than torch's own library (`hardware/onednn.py`): 384 x 1024 with 32 rows 95 us against 312.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from functools import partial
from typing import Final, Literal, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.hardware.onednn import PackedLinear, has_fast_bf16, onednn_is_faster

_MOST_BYTES: Final = 2 << 30  # largest model in bytes of which float32 keeps a packed copy


Packs = MutableMapping[nn.Module, nn.Module]  # packed layer by the layer it stands for


def with_packed_products(
    core: PreTrainedModel, precision: Literal["bf16", "float32"], packs: Packs | None = None
) -> PreTrainedModel:
    """The model with `PackedLinear` in place of every linear layer but the output head.

    The model itself stays as it is; an adapter that is active now stays active in the result.
    float32 gives the model itself where packing does not pay. `packs` lets adapters on one base
    share its copy.
    """
    if precision == "float32":
        if not _pays_float32(core):
            return core
        layer = partial(PackedLinear, dtype=torch.float32, is_packed=True)
    else:
        packs_here = core.device.type == "cpu" and has_fast_bf16(core.device)
        layer = partial(PackedLinear, dtype=torch.bfloat16, is_packed=packs_here)
    packs = {} if packs is None else packs
    head: nn.Module | None = core.get_output_embeddings()  # type: ignore[no-untyped-call]
    twins: dict[nn.Module, nn.Module] = {} if head is None else {head: head}

    def twin_of(module: nn.Module) -> nn.Module:
        """`twins` keeps what stands in several places (a shared embedding) one module."""
        if module in twins:
            return twins[module]
        if isinstance(module, nn.Linear | Conv1D):
            if module not in packs:
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.T
                packs[module] = layer(weight, module.bias)
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
