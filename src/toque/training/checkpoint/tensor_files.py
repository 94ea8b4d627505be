"""Tensors in safetensors files, whole or in shards: writing, and reading what a rank holds.

FSDP holds a parameter as a DTensor, cut along one dimension over the ranks. `shards.json` says
which file holds which slice (torch's distributed checkpoints say it in a pickle, which can run code
while it loads); the manifest holds its SHA-256 beside those of the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from toque.errors import CheckpointError
from toque.storage.array_headers import opened_weights
from toque.storage.json_files import decode_json
from toque.training.distributed.sharing import is_divided

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

LAYOUT: Final = "shards.json"
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank, e.g. shard-00000-of-00004.safetensors."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


class CutTensor(msgspec.Struct, frozen=True):
    """A tensor as one process has it, and where its slices are."""

    dtype: str
    """The dtype by torch's name, e.g. float32."""
    shape: tuple[Count, ...]
    dim: Count  # along which it is cut; 0 of a whole one
    slices: tuple[tuple[Count, Count, Count], ...]
    """(number of the file, start, stop along `dim`), which adjoin and cover the tensor."""

    @property
    def length(self) -> int:
        """Size along `dim`; 1 of a scalar, which is one slice [0, 1)."""
        return self.shape[self.dim] if self.shape else 1

    def refuse_nonsense(self, n_files: int) -> None:
        """Refuse slices that overlap, leave a gap, or are in files there are not: ValueError."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r:.40} is no dtype")
        if self.dim and self.dim >= len(self.shape):
            raise ValueError(f"it is cut along dimension {self.dim} of {len(self.shape)}")
        at = 0
        for file, start, stop in self.slices:
            if file >= n_files:
                raise ValueError(f"a slice is in file {file} of {n_files}")
            if start != at or stop < start:
                raise ValueError(f"after {at:,} comes the slice from {start:,} to {stop:,}")
            at = stop
        if at != self.length:
            raise ValueError(f"its slices end at {at:,} of {self.length:,}")


class ShardLayout(msgspec.Struct, frozen=True):
    """The content of `shards.json`."""

    files: tuple[str, ...]
    tensors: dict[str, CutTensor]
    """The tensors by `<stem>/<name>`, their name in the files, e.g. `model/wte.weight`."""

    def to_json(self) -> bytes:
        """One line; a manifest that people read stays short."""
        return msgspec.json.encode(self) + b"\n"


def parse_layout(text: bytes, place: str, listed: set[str]) -> ShardLayout:
    """The layout in `text`, read from `place`; CheckpointError unless the listed files fit it."""
    try:
        layout = decode_json(text, ShardLayout)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{place} is not the layout of shards: {error}.") from error
    missing = [name for name in layout.files if name not in listed]
    if missing:
        raise CheckpointError(
            f"{place} names {missing[0]!r}, which the manifest beside it does not: they are of two "
            "saves. Put a whole copy in its place, or move it away to continue from the one "
            "before it."
        )
    for name, tensor in layout.tensors.items():
        try:
            tensor.refuse_nonsense(len(layout.files))
        except ValueError as error:
            raise CheckpointError(
                f"{place} is wrong about {name}: {error}. Put a whole copy in its place, or move "
                "it away to continue from the one before it."
            ) from error
    return layout


def joined_layout(shards: Mapping[str, Mapping[str, CutTensor]]) -> ShardLayout:
    """The layout of all shards, by file: each tensor with that one slice, its file number 0."""
    found: dict[str, CutTensor] = {}
    for number, held in enumerate(shards.values()):
        for name, part in held.items():
            ((_, start, stop),) = part.slices
            before = found[name].slices if name in found else ()
            slices = tuple(sorted([*before, (number, start, stop)], key=lambda s: s[1]))
            found[name] = msgspec.structs.replace(part, slices=slices)
    return ShardLayout(tuple(shards), found)


Region = tuple[slice, ...]  # part of a tensor: one range for each dimension
Like = Callable[[str], Tensor | None]
"""The tensor of this run that a stored one belongs to, by the stored one's name."""


def _part_of(tensor: DTensor) -> tuple[int, int, int]:
    """This rank's part of a DTensor: (dim, start, stop), of which it holds [start, stop)."""
    (placement,) = tensor.placements
    # Alone `Shard` itself; what FSDP makes of a tensor that was cut before is another.
    assert type(placement).__name__ == "Shard", "cut along one dimension of the tensor"
    dim, index = cast("Shard", placement).dim % tensor.ndim, tensor.device_mesh.get_local_rank()
    length = tensor.shape[dim]
    most = -(-length // tensor.device_mesh.size())  # as torch.chunk, by which DTensor cuts
    return dim, min(length, most * index), min(length, most * (index + 1))


def _ranges(shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
    """The region [start, stop) along `dim` of a tensor of `shape`."""
    return tuple(slice(start, stop) if d == dim else slice(0, n) for d, n in enumerate(shape))


def shard_of(
    tensors: Mapping[str, Mapping[str, Tensor]], *, rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, CutTensor]]:
    """The slices that one rank writes, by `<stem>/<name>`, and where in a whole tensor each is.

    A plain tensor is equal on all ranks, which deal them out by their bytes: all know the same ones
    in the same order, so all deal alike.
    """
    loads = [0] * world_size  # bytes dealt to each
    slices: dict[str, Tensor] = {}
    cut: dict[str, CutTensor] = {}
    for stem, named in tensors.items():
        for name, tensor in named.items():
            shape, local = tuple(tensor.shape), tensor
            dim, start, stop = 0, 0, shape[0] if shape else 1
            if is_divided(tensor):
                (dim, start, stop), local = _part_of(tensor), tensor.to_local()
                if start == stop and tensor.numel():
                    continue
            else:
                owner = loads.index(min(loads))
                loads[owner] += tensor.numel() * tensor.element_size()
                if owner != rank:
                    continue
            key, dtype = f"{stem}/{name}", str(tensor.dtype).removeprefix("torch.")
            slices[key] = local
            cut[key] = CutTensor(dtype, shape, dim, ((0, start, stop),))
    return slices, cut


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file; what the file system refuses is an OSError."""
    seen: set[int] = set()
    separate = {}  # contiguous and each in memory of its own, which the library insists on
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = (tensor.clone() if place in seen else tensor.detach()).contiguous()
        seen.add(place)
    try:
        save_file(separate, path, metadata={"format": "pt"})
    except SafetensorError as error:  # names the system's reason and has no errno
        raise OSError(str(error)) from error


def bytes_of(tensors: Mapping[Any, Tensor]) -> int:
    """Bytes the tensors take, headers not counted."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def read_whole(path: Path, like: Like) -> dict[str, Tensor]:
    """The tensors of a file that holds whole ones, or this rank's slices of them."""
    with opened_weights(path) as file:
        return {
            name: _as_held(like(name), tuple(file.get_slice(name).get_shape()), read)
            for name in file.keys()  # noqa: SIM118 - no mapping
            for read in [partial(_region, file, name)]
        }


def read_sharded(folder: Path, layout: ShardLayout, stem: str, like: Like) -> dict[str, Tensor]:
    """The tensors that `folder` holds in shards, or this rank's slices of them."""
    cut = {k: t for k, t in layout.tensors.items() if k.startswith(f"{stem}/")}
    if not cut:
        raise CheckpointError(f"{folder} has no tensors of the {stem}.")
    with ExitStack() as stack:
        opened = cache(lambda n: stack.enter_context(opened_weights(folder / layout.files[n])))
        return {
            name: _as_held(like(name), tensor.shape, partial(_joined_region, key, tensor, opened))
            for key, tensor in cut.items()
            for name in [key.removeprefix(f"{stem}/")]
        }


def _as_held(
    own: Tensor | None, shape: tuple[int, ...], read: Callable[[Region], Tensor]
) -> Tensor:
    """A stored tensor whole, or divided as this run's own is where that has the same shape."""
    if own is None or not is_divided(own) or tuple(own.shape) != shape:
        return read(tuple(slice(0, length) for length in shape))
    from torch.distributed.tensor import DTensor  # loading it takes a second

    return DTensor.from_local(
        read(_ranges(shape, *_part_of(own))),
        own.device_mesh,
        own.placements,
        run_check=False,
        shape=own.shape,
        stride=own.stride(),
    )


def _joined_region(
    key: str, tensor: CutTensor, opened: Callable[[int], Any], wanted: Region
) -> Tensor:
    """A region of a tensor from the slices that it overlaps."""
    result = torch.empty([r.stop - r.start for r in wanted], dtype=DTYPES[tensor.dtype])
    for number, start, stop in tensor.slices:
        stored = _ranges(tensor.shape, tensor.dim, start, stop)
        common = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(stored, wanted, strict=True)
        ]
        if any(r.start >= r.stop for r in common):
            continue
        found = _region(opened(number), key, _within(common, stored))
        into = result[_within(common, wanted)]
        if found.shape != into.shape or found.dtype != into.dtype:
            raise CheckpointError(
                f"The slice of {key} from {start:,} to {stop:,} is not as the layout beside it "
                f"says: {found.dtype} {tuple(found.shape)}. The files are of two saves; put a "
                "whole copy in their place, or move the checkpoint away."
            )
        into.copy_(found)
    return result


def _within(common: Sequence[slice], region: Region) -> Region:
    """The ranges of `common`, counted from the beginning of `region`."""
    pairs = zip(common, region, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _region(file: Any, name: str, region: Region) -> Tensor:
    """A region of a tensor in an open safetensors file."""
    stored = file.get_slice(name)
    if region == tuple(slice(0, length) for length in stored.get_shape()):
        whole: Tensor = file.get_tensor(name)
        return whole
    if any(r.start >= r.stop for r in region):
        return torch.empty([r.stop - r.start for r in region], dtype=stored[:1].dtype)
    part: Tensor = stored[region]
    return part.contiguous()
