"""The frozen base beside an adapter: its matrices in 16, 8 or 4 bits, and their hash.

`read_frozen` reads matrices one by one from files, `hold_frozen` changes a model in memory, to the
same bits. Both note the format on the model, which computes in it from then on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product, starmap
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toque.models.families import DTYPES, unwrapped
from toque.models.lora.layers import is_adapted, is_linear, is_of_dora
from toque.models.lora.quantised import Form, FormName, QuantisedLinear

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class FrozenFormat:
    """Format of the frozen matrices beside an adapter: that of products, or fewer bits."""

    dtype: torch.dtype = torch.float32  # of products
    quantised: FormName | None = None

    def __str__(self) -> str:
        """Name the format as adapter files record it: "bf16", or "nf4 for products in bf16"."""
        return f"{self.quantised} for products in " * bool(self.quantised) + _NAMES[self.dtype]


PLAIN: Final = FrozenFormat()  # an adapter can be merged into it
FORMATS: Final = {
    str(each): each for each in starmap(FrozenFormat, product(_NAMES, (None, "int8", "nf4")))
}


def format_of(model: nn.Module) -> FrozenFormat:
    """The format of a model's frozen matrices; `PLAIN` without an adapter."""
    found: FrozenFormat = getattr(unwrapped(model), "frozen_format", PLAIN)
    return found


def computing(model: nn.Module) -> AbstractContextManager[Any]:
    """The context in which a model is used: autocast, where its adapter was trained in it."""
    dtype = format_of(model).dtype  # matrices in 16 bits work in no other context
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(unwrapped(model).device.type, dtype=dtype)


def frozen_matrices(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers, by path, whose frozen weights may be held in fewer bits.

    Autocast casts their float32 to the same bits at each use. It leaves alone embeddings, norms,
    the output head, and DoRA's layers, whose row norms are computed from the weights.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module)
        and "lm_head" not in name.split(".")
        and ".lora_" not in f".{name}"
        and not is_of_dora(model, name)
    }


def base_sha256(model: PreTrainedModel) -> str:
    """SHA-256 of the names, formats and bytes of a float32 model, adapters left out; 1 GB/s."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not is_added(name):
            _take(digest, plain_name(name), parameter)
    return digest.hexdigest()


def plain_name(name: str) -> str:
    """Name in the base of an adapted model's parameter: `q.weight` of `q.base_layer.weight`."""
    return name.replace(".token_adapter", "").replace(".base_layer", "")


def hold_frozen(model: nn.Module, dtype: torch.dtype, form: Form | None = None) -> None:
    """Hold the frozen matrices of an adapted model in the dtype of products, or quantised."""
    if not is_adapted(model) or (dtype == torch.float32 and form is None):
        return
    vars(model)["frozen_format"] = FrozenFormat(dtype, getattr(form, "name", None))
    for path, layer in frozen_matrices(model).items():
        _hold(model, path, layer, cast("Tensor", layer.weight).detach(), dtype, form)


def read_frozen(
    model: PreTrainedModel,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    form: Form | None,
    device: torch.device,
) -> str:
    """Read the frozen matrices of an adapted frame straight to the device, and move the rest there.

    `read` gives a base's matrix in float32, by its parameter's name; it is held in the `form`, or
    in the `dtype` of products. Returns what `base_sha256` gives of the same base.
    """
    vars(model)["frozen_format"] = FrozenFormat(dtype, getattr(form, "name", None))
    digest, layers = hashlib.sha256(), frozen_matrices(model)
    for name, parameter in sorted(model.named_parameters()):
        if is_added(name):
            continue
        path, _, last = name.rpartition(".")
        if path not in layers or last != "weight":
            _take(digest, plain_name(name), parameter)  # a bias comes before its weight
            continue
        matrix = read(plain_name(name))
        _take(digest, plain_name(name), matrix)
        _hold(model, path, layers[path], matrix.to(device), dtype, form)
    model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
    return digest.hexdigest()


def _hold(
    model: nn.Module, path: str, layer: Any, weight: Tensor, dtype: torch.dtype, form: Form | None
) -> None:
    # T5's `wo` is too coarse in float16 and in 8 bits (Dettmers et al. 2022 leave it out, as
    # transformers does); bfloat16, in which autocast computes it, it bears.
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    delicate = bool(set(path.split(".")) & set(kept))
    if delicate and dtype == torch.float16:
        dtype = torch.float32
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.data = bias.data.to(dtype)
    if form is None or delicate:
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        return
    matrix = weight.T if isinstance(layer, Conv1D) else weight
    model.set_submodule(path, QuantisedLinear(matrix, bias, form))


def is_added(name: str) -> bool:
    """True for the name of an adapter's parameter in the model."""
    return ".lora_" in name or ".trainable_tokens_" in name


def _take(digest: Any, plain: str, tensor: Tensor) -> None:
    digest.update(f"{plain} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
