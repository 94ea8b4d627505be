"""Slices of tensors: any number of ranks writes, any other number reads the same numbers."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Shard,
    distribute_tensor,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

from toque.errors import CheckpointError
from toque.training.checkpoint.tensor_files import (
    ShardLayout,
    joined_layout,
    parse_layout,
    read_sharded,
    read_whole,
    shard_name,
    shard_of,
    write_tensors,
)

WHOLE = {
    "model": {
        "w": torch.arange(77.0).reshape(7, 11),
        "b": torch.arange(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    },
    "optimizer": {"w/exp_avg": -torch.arange(77.0).reshape(7, 11), "w/step": torch.tensor(5.0)},
}
ONE = (Shard(0),)
Cut = Callable[[Tensor], Tensor]


@contextmanager
def one_of(rank: int, sizes: tuple[int, ...], placements: tuple[Placement, ...]) -> Iterator[Cut]:
    """Be one rank of a mesh, the others of which are made up: nothing here is exchanged."""
    world_size = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", sizes)

    def cut(tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            return tensor  # as FSDP leaves counts of steps
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)

    try:
        yield cut
    finally:
        dist.destroy_process_group()


def write(
    folder: Path, sizes: tuple[int, ...], placements: tuple[Placement, ...] = ONE
) -> ShardLayout:
    world_size, cuts = torch.Size(sizes).numel(), {}
    for rank in range(world_size):
        with one_of(rank, sizes, placements) as cut:
            own = {stem: {n: cut(t) for n, t in named.items()} for stem, named in WHOLE.items()}
            slices, cut_here = shard_of(own, rank=rank, world_size=world_size)
        name = shard_name(rank, world_size)
        write_tensors(slices, folder / name)
        cuts[name] = cut_here
    layout = joined_layout(cuts)
    text = layout.to_json()
    return parse_layout(text, "shards.json", set(cuts))


LAYOUTS = [
    ((1,), ONE), ((2,), ONE), ((3,), ONE), ((9,), ONE), ((2,), (Shard(1),)), ((4,), (Shard(-1),)),
]  # fmt: skip
"""9 ranks are more than the tensors have rows."""
READERS = [LAYOUTS[i] for i in (0, 2, 4)]


@pytest.mark.parametrize("written", LAYOUTS)
def test_any_mesh_reads_what_any_other_wrote(tmp_path, written):
    layout = write(tmp_path, *written)
    for sizes, placements in READERS:
        for rank in range(torch.Size(sizes).numel()):
            with one_of(rank, sizes, placements) as cut:
                for stem, named in WHOLE.items():
                    own = {name: cut(torch.full_like(t, 7)) for name, t in named.items()}
                    found = read_sharded(tmp_path, layout, stem, own.get)
                    assert found.keys() == named.keys()
                    for name, tensor in named.items():
                        same(found[name], cut(tensor))


def same(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    if isinstance(wanted, DTensor):
        assert isinstance(found, DTensor)
        assert found.placements == wanted.placements
        found, wanted = found.to_local(), wanted.to_local()
    assert torch.equal(found, wanted)


def test_each_number_is_written_once_and_plain_tensors_are_dealt_out(tmp_path):
    write(tmp_path, (4,))
    sizes = [file.stat().st_size for file in sorted(tmp_path.iterdir())]
    whole = tmp_path / "whole.safetensors"
    every = {f"{stem}/{n}": t for stem, named in WHOLE.items() for n, t in named.items()}
    write_tensors(every, whole)
    headers = 5 * 600
    assert sum(sizes) <= whole.stat().st_size + headers
    assert max(sizes) < 0.5 * whole.stat().st_size


def test_a_rank_reads_its_slice_of_a_whole_file(tmp_path):
    path = tmp_path / "model.safetensors"
    write_tensors(WHOLE["model"], path)
    for rank, placement in itertools.product(range(4), (Shard(0), Shard(1))):
        with one_of(rank, (4,), (placement,)) as cut:
            own = {name: cut(torch.zeros_like(t)) for name, t in WHOLE["model"].items()}
            found = read_whole(path, own.get)
            for name, tensor in WHOLE["model"].items():
                same(found[name], cut(tensor))


def test_a_tensor_of_another_shape_than_the_runs_is_read_whole(tmp_path):
    layout = write(tmp_path, (2,))
    with one_of(0, (2,), ONE) as cut:
        other = cut(torch.zeros(8, 11))
        found = read_sharded(tmp_path, layout, "model", {"w": other}.get)
    assert torch.equal(found["w"], WHOLE["model"]["w"])  # the mismatch is for the loader to name


def changed(layout: ShardLayout, name: str, **fields: object) -> bytes:
    record = json.loads(layout.to_json())
    record["tensors"][name] |= fields
    return json.dumps(record).encode()


NONSENSE = {
    "overlaps": ({"slices": [[0, 0, 4], [1, 3, 7]]}, "after 4 comes the slice from 3 to 7"),
    "a gap": ({"slices": [[0, 0, 3], [1, 4, 7]]}, "after 3 comes the slice from 4 to 7"),
    "an end too early": ({"slices": [[0, 0, 4]]}, "its slices end at 4 of 7"),
    "backwards": ({"slices": [[0, 0, 4], [1, 4, 2]]}, "after 4 comes the slice from 4 to 2"),
    "another file": ({"slices": [[0, 0, 4], [2, 4, 7]]}, "a slice is in file 2 of 2"),
    "another dimension": ({"dim": 2}, "cut along dimension 2 of 2"),
    "no dtype": ({"dtype": "Tensor"}, "'Tensor' is no dtype"),
    "below zero": ({"slices": [[0, -1, 7]]}, "not the layout of shards"),
    "endless": ({"shape": [1 << 60, 11]}, "not the layout of shards"),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_layout_that_cannot_be_is_refused(tmp_path, case):
    fields, words = NONSENSE[case]
    text = changed(write(tmp_path, (2,)), "model/w", **fields)
    with pytest.raises(CheckpointError, match=words):
        parse_layout(text, "shards.json", {shard_name(0, 2), shard_name(1, 2)})


def test_a_layout_that_names_a_file_the_manifest_does_not_is_of_another_save(tmp_path):
    layout = write(tmp_path, (2,))
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002.*they are of two saves"):
        parse_layout(layout.to_json(), "shards.json", {shard_name(0, 2)})


def test_a_file_whose_slice_is_another_than_the_layout_says_is_named(tmp_path):
    layout = write(tmp_path, (2,))
    write_tensors({"model/w": torch.zeros(2, 11)}, tmp_path / shard_name(1, 2))
    with pytest.raises(CheckpointError, match=r"slice of model/w from 4 to 7 .* two saves"):
        read_sharded(tmp_path, layout, "model", lambda _name: None)


def test_a_file_without_the_tensor_is_named(tmp_path):
    layout = write(tmp_path, (2,))
    write_tensors({"model/v": torch.zeros(3, 11)}, tmp_path / shard_name(1, 2))
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors"):
        read_sharded(tmp_path, layout, "model", lambda _name: None)
    with pytest.raises(CheckpointError, match="no tensors of the average"):
        read_sharded(tmp_path, layout, "average", lambda _name: None)
