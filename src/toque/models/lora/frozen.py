"""Frozen base of an adapter: its matrices in 16, 8 or 4 bits, and its hash.

`read_frozen` reads matrices one at a time from files. `hold_frozen` converts a model in memory. The
results are bitwise identical. Both record the format on the model, which then computes in this
format.
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
    """Format of frozen matrices: the precision of their matmuls, or fewer bits."""

    dtype: torch.dtype = torch.float32  # precision of matmuls
    quantised: FormName | None = None

    def __str__(self) -> str:
        """Name the format as in adapter files: "bf16", or "nf4 for products in bf16"."""
        name = _NAMES[self.dtype]
        return f"{self.quantised} for products in {name}" if self.quantised else name


PLAIN: Final = FrozenFormat()  # the only format that an adapter can be merged into
FORMATS: Final = {
    str(each): each
    for each in starmap(FrozenFormat, product(_NAMES, (None, "int8", "nf4")))
}
"""Formats by their names in adapter files."""


def format_of(model: nn.Module) -> FrozenFormat:
    """Return the format of a model's frozen matrices; `PLAIN` without an adapter."""
    frozen_format: FrozenFormat = getattr(unwrapped(model), "frozen_format", PLAIN)
    return frozen_format


def computing(model: nn.Module) -> AbstractContextManager[Any]:
    """Context for a model's forward: autocast to the precision of its frozen matrices."""
    dtype = format_of(model).dtype
    if dtype == torch.float32:
        return nullcontext()
    # Matrices in 16 bits work only under autocast.
    return torch.autocast(unwrapped(model).device.type, dtype=dtype)


def frozen_matrices(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers, by path, that may store frozen weights in fewer bits.

    Autocast would cast their float32 weights to identical values for each matmul. Embeddings and
    norms are not cast. The output head and DoRA's layers, which need the norms of rows, stay
    float32.
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
    """Hash a float32 model's tensors and their names, without its adapters, at 1 GB/s."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if not is_added(name):
            _add_to_digest(digest, plain_name(name), parameter)
    return digest.hexdigest()


def plain_name(name: str) -> str:
    """Return a parameter's name without an adapter: `q.weight` for `q.base_layer.weight`."""
    return name.replace(".token_adapter", "").replace(".base_layer", "")


def hold_frozen(model: nn.Module, dtype: torch.dtype, form: Form | None = None) -> None:
    """Convert an adapted model's frozen matrices in place, and record their format.

    Models without an adapter do not change.

    Args:
        model: The model in float32.
        dtype: Precision of matmuls.
        form: Form of quantised matrices; None for matrices in `dtype`.
    """
    if not is_adapted(model) or (dtype == torch.float32 and form is None):
        return
    vars(model)["frozen_format"] = FrozenFormat(dtype, getattr(form, "name", None))
    for path, layer in frozen_matrices(model).items():
        weight = cast("Tensor", layer.weight).detach()
        _set_weight(model, path, layer, weight, dtype, form)


def read_frozen(
    model: PreTrainedModel,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    form: Form | None,
    device: torch.device,
) -> str:
    """Read an adapted model's frozen matrices to a device, and move its other tensors there.

    Args:
        model: A model without memory for its matrices.
        read: Returns a matrix of the base in float32, by its parameter's name.
        dtype: Precision of matmuls.
        form: Form of quantised matrices; None for matrices in `dtype`.
        device: Destination of the tensors.

    Returns:
        The hash of the base, as in `base_sha256`.
    """
    vars(model)["frozen_format"] = FrozenFormat(dtype, getattr(form, "name", None))
    digest = hashlib.sha256()
    layers = frozen_matrices(model)
    # The hash depends on the order. A bias comes before its weight, so it is hashed before
    # `_set_weight` casts it.
    for name, parameter in sorted(model.named_parameters()):
        if is_added(name):
            continue
        path, _, last = name.rpartition(".")
        if path not in layers or last != "weight":
            _add_to_digest(digest, plain_name(name), parameter)
            continue
        matrix = read(plain_name(name))
        _add_to_digest(digest, plain_name(name), matrix)
        _set_weight(model, path, layers[path], matrix.to(device), dtype, form)
    model.to(device)  # type: ignore[arg-type]  # transformers annotates it away
    return digest.hexdigest()


def _set_weight(
    model: nn.Module,
    path: str,
    layer: Any,
    weight: Tensor,
    dtype: torch.dtype,
    form: Form | None,
) -> None:
    """Set a layer's frozen weight in `dtype`, or replace the layer by a quantised one.

    float16 and 8 bits are too coarse for T5's `wo`, so it stays float32 (Dettmers et al. 2022, and
    transformers). bfloat16, which autocast uses, is sufficient.
    """
    float32_names = getattr(model, "_keep_in_fp32_modules", None) or ()
    is_delicate = bool(set(path.split(".")) & set(float32_names))
    if is_delicate and dtype == torch.float16:
        dtype = torch.float32
    bias = getattr(layer, "bias", None)
    if bias is not None:
        bias.data = bias.data.to(dtype)
    if form is None or is_delicate:
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        return
    matrix = weight.T if isinstance(layer, Conv1D) else weight
    model.set_submodule(path, QuantisedLinear(matrix, bias, form))


def is_added(name: str) -> bool:
    """True for the name of an adapter's parameter."""
    return ".lora_" in name or ".trainable_tokens_" in name


def _add_to_digest(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
