"""Device map: division of a model's blocks among several GPUs if one GPU is too small.

accelerate's own map is not used, because the generation engine needs the head, the embeddings and
all other parts outside of blocks on the first device. accelerate's hooks move hidden states between
devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.errors import ConfigError
from toque.models.forward.blocks import blocks
from toque.models.loading.pretrained import (
    SHARE,
    CheckedFolder,
    Placement,
    build_outline,
)


@dataclass(frozen=True)
class Parts:
    """Bytes of a model's parts, by the names of its modules."""

    rest: Mapping[str, int]  # bytes of each module outside of blocks
    blocks: Mapping[str, int]  # bytes of each block, in the order of the forward pass

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.rest.values()) + sum(self.blocks.values())


def parts_of(model: nn.Module, dtype: torch.dtype) -> Parts:
    """Count the bytes of a model's parts in `dtype`. Tied weights count once.

    The model may be on the meta device.
    """
    block_ids = {id(block) for block in blocks(model)}
    names = [name for name, module in model.named_modules() if id(module) in block_ids]
    block_sizes: dict[str, int] = dict.fromkeys(names, 0)
    rest: dict[str, int] = {}
    counted: set[int] = set()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in tensors:
        n_bytes = tensor.numel() * dtype.itemsize
        if id(tensor) in counted:  # its module must be placed, but takes no memory
            n_bytes = 0
        counted.add(id(tensor))

        block = next((b for b in names if name.startswith(f"{b}.")), None)
        if block is not None:
            block_sizes[block] += n_bytes
        else:
            module = name.rpartition(".")[0]
            rest[module] = rest.get(module, 0) + n_bytes
    return Parts(rest, block_sizes)


def device_map(
    parts: Parts, memory: Mapping[torch.device, int]
) -> dict[str, torch.device] | None:
    """Assign blocks to devices in order. Other parts are on the first device.

    Args:
        parts: Parts of the model.
        memory: Bytes available for weights on each device.

    Returns:
        Device of each part; None if the memory is too small.
    """
    device, *remaining = memory
    placed = dict.fromkeys(parts.rest, device)
    free = memory[device] - sum(parts.rest.values())
    if free < 0:
        return None
    for name, n_bytes in parts.blocks.items():
        while free < n_bytes:
            if not remaining:
                return None
            device = remaining.pop(0)
            free = memory[device]
        free -= n_bytes
        placed[name] = device
    return placed


def placement_of(
    checked: CheckedFolder, memory: Mapping[torch.device, int]
) -> Placement | None:
    """Divide a model among devices, in float32 if it fits and else in bf16.

    Returns:
        The placement; None if the model fits on the first device in float32.

    Raises:
        ConfigError: The devices have too little memory for the model in bf16.
    """
    model = build_outline(checked)
    for dtype in (torch.float32, torch.bfloat16):
        parts = parts_of(model, dtype)
        placed = device_map(parts, memory)
        if placed is None:
            continue
        fits_on_one = dtype == torch.float32 and len(set(placed.values())) == 1
        return None if fits_on_one else Placement(placed, dtype)
    needed = parts.bytes / 1e9  # in bf16, the last precision
    free = sum(memory.values()) / 1e9
    names = ", ".join(map(str, memory))
    raise ConfigError(
        f"{checked.folder} needs {needed:.1f} GB in bf16, but {names} have {free:.1f} GB for "
        f"weights ({SHARE:.0%} of the free memory). Free memory, use more or larger GPUs, or use "
        "the CPU."
    )


def memory_for_weights(device: torch.device) -> dict[torch.device, int]:
    """Return the bytes for weights on a CUDA device, or on all devices if it has no number."""
    count = torch.cuda.device_count()
    numbers = range(count) if device.index is None else [device.index]
    devices = [torch.device("cuda", number) for number in numbers]
    return {each: int(SHARE * torch.cuda.mem_get_info(each)[0]) for each in devices}


def placement_note(model: PreTrainedModel) -> str | None:
    """Describe the devices of a divided model's parts; None for other models."""
    placed: dict[str, torch.device] | None = getattr(model, "hf_device_map", None)
    if placed is None:
        return None
    names = ", ".join(dict.fromkeys(map(str, placed.values())))
    dtype = str(model.dtype).removeprefix("torch.")
    return (
        "one device has too little memory for this model in float32, so it is on "
        f"{names} in {dtype}"
    )
