"""Parts of tensors: what a rank holds of a tensor that FSDP has divided, and the whole of it.

A divided tensor is torch's `DTensor`: it says the shape of the whole and holds the rows of this
rank. Any other tensor is its own only part. Loading `DTensor` takes a second, which a process that
trains alone does without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """True if ranks hold parts of `tensor`."""
    return hasattr(tensor, "full_tensor")


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, without its gradient history; shares its memory."""
    held = tensor.detach()
    return held.to_local() if is_divided(held) else held


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; where it is divided, a collective that every rank takes part in."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def divided_like(own: Tensor, full: Tensor) -> Tensor:
    """`full`, which every rank has, divided as `own` is, if it is not yet; exchanges nothing."""
    if not is_divided(own) or is_divided(full):
        return full
    from torch.distributed.tensor import distribute_tensor

    on_device = full.to(own.device)
    # Nobody sends: each takes its own rows.
    return distribute_tensor(on_device, own.device_mesh, own.placements, src_data_rank=None)


@torch.no_grad()
def gathered(
    files: Mapping[str, Mapping[str, Tensor]], *, keep: bool
) -> dict[str, dict[str, Tensor]]:
    """The tensors of a save, made whole one after another; a collective where any is divided.

    Args:
        files: by file and name, the same on every rank.
        keep: on the rank that writes. It gets divided tensors in host memory, and those that are
            whole as they are; the others hold one whole tensor at a time and get nothing.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for file, tensors in files.items():
        found[file] = {}
        for name, tensor in tensors.items():
            full = whole(tensor).cpu() if is_divided(tensor) else tensor
            if keep:
                found[file][name] = full
    return found
