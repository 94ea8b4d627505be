"""Tensors in safetensors files, whole or in shards.

FSDP divides a parameter along one dimension among the ranks, as a DTensor. `shards.json` maps each
slice to its file, and the manifest has the SHA-256 of every file. Torch's distributed checkpoints
store this mapping in a pickle, which can run code while it loads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
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
    """Return the file name of a shard, e.g. shard-00000-of-00004.safetensors."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


class CutTensor(msgspec.Struct, frozen=True):
    """Shape and type of a tensor that is stored in slices, and the positions of the slices."""

    dtype: str
    """torch's name for the type, e.g. float32."""
    shape: tuple[Count, ...]
    """Shape of the whole tensor."""
    dim: Count
    """Dimension along which the tensor is divided. 0 for a tensor in one slice."""
    slices: tuple[tuple[Count, Count, Count], ...]
    """(file number, start, stop) along `dim`. The slices are adjacent and cover the tensor."""

    def refuse_invalid(self, n_files: int) -> None:
        """Refuse slices that overlap, leave a gap or are in unknown files.

        Raises:
            ValueError: The layout of this tensor is invalid.
        """
        if self.dtype not in DTYPES:
            raise ValueError(f"{self.dtype!r:.40} is not a dtype")
        if self.dim and self.dim >= len(self.shape):
            raise ValueError(
                f"it is split along dimension {self.dim}, but has {len(self.shape)} dimensions"
            )
        end = 0
        for file, start, stop in self.slices:
            if file >= n_files:
                raise ValueError(f"a slice is in file {file} of {n_files}")
            if start != end or stop < start:
                raise ValueError(
                    f"the slice after {end:,} is from {start:,} to {stop:,}"
                )
            end = stop
        # A scalar is one slice, [0, 1).
        length = self.shape[self.dim] if self.shape else 1
        if end != length:
            raise ValueError(f"its slices end at {end:,} of {length:,}")


class ShardLayout(msgspec.Struct, frozen=True):
    """Content of `shards.json`."""

    files: tuple[str, ...]
    tensors: dict[str, CutTensor]
    """Tensors by their name in the files, `<stem>/<name>`, e.g. `model/wte.weight`."""

    def to_json(self) -> bytes:
        """Encode as one line of JSON."""
        return msgspec.json.encode(self) + b"\n"


def parse_layout(text: bytes, path: str, listed: set[str]) -> ShardLayout:
    """Parse a layout that was read from `path`.

    Raises:
        CheckpointError: The layout is invalid, or has files that are not in the manifest's list.
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
                f"{path} has an invalid entry for {name}: {error}. {_REPLACE}"
            ) from error
    return layout


def join_layouts(shards: Mapping[str, Mapping[str, CutTensor]]) -> ShardLayout:
    """Join the layouts of all shards.

    Args:
        shards: Tensors by file and name. Each has only the slice of its shard, with file number 0.
    """
    slices: defaultdict[str, list[tuple[int, int, int]]] = defaultdict(list)
    tensors: dict[str, CutTensor] = {}
    for number, shard in enumerate(shards.values()):
        for name, tensor in shard.items():
            [(_, start, stop)] = tensor.slices
            slices[name].append((number, start, stop))
            by_start = tuple(sorted(slices[name], key=itemgetter(1)))
            tensors[name] = msgspec.structs.replace(tensor, slices=by_start)
    return ShardLayout(tuple(shards), tensors)


Region = tuple[slice, ...]
"""Part of a tensor: a slice per dimension, with start and stop."""
Like = Callable[[str], Tensor | None]
"""Function from the name of a stored tensor to this run's tensor with the same name, if any."""


def _part_of(tensor: DTensor) -> tuple[int, int, int]:
    """Return (dim, start, stop) of this rank's part of a DTensor."""
    (placement,) = tensor.placements
    # FSDP uses a subclass of `Shard` for tensors that were already sharded. It is not supported.
    assert type(placement).__name__ == "Shard", "cut along one dimension of the tensor"
    dim = cast("Shard", placement).dim % tensor.ndim
    length = tensor.shape[dim]
    size = -(-length // tensor.device_mesh.size())  # DTensor divides like torch.chunk
    start = size * tensor.device_mesh.get_local_rank()
    return dim, min(length, start), min(length, start + size)


def _ranges(shape: Sequence[int], dim: int, start: int, stop: int) -> Region:
    """Return the region [start, stop) along `dim` of a tensor with `shape`."""
    region = list(_all_of(shape))
    if shape:
        region[dim] = slice(start, stop)
    return tuple(region)


def _all_of(shape: Sequence[int]) -> Region:
    """Return the region that covers a tensor with `shape`."""
    return tuple(slice(0, length) for length in shape)


def shard_of(
    tensors: Mapping[str, Mapping[str, Tensor]], *, rank: int, world_size: int
) -> tuple[dict[str, Tensor], dict[str, CutTensor]]:
    """Select the slices that one rank writes.

    Tensors that are not sharded are equal on all ranks, so only one rank writes each. Every rank
    assigns them in the same way, to balance the bytes.

    Returns:
        The slices by `<stem>/<name>`, and their positions in the whole tensors.
    """
    loads = [0 for _ in range(world_size)]  # bytes of whole tensors per rank
    slices: dict[str, Tensor] = {}
    cut: dict[str, CutTensor] = {}
    tensors_by_key = {
        f"{stem}/{name}": tensor
        for stem, named in tensors.items()
        for name, tensor in named.items()
    }
    for key, tensor in tensors_by_key.items():
        shape = tuple(tensor.shape)
        if is_sharded(tensor):
            dim, start, stop = _part_of(tensor)
            if start == stop and tensor.numel():
                continue  # there are more ranks than rows
            slices[key] = tensor.to_local()
        else:
            owner = loads.index(min(loads))
            loads[owner] += tensor.numel() * tensor.element_size()
            if owner != rank:
                continue
            dim, start = 0, 0
            stop = shape[0] if shape else 1
            slices[key] = tensor

        dtype = str(tensor.dtype).removeprefix("torch.")
        cut[key] = CutTensor(dtype, shape, dim, ((0, start, stop),))
    return slices, cut


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: The file cannot be written.
    """
    seen: set[int] = set()
    separate = {}  # the library requires contiguous tensors that share no memory
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        is_shared = address in seen
        seen.add(address)
        unshared = tensor.clone() if is_shared else tensor.detach()
        separate[name] = unshared.contiguous()
    try:
        save_file(separate, path, metadata={"format": "pt"})
    except SafetensorError as error:  # has the system's reason, but no errno
        raise OSError(str(error)) from error


def bytes_of(tensors: Mapping[Any, Tensor]) -> int:
    """Count the bytes of tensors. A DTensor counts at its full (global) size."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in one or several open files."""

    shape: tuple[int, ...]
    read_region: Callable[[Region], Tensor]

    def read(self) -> Tensor:
        """Read the whole tensor."""
        return self.read_region(_all_of(self.shape))

    def read_like(self, model_tensor: Tensor | None) -> Tensor:
        """Read the tensor, or only this rank's slice.

        The slice is read if `model_tensor` is sharded and has the same shape.
        """
        if model_tensor is None or tuple(model_tensor.shape) != self.shape:
            return self.read()
        if not is_sharded(model_tensor):
            return self.read()
        from torch.distributed.tensor import DTensor  # loading it takes a second

        return DTensor.from_local(
            self.read_region(_ranges(self.shape, *_part_of(model_tensor))),
            model_tensor.device_mesh,
            model_tensor.placements,
            run_check=False,
            shape=model_tensor.shape,
            stride=model_tensor.stride(),
        )


StoredTensors = Mapping[str, StoredTensor]
"""Tensors in open files, by name."""


@contextmanager
def open_whole(path: Path) -> Iterator[StoredTensors]:
    """Open a file with whole tensors."""
    with open_weights(path) as file:
        yield {
            name: StoredTensor(
                tuple(file.get_slice(name).get_shape()),
                partial(_read_region, file, name),
            )
            for name in file.keys()  # noqa: SIM118  # the file is not a mapping
        }


@contextmanager
def open_sharded(
    folder: Path, layout: ShardLayout, stem: str
) -> Iterator[StoredTensors]:
    """Open the tensors of `stem` in the shards in `folder`.

    Raises:
        CheckpointError: The tensors are missing. Reading them raises it for a damaged shard, or for
            a shard that differs from the layout.
    """
    prefix = f"{stem}/"
    with ExitStack() as stack:

        @cache
        def open_file(number: int) -> Any:
            return stack.enter_context(open_weights(folder / layout.files[number]))

        tensors = {
            key.removeprefix(prefix): StoredTensor(
                tensor.shape, partial(_join_region, key, tensor, open_file)
            )
            for key, tensor in layout.tensors.items()
            if key.startswith(prefix)
        }
        if not tensors:
            raise CheckpointError(f"{folder} has no tensors for the {stem}.")
        yield tensors


def _join_region(
    key: str, tensor: CutTensor, open_file: Callable[[int], Any], region: Region
) -> Tensor:
    """Read a region of a tensor from the slices that it overlaps."""
    result = torch.empty(_shape_of(region), dtype=DTYPES[tensor.dtype])
    for number, start, stop in tensor.slices:
        stored = _ranges(tensor.shape, tensor.dim, start, stop)
        overlap = [
            slice(max(a.start, b.start), min(a.stop, b.stop))
            for a, b in zip(stored, region, strict=True)
        ]
        if any(r.start >= r.stop for r in overlap):
            continue
        part = _read_region(open_file(number), key, _shift(overlap, stored))
        target = result[_shift(overlap, region)]
        if part.shape != target.shape or part.dtype != target.dtype:
            raise CheckpointError(
                f"The slice of {key} from {start:,} to {stop:,} is {part.dtype} "
                f"{tuple(part.shape)}, which differs from {LAYOUT}. They belong to different "
                f"saves. {_REPLACE}"
            )
        target.copy_(part)
    return result


def _shape_of(region: Region) -> list[int]:
    return [r.stop - r.start for r in region]


def _shift(ranges: Sequence[slice], region: Region) -> Region:
    """Convert positions in the whole tensor to positions in `region`."""
    pairs = zip(ranges, region, strict=True)
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in pairs)


def _read_region(file: Any, name: str, region: Region) -> Tensor:
    """Read a region of a tensor from an open safetensors file."""
    stored = file.get_slice(name)
    if region == _all_of(stored.get_shape()):
        tensor: Tensor = file.get_tensor(name)
        return tensor
    if any(r.start >= r.stop for r in region):
        # safetensors cannot read an empty region.
        return torch.empty(_shape_of(region), dtype=stored[:1].dtype)
    part: Tensor = stored[region]
    return part.contiguous()
