"""Activation offload: what checkpointing keeps of a block waits in the machine's own memory.

A model of L blocks keeps L times the hidden states, [tokens, D] each, from forward to backward;
here a GPU holds one of them at a time. Copies are exact, so every bit is the same.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offloading(hidden: Tensor) -> AbstractContextManager[Any]:
    """A context in which autograd keeps `hidden` in the machine's memory, and all else as it is.

    A block's other inputs (position bias, masks, the encoder's output) are the same tensors in
    every block: moving them would copy them once a block and free nothing.
    """
    own = _place(hidden)

    def pack(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        return (tensor.device, _on_host(tensor)) if _place(tensor) == own else tensor

    def unpack(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, copy = kept
        return copy.to(device, non_blocking=True, copy=True)

    return saved_tensors_hooks(pack, unpack)


def _on_host(tensor: Tensor) -> Tensor:
    # Both copies run in the order of the GPU's stream, so the host waits for neither; from memory
    # that may be swapped out a copy would make it wait.
    pinned = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
    return copy.copy_(tensor, non_blocking=pinned)


def _place(tensor: Tensor) -> tuple[int, int, torch.Size]:
    """What equal views of one memory have in common; an outlined storage has no address."""
    storage = tensor.untyped_storage()._cdata  # noqa: SLF001  # it has no public name
    return storage, int(tensor.storage_offset()), tensor.shape
