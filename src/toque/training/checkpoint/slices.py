"""Slices of tensors: which one a rank holds and writes, and any one read from a checkpoint's files.

FSDP holds a parameter as a DTensor: cut along one dimension over the ranks of a mesh, and under
HSDP copied along another. Only the bytes that a rank needs are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.training.checkpoint.shard_layout import CutTensor, ShardLayout
from toque.training.checkpoint.state_tensors import opened_tensors
from toque.training.distributed.sharing import is_divided

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

Like = Callable[[str], Tensor | None]
"""The tensor of this run that a stored one belongs to, by the stored one's name."""


@dataclass(frozen=True)
class Held:
    """The part of a tensor that a rank holds: [start, stop) along `dim`."""

    dim: int
    start: int
    stop: int
    copy: int = 0
    """Number of this copy among the equal ones on all ranks."""
    copies: int = 1

    @classmethod
    def whole(cls, shape: tuple[int, ...], copy: int = 0, copies: int = 1) -> Held:
        """All of a tensor; of a scalar [0, 1)."""
        return cls(0, 0, shape[0] if shape else 1, copy, copies)

    @classmethod
    def of(cls, tensor: DTensor) -> Held:
        """This rank's part of a DTensor."""
        where = tensor.device_mesh.get_coordinate()
        assert where is not None, "every rank is in the mesh"
        held, cut = cls.whole(tuple(tensor.shape)), False
        copy, copies = 0, 1
        sizes = tensor.device_mesh.shape
        for placement, index, size in zip(tensor.placements, where, sizes, strict=True):
            if placement.is_replicate():
                copy, copies = copy * size + index, copies * size
                continue
            # Alone `Shard` itself; what FSDP makes of a tensor that was cut before is another.
            assert type(placement).__name__ == "Shard", "cut along one dimension of the tensor"
            assert not cut, "over one of the mesh"
            cut, dim = True, cast("Shard", placement).dim % tensor.ndim
            length = tensor.shape[dim]
            most = -(-length // size)  # as torch.chunk, by which DTensor cuts
            held = cls(dim, min(length, most * index), min(length, most * (index + 1)))
        return cls(held.dim, held.start, held.stop, copy, copies)

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        cut = (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])
        return cut if whole else ()


@dataclass(frozen=True)
class OwnShard:
    """The slices that one rank writes, by `<stem>/<name>`, and what they are slices of."""

    tensors: dict[str, Tensor]
    cut: dict[str, CutTensor]
    """Each with that one slice, in file 0."""


def shard_of(
    tensors: Mapping[str, Mapping[str, Tensor]], *, rank: int, world_size: int
) -> OwnShard:
    """The shard of one rank: each slice is in one rank's, and copies are dealt out by their bytes.

    All ranks know the same tensors in the same order, so all deal alike. A plain tensor is equal
    on all of them.
    """
    dealt: defaultdict[int, list[int]] = defaultdict(list)  # copies -> bytes dealt to each
    shard = OwnShard({}, {})
    for stem, named in tensors.items():
        for name, tensor in named.items():
            shape, local = tuple(tensor.shape), tensor
            held = Held.whole(shape, rank, world_size)
            if is_divided(tensor):
                held, local = Held.of(tensor), tensor.to_local()
            loads = dealt[held.copies] or [0] * held.copies
            owner = loads.index(min(loads))
            loads[owner] += tensor.numel() * tensor.element_size()
            dealt[held.copies] = loads
            if owner != held.copy or (held.start == held.stop and tensor.numel()):
                continue
            key, dtype = f"{stem}/{name}", str(tensor.dtype).removeprefix("torch.")
            shard.tensors[key] = local
            shard.cut[key] = CutTensor(dtype, shape, held.dim, ((0, held.start, held.stop),))
    return shard


def read_whole(path: Path, like: Like) -> dict[str, Tensor]:
    """The tensors of a file that holds whole ones, or this rank's slices of them.

    Raises:
        CheckpointError: the file is missing or is not a safetensors file.
    """
    found: dict[str, Tensor] = {}
    with opened_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            own = like(name)
            if _is_cut(own, tuple(file.get_slice(name).get_shape())):
                part = Held.of(own)
                found[name] = _placed(own, _part(file, name, part.dim, part.start, part.stop))
            else:
                found[name] = file.get_tensor(name)
    return found


def read_sharded(folder: Path, layout: ShardLayout, stem: str, like: Like) -> dict[str, Tensor]:
    """The tensors that `folder` holds in shards, or this rank's slices of them.

    Raises:
        CheckpointError: there are none of `stem`, or a file holds another slice than it should.
    """
    cut = layout.of(stem)
    if not cut:
        raise CheckpointError(f"{folder} has no tensors of the {stem}.")
    found: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files: dict[str, Any] = {}

        def slice_of(name: str, number: int, dim: int, start: int, stop: int) -> Tensor:
            file = layout.files[number]
            if file not in files:
                files[file] = stack.enter_context(opened_tensors(folder / file))
            return _part(files[file], f"{stem}/{name}", dim, start, stop)

        for name, tensor in cut.items():
            own = like(name)
            part = _gathered(name, tensor, _wanted(tensor, own), slice_of)
            found[name] = _placed(own, part) if _is_cut(own, tensor.shape) else part
    return found


def _wanted(stored: CutTensor, own: Tensor | None) -> Held:
    """The part of a stored tensor that this rank reads."""
    return Held.of(own) if _is_cut(own, stored.shape) else Held.whole(stored.shape)


def _is_cut(own: Tensor | None, shape: tuple[int, ...]) -> TypeGuard[DTensor]:
    return own is not None and is_divided(own) and tuple(own.shape) == shape


def _overlaps(tensor: CutTensor, part: Held) -> Iterator[tuple[int, int, int, int]]:
    """(number of the file, start of its slice, first, last) of the slices that have of `part`."""
    for number, start, stop in tensor.slices:
        same = part.dim == tensor.dim
        first, last = (max(start, part.start), min(stop, part.stop)) if same else (start, stop)
        if first < last:
            yield number, start, first, last


def _gathered(
    name: str, tensor: CutTensor, part: Held, slice_of: Callable[[str, int, int, int, int], Tensor]
) -> Tensor:
    """A part of a tensor from the slices that it overlaps."""
    shape, dtype = part.shape_in(tensor.shape), tensor.torch_dtype
    result = torch.empty(shape, dtype=dtype)
    same = part.dim == tensor.dim
    for number, start, first, last in _overlaps(tensor, part):
        if same:
            found = slice_of(name, number, part.dim, first - start, last - start)
            into = result.narrow(part.dim, first - part.start, last - first) if shape else result
        else:
            found = slice_of(name, number, part.dim, part.start, part.stop)
            into = result.narrow(tensor.dim, first, last - first)
        if found.shape != into.shape or found.dtype != dtype:
            raise CheckpointError(
                f"The slice of {name} from {first:,} to {last:,} is not as the layout beside it "
                f"says: {found.dtype} {tuple(found.shape)}. The files are of two saves; put a "
                "whole copy in their place, or move the checkpoint away."
            )
        into.copy_(found)
    return result


def _part(file: Any, name: str, dim: int, start: int, stop: int) -> Tensor:
    """[start, stop) along `dim` of a tensor in an open safetensors file."""
    held = file.get_slice(name)
    shape = held.get_shape()
    if not shape or (start, stop) == (0, shape[dim]):
        whole: Tensor = file.get_tensor(name)
        return whole
    if start >= stop:
        return torch.empty((*shape[:dim], 0, *shape[dim + 1 :]), dtype=held[:1].dtype)
    part: Tensor = held[(slice(None),) * dim + (slice(start, stop),)]
    return part.contiguous()


def _placed(own: DTensor, local: Tensor) -> DTensor:
    from torch.distributed.tensor import DTensor  # loading it takes a second

    return DTensor.from_local(
        local,
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )
