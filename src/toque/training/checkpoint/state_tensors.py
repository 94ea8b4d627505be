"""Named tensors on disk in the safetensors format, and into and out of a model.

Format: 8 bytes little-endian header length, a JSON header, the tensors' bytes
(https://github.com/huggingface/safetensors#format). It is written here, tensor by tensor, so that a
checkpoint is hashed as it is written and never doubled in memory; it is read by the library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.storage.safetensors_header import check_header

_DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def safetensors_chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, piece by piece, one tensor in CPU memory at a time.

    Raises:
        CheckpointError: a tensor's dtype cannot be written.
    """
    # Widest first, as the library does, so that every tensor starts aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPE_NAMES:
            raise CheckpointError(f"{name} is {tensor.dtype}, which a checkpoint cannot hold.")
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for name in names:
        flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is missing or is not a safetensors file.
    """
    try:
        check_header(path)
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}.") from error


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """Bytes the tensors take, headers not counted."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def has_frozen(model: nn.Module) -> bool:
    """Whether some parameters are not trained, so that checkpoints leave them out."""
    return any(not p.requires_grad for p in model.parameters())


def model_tensors(model: nn.Module, *, trainable_only: bool) -> dict[str, Tensor]:
    """A model's parameters, tied ones once, and its buffers that are state.

    Args:
        model: any module.
        trainable_only: leave out frozen parameters, which nothing changes.
    """
    parameters = {
        name: p
        for name, p in model.named_parameters()  # a tied parameter comes once
        if p.requires_grad or not trainable_only
    }
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}


@torch.no_grad()
def load_model_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, trainable_only: bool, where: str
) -> None:
    """Copy `tensors` into `model`; names, shapes and dtypes must be exactly those it would save.

    Raises:
        CheckpointError: they are not; each difference is named and nothing is copied.
    """
    own = model_tensors(model, trainable_only=trainable_only)
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown to the model" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        mine, theirs = own[name], tensors[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wrong.append(f"{name} is {_kind(theirs)}, the model has {_kind(mine)}")
    refuse(wrong, where=where, what="the model")
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def refuse(wrong: Iterable[str], *, where: str, what: str) -> None:
    """Raise when there is anything in `wrong`.

    Raises:
        CheckpointError: naming the first few differences.
    """
    found = sorted(wrong)
    if not found:
        return
    shown = "; ".join(found[:5]) + (f"; and {len(found) - 5} more" if len(found) > 5 else "")
    raise CheckpointError(
        f"{where} does not fit {what}: {shown}. It belongs to another model or configuration; "
        "start a new run folder, or restore the configuration it was made with."
    )


def _kind(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) if tensor.ndim else "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
