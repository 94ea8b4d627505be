"""State tensors: named tensors in safetensors files, and into and out of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.storage.array_headers import check_safetensors_header
from toque.training.distributed.sharing import divided_like, own_part
from toque.training.state_values import impossible_weights, refuse


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the file system refused, most often because it is full.
    """
    try:
        save_file(_separate(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:  # names the system's reason and has no errno
        raise OSError(str(error)) from error


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values, contiguous and each in memory of its own, which the library insists on."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if place in seen else tensor.detach()).contiguous()
        seen.add(place)
    return separate


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, open to read its tensors, or slices of them, on the CPU.

    Raises:
        CheckpointError: the file is missing, is not a safetensors file, or lacks what is asked.
    """
    try:
        check_safetensors_header(path)
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}.") from error


def bytes_of(tensors: Mapping[Any, Tensor]) -> int:
    """Bytes the tensors take, headers not counted."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters, tied ones once, and its buffers that are state.

    Frozen parameters, which nothing changes, are left out.
    """
    parameters = {
        name: p
        for name, p in model.named_parameters()  # a tied parameter comes once
        if p.requires_grad
    }
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy `tensors` into `model`; names, shapes and dtypes must be exactly those it would save.

    Raises:
        CheckpointError: they are not; each difference is named and nothing is copied.
    """
    own = model_tensors(model)
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown to the model" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        mine, theirs = own[name], tensors[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wrong.append(f"{name} is {_kind(theirs)}, the model has {_kind(mine)}")
        elif isinstance(mine, nn.Parameter) and (why := impossible_weights(theirs, own_part(mine))):
            wrong.append(f"{name} {why}, which training cannot have made of it")
    refuse(wrong, where=where, what="the model")
    for name, tensor in own.items():
        tensor.copy_(divided_like(tensor, tensors[name]))


def _kind(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) if tensor.ndim else "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
