"""Copy of a model with packed weights: the same modules, but other linear layers.

Weights are packed once, in the order in which oneDNN reads them. `F.linear` reorders them in each
call, which in bf16 takes as long as a product with up to 8 rows. In bf16 only products are rounded,
and not embeddings, residual stream, norms, softmax and output head. 91 of 96 texts of a GPT-2 mini
and 270 of 288 of a T5 mini are the same as in float32. In float32 nothing is rounded. It is packed
if oneDNN is faster than torch's own library (`hardware/onednn.py`): 95 us instead of 312 for 384 x
1024 with 32 rows.
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

_MAX_BYTES: Final = 2 << 30  # largest weights for a packed copy in float32
Packs = MutableMapping[nn.Module, nn.Module]  # packed layers by their original layers


def with_packed_products(
    core: PreTrainedModel,
    precision: Literal["bf16", "float32"],
    packs: Packs | None = None,
) -> PreTrainedModel:
    """Copy a model with `PackedLinear` in place of every linear layer but the output head.

    The copy shares everything else with the model, also an active adapter. If packing does not help
    in float32, return the model itself. With `packs`, adapters on one base share packed layers.
    """
    if precision == "float32":
        if not _pays_float32(core):
            return core
        layer = partial(PackedLinear, dtype=torch.float32, is_packed=True)
    else:
        can_pack = core.device.type == "cpu" and has_fast_bf16(core.device)
        layer = partial(PackedLinear, dtype=torch.bfloat16, is_packed=can_pack)
    packs = {} if packs is None else packs
    head: nn.Module | None = core.get_output_embeddings()  # type: ignore[no-untyped-call]
    twins: dict[nn.Module, nn.Module] = {} if head is None else {head: head}

    def twin_of(module: nn.Module) -> nn.Module:
        # A module in several places, such as a shared embedding, has one copy.
        if module in twins:
            return twins[module]
        if isinstance(module, nn.Linear | Conv1D):
            if module not in packs:
                weight = (
                    module.weight if isinstance(module, nn.Linear) else module.weight.T
                )
                packs[module] = layer(weight, module.bias)
            twins[module] = packs[module]
        elif getattr(module, "lora_variant", None):
            twins[module] = module  # DoRA needs the weight itself
        else:
            # A shallow copy shares parameters, hooks and settings.
            twin = twins[module] = copy.copy(module)
            twin._compiled_call_impl = None  # noqa: SLF001  # it would run the original layers
            twin._modules = {  # noqa: SLF001
                name: None if child is None else twin_of(child)
                for name, child in module._modules.items()  # noqa: SLF001
            }
        return twins[module]

    return cast("PreTrainedModel", twin_of(core))


def _pays_float32(core: PreTrainedModel) -> bool:
    """True if packed float32 products are faster here, and their weights are not too large."""
    weights = [
        layer.weight
        for layer in core.modules()
        if isinstance(layer, nn.Linear | Conv1D)
    ]
    return (
        core.device.type == "cpu"
        and onednn_is_faster()
        and not torch.is_autocast_enabled("cpu")
        and all(weight.dtype == torch.float32 for weight in weights)
        and sum(weight.nbytes for weight in weights) <= _MAX_BYTES
    )


def has_bf16_products(core: nn.Module) -> bool:
    """True if `with_packed_products` made this model in bf16."""
    return any(
        isinstance(m, PackedLinear) and m.dtype == torch.bfloat16
        for m in core.modules()
    )
