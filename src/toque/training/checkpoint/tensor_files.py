"""Tensors in safetensors files, whole or in shards.

FSDP divides a parameter along one dimension over the ranks, as a DTensor. `shards.json` maps each
slice to its file, and the manifest has the SHA-256 of all of them. The distributed checkpoints of
torch store this mapping in a pickle, which can run code while it loads.
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
from toque.storage.array_headers import open_weights
from toque.storage.json_files import decode_json
from toque.training.distributed.data_parallel import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Shard

LAYOUT: Final = "shards.json"
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_REPLACE: Final = (
    "Replace the checkpoint with a good copy, or move it away to continue from "
    "the previous one."
)

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


def shard_name(rank: int, world_size: int) -> str:
    """Name the file of one rank, e.g. shard-00000-of-00004.safetensors."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


class CutTensor(msgspec.Struct, frozen=True):
    """Shape and type of a whole tensor, and the positions of its slices."""

    dtype: str
    """Name of the type in torch, e.g. float32."""
    shape: tuple[Count, ...]
    dim: Count
    """Dimension that is divided. 0 for a tensor in one slice."""
    slices: tuple[tuple[Count, Count, Count], ...]
    """(number of the file, start, stop along `dim`). The slices adjoin and cover the tensor."""

    def refuse_invalid(self, n_files: int) -> None:
        """Refuse slices that overlap, leave a gap or are in unknown files.

        Raises:
            ValueError: The layout of this tensor is invalid.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r:.40} is not a dtype")
        if self.dim and self.dim >= len(self.shape):
            raise ValueError(
                f"it is cut along dimension {self.dim} of {len(self.shape)}"
            )
        end = 0
        for file, start, stop in self.slices:
            if file >= n_files:
                raise ValueError(f"a slice is in file {file} of {n_files}")
            if start != end or stop < start:
                raise ValueError(
                    f"after {end:,} comes the slice from {start:,} to {stop:,}"
                )
            end = stop
        # A scalar is one slice [0, 1)
        length = self.shape[self.dim] if self.shape else 1
        if end != length:
            raise ValueError(f"its slices end at {end:,} of {length:,}")


class ShardLayout(msgspec.Struct, frozen=True):
    """Content of `shards.json`."""

    files: tuple[str, ...]
    tensors: dict[str, CutTensor]
    """Tensors by `<stem>/<name>`, their name in the files, e.g. `model/wte.weight`."""

    def to_json(self) -> bytes:
        """Encode as one line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def parse_layout(text: bytes, path: str, listed: set[str]) -> ShardLayout:
    """Parse a layout that was read from `path`.

    Raises:
        CheckpointError: The layout is invalid, or has files that the manifest has not `listed`.
    """
    try:
        layout = decode_json(text, ShardLayout)
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{path} is not the layout of shards: {error}."
        ) from error
    missing = [name for name in layout.files if name not in listed]
    if missing:
        raise CheckpointError(
            f"{path} lists {missing[0]!r}, but the manifest does not. They belong to different "
            f"saves. {_REPLACE}"
        )
    for name, tensor in layout.tensors.items():
        try:
            tensor.refuse_invalid(len(layout.files))
        except ValueError as error:
            raise CheckpointError(
                f"{path} is wrong about {name}: {error}. {_REPLACE}"
            ) from error
    return layout


def join_layouts(shards: Mapping[str, Mapping[str, CutTensor]]) -> ShardLayout:
    """Join the layouts of all shards, which are given by file.

    Before, each tensor has only the slice of its shard, with file number 0.
    """
    joined: dict[str, CutTensor] = {}
    for number, shard in enumerate(shards.values()):
        for name, part in shard.items():
            [(_, start, stop)] = part.slices
            earlier = joined[name].slices if name in joined else ()
            slices = tuple(
                sorted([*earlier, (number, start, stop)], key=lambda s: s[1])
            )
            joined[name] = msgspec.structs.replace(part, slices=slices)
    return ShardLayout(tuple(shards), joined)


Region = tuple[slice, ...]
"""Part of a tensor: a range per dimension."""
Like = Callable[[str], Tensor | None]
"""Function that returns this run's tensor for the name of a stored tensor."""


def _part_of(tensor: DTensor) -> tuple[int, int, int]:
    """Return (dim, start, stop) of this rank's part of a DTensor."""
    (placement,) = tensor.placements
    # Subclasses of `Shard`, which FSDP uses for a tensor that was cut before, are not supported.
    assert type(placement).__name__ == "Shard", "cut along one dimension of the tensor"
    dim = cast("Shard", placement).dim % tensor.ndim
    length = tensor.shape[dim]
    size = -(-length // tensor.device_mesh.size())  # DTensor divides like torch.chunk
    start = size * tensor.device_mesh.get_local_rank()
    return dim, min(length, start), min(length, start + size)


def _ranges(shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
    """Return the region [start, stop) along `dim` of a tensor of `shape`."""
    return tuple(
        slice(start, stop) if d == dim else slice(0, n) for d, n in enumerate(shape)
    )


def _all_of(shape: Sequence[int]) -> Region:
    return tuple(slice(0, length) for length in shape)


def shard_of(
    tensors: Mapping[str, Mapping[str, Tensor]], *, rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, CutTensor]]:
    """Cut the slices that one rank writes.

    Tensors that are not sharded are equal on all ranks. Every rank distributes them in the same
    way, by their bytes.

    Returns:
        The slices by `<stem>/<name>`, and their positions in the whole tensors.
    """
    loads = [0] * world_size  # bytes of whole tensors per rank
    slices: dict[str, Tensor] = {}
    cut: dict[str, CutTensor] = {}
    for stem, named in tensors.items():
        for name, tensor in named.items():
            shape = tuple(tensor.shape)
            if is_sharded(tensor):
                dim, start, stop = _part_of(tensor)
                local = tensor.to_local()
                if start == stop and tensor.numel():
                    continue
            else:
                owner = loads.index(min(loads))
                loads[owner] += tensor.numel() * tensor.element_size()
                if owner != rank:
                    continue
                dim, start = 0, 0
                stop = shape[0] if shape else 1
                local = tensor

            key = f"{stem}/{name}"
            dtype = str(tensor.dtype).removeprefix("torch.")
            slices[key] = local
            cut[key] = CutTensor(dtype, shape, dim, ((0, start, stop),))
    return slices, cut


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: The file system refuses.
    """
    seen: set[int] = set()
    separate = {}  # the library requires contiguous tensors that share no memory
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        separate[name] = (
            tensor.clone() if address in seen else tensor.detach()
        ).contiguous()
        seen.add(address)
    try:
        save_file(separate, path, metadata={"format": "pt"})
    except SafetensorError as error:  # has the system's reason, but no errno
        raise OSError(str(error)) from error


def bytes_of(tensors: Mapping[Any, Tensor]) -> int:
    """Count the bytes of tensors. A DTensor counts with its full size."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def read_whole(path: Path, like: Like) -> dict[str, Tensor]:
    """Read the whole tensors of a file, or this rank's slices of them."""
    with open_weights(path) as file:
        tensors = {}
        for name in file.keys():  # noqa: SIM118  # the file is not a mapping
            shape = tuple(file.get_slice(name).get_shape())
            tensors[name] = _read_like(
                like(name), shape, partial(_read_region, file, name)
            )
        return tensors


def read_sharded(
    folder: Path, layout: ShardLayout, stem: str, like: Like
) -> dict[str, Tensor]:
    """Read the tensors of `stem` from the shards in `folder`, or this rank's slices of them.

    Raises:
        CheckpointError: The tensors are missing, damaged or differ from the layout.
    """
    prefix = f"{stem}/"
    cut = {
        key: tensor for key, tensor in layout.tensors.items() if key.startswith(prefix)
    }
    if not cut:
        raise CheckpointError(f"{folder} has no tensors of the {stem}.")
    with ExitStack() as stack:
        opened = cache(
            lambda n: stack.enter_context(open_weights(folder / layout.files[n]))
        )
        tensors = {}
        for key, tensor in cut.items():
            name = key.removeprefix(prefix)
            read = partial(_join_region, key, tensor, opened)
            tensors[name] = _read_like(like(name), tensor.shape, read)
        return tensors


def _read_like(
    model_tensor: Tensor | None,
    shape: tuple[int, ...],
    read: Callable[[Region], Tensor],
) -> Tensor:
    """Read a stored tensor, only this rank's slice if `model_tensor` is sharded and of `shape`."""
    if (
        model_tensor is None
        or not is_sharded(model_tensor)
        or tuple(model_tensor.shape) != shape
    ):
        return read(_all_of(shape))
    from torch.distributed.tensor import DTensor  # loading it takes a second

    return DTensor.from_local(
        read(_ranges(shape, *_part_of(model_tensor))),
        model_tensor.device_mesh,
        model_tensor.placements,
        run_check=False,
        shape=model_tensor.shape,
        stride=model_tensor.stride(),
    )


def _join_region(
    key: str, tensor: CutTensor, opened: Callable[[int], Any], region: Region
) -> Tensor:
    """Read a region of a tensor from the slices that it overlaps."""
    result = torch.empty([r.stop - r.start for r in region], dtype=DTYPES[tensor.dtype])
    for number, start, stop in tensor.slices:
        stored = _ranges(tensor.shape, tensor.dim, start, stop)
        overlap = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(stored, region, strict=True)
        ]
        if any(r.start >= r.stop for r in overlap):
            continue
        part = _read_region(opened(number), key, _shift(overlap, stored))
        target = result[_shift(overlap, region)]
        if part.shape != target.shape or part.dtype != target.dtype:
            raise CheckpointError(
                f"The slice of {key} from {start:,} to {stop:,} is {part.dtype} "
                f"{tuple(part.shape)}, which differs from {LAYOUT}. They belong to different "
                f"saves. {_REPLACE}"
            )
        target.copy_(part)
    return result


def _shift(ranges: Sequence[slice], region: Region) -> Region:
    """Shift ranges so that they count from the start of `region`."""
    pairs = zip(ranges, region, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _read_region(file: Any, name: str, region: Region) -> Tensor:
    """Read a region of a tensor from an open safetensors file."""
    stored = file.get_slice(name)
    if region == _all_of(stored.get_shape()):
        tensor: Tensor = file.get_tensor(name)
        return tensor
    if any(r.start >= r.stop for r in region):
        return torch.empty([r.stop - r.start for r in region], dtype=stored[:1].dtype)
    part: Tensor = stored[region]
    return part.contiguous()
