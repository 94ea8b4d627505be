"""Shard layout `shards.json`: which slice of which tensor each file of a sharded checkpoint holds.

A tensor is cut along one dimension, as FSDP cuts it, or lies whole in one file. torch's distributed
checkpoints hold the same in a pickle, which can run code while it loads; this is JSON, and the
manifest holds its SHA-256 beside those of the shards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
import torch

from toque.errors import CheckpointError
from toque.storage.json_files import decode_json

LAYOUT: Final = "shards.json"
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


def shard_name(rank: int, world_size: int) -> str:
    """The file of one rank.

    >>> shard_name(0, 4)
    'shard-00000-of-00004.safetensors'
    """
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


class CutTensor(msgspec.Struct, frozen=True):
    """A tensor as one process has it, and where its slices are."""

    dtype: str
    """The dtype by torch's name, e.g. float32."""
    shape: tuple[Count, ...]
    dim: Count
    """Along which it is cut; 0 of a whole one."""
    slices: tuple[tuple[Count, Count, Count], ...]
    """(number of the file, start, stop along `dim`), which adjoin and cover the tensor."""

    @property
    def length(self) -> int:
        """Size along `dim`; 1 of a scalar, which is one slice [0, 1)."""
        return self.shape[self.dim] if self.shape else 1

    @property
    def bytes(self) -> int:
        """Bytes of all slices."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype that `dtype` names."""
        return DTYPES[self.dtype]

    def refuse_nonsense(self, n_files: int) -> None:
        """Refuse slices that overlap, leave a gap, or are in files there are not.

        Raises:
            ValueError: naming the first such.
        """
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

    def of(self, stem: str) -> dict[str, CutTensor]:
        """The tensors saved as `stem`, by their own names."""
        start = f"{stem}/"
        return {k.removeprefix(start): t for k, t in self.tensors.items() if k.startswith(start)}

    def bytes_of(self, stem: str) -> int:
        """Bytes of the tensors saved as `stem`."""
        return sum(tensor.bytes for tensor in self.of(stem).values())


def parse_layout(text: bytes, place: str, listed: set[str]) -> ShardLayout:
    """The layout in `text`, which was read from `place`, held to the files the manifest lists.

    Raises:
        CheckpointError: it is of another form, or names slices or files that cannot be.
    """
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


def joined(shards: Mapping[str, Mapping[str, CutTensor]]) -> ShardLayout:
    """The layout of all ranks' shards.

    Args:
        shards: by file, what it holds: each tensor with that one slice, its file number 0.
    """
    found: dict[str, CutTensor] = {}
    for number, held in enumerate(shards.values()):
        for name, part in held.items():
            ((_, start, stop),) = part.slices
            before = found[name].slices if name in found else ()
            slices = tuple(sorted([*before, (number, start, stop)], key=lambda s: s[1]))
            found[name] = msgspec.structs.replace(part, slices=slices)
    return ShardLayout(tuple(shards), found)
