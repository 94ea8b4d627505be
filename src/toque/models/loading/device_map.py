"""Device map: a model larger than one GPU, its blocks over all there are, in their order.

Ours, not accelerate's: the engine wants the head, the embeddings and all else outside of blocks on
the first device. accelerate's hooks carry hidden states from device to device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.errors import ConfigError
from toque.models.forward.blocks import blocks
from toque.models.loading.pretrained import SHARE, CheckedFolder, Placement, outlined


@dataclass(frozen=True)
class Parts:
    """A model's bytes by the names of its modules."""

    rest: Mapping[str, int]  # bytes of each module outside of blocks
    blocks: Mapping[str, int]  # bytes of each block, in the order in which they compute

    @property
    def bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.rest.values()) + sum(self.blocks.values())


def parts_of(model: nn.Module, dtype: torch.dtype) -> Parts:
    """The parts of a model, which may be on the device meta, held in `dtype`; tied weights once."""
    own = {id(block) for block in blocks(model)}
    names = [name for name, module in model.named_modules() if id(module) in own]
    sizes: dict[str, int] = dict.fromkeys(names, 0)
    rest: dict[str, int] = {}
    counted: set[int] = set()
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    for name, tensor in tensors:
        n_bytes = 0 if id(tensor) in counted else tensor.numel() * dtype.itemsize
        counted.add(id(tensor))
        block = next((b for b in names if name.startswith(f"{b}.")), None)
        if block is not None:
            sizes[block] += n_bytes
        else:
            module = name.rpartition(".")[0]
            rest[module] = rest.get(module, 0) + n_bytes
    return Parts(rest, sizes)


def device_map(parts: Parts, memory: Mapping[torch.device, int]) -> dict[str, torch.device] | None:
    """Devices of the parts, filled in order, the first with what is no block; None without room."""
    devices = list(memory)
    first, room = devices[0], dict(memory)
    room[first] -= sum(parts.rest.values())
    found = dict.fromkeys(parts.rest, first)
    at = 0
    for name, n_bytes in parts.blocks.items():
        while room[devices[at]] < n_bytes:
            at += 1
            if at == len(devices):
                return None
        room[devices[at]] -= n_bytes
        found[name] = devices[at]
    return found if room[first] >= 0 else None


def placement_of(found: CheckedFolder, memory: Mapping[torch.device, int]) -> Placement | None:
    """Placement of a model that the first device cannot take: float32 over all before bf16."""
    model = outlined(found)
    for dtype in (torch.float32, torch.bfloat16):
        parts = parts_of(model, dtype)
        placed = device_map(parts, memory)
        if placed is None:
            continue
        whole = dtype == torch.float32 and len(set(placed.values())) == 1
        return None if whole else Placement(placed, dtype)
    needed, room = parts.bytes / 1e9, sum(memory.values()) / 1e9
    listed = ", ".join(map(str, memory))
    raise ConfigError(
        f"{found.folder} takes {needed:.1f} GB in bf16, and its weights find {room:.1f} GB of free "
        f"memory on {listed} ({SHARE:.0%} of it, the rest is for what is computed). Free some, "
        "use more or larger GPUs, or the CPU."
    )


def free_memory(device: torch.device) -> dict[torch.device, int]:
    """Bytes that weights may take on a CUDA device, or on all where it has no number."""
    count = torch.cuda.device_count()
    numbers = range(count) if device.index is None else [device.index]
    devices = [torch.device("cuda", number) for number in numbers]
    return {each: int(SHARE * torch.cuda.mem_get_info(each)[0]) for each in devices}


def placement_note(model: PreTrainedModel) -> str | None:
    """A sentence about where the parts of a model are; None of one that is whole as it was."""
    placed: dict[str, torch.device] | None = getattr(model, "hf_device_map", None)
    if placed is None:
        return None
    held = list(map(str, placed.values()))
    over = ", ".join(dict.fromkeys(held))
    where = f"over {over}" if len(set(held)) > 1 else f"on {over}"
    return (
        f"one device has not enough memory for this model in float32: it is held {where} in "
        f"{str(model.dtype).removeprefix('torch.')}"
    )
