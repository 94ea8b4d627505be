"""Files of tensors, and their slices: any ranks write, any other number reads the same numbers."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
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
from toque.storage.array_headers import open_weights
from toque.training.checkpoint.resume import load_model_tensors, model_tensors
from toque.training.checkpoint.tensor_files import (
    ShardLayout,
    bytes_of,
    join_layouts,
    open_sharded,
    open_whole,
    parse_layout,
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
    "optimizer": {
        "w/exp_avg": -torch.arange(77.0).reshape(7, 11),
        "w/step": torch.tensor(5.0),
    },
}
ONE = (Shard(0),)
Cut = Callable[[Tensor], Tensor]


@contextmanager
def one_of(
    rank: int, sizes: tuple[int, ...], placements: tuple[Placement, ...]
) -> Iterator[Cut]:
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
            own = {
                stem: {n: cut(t) for n, t in named.items()}
                for stem, named in WHOLE.items()
            }
            slices, cut_here = shard_of(own, rank=rank, world_size=world_size)
        name = shard_name(rank, world_size)
        write_tensors(slices, folder / name)
        cuts[name] = cut_here
    layout = join_layouts(cuts)
    text = layout.to_json()
    return parse_layout(text, "shards.json", set(cuts))


LAYOUTS = [
    ((1,), ONE), ((2,), ONE), ((3,), ONE), ((9,), ONE), ((2,), (Shard(1),)), ((4,), (Shard(-1),)),
]  # fmt: skip
"""9 ranks are more than the tensors have rows."""
READERS = [LAYOUTS[i] for i in (0, 2, 4)]


def read_sharded(folder, layout, stem, like) -> dict[str, Tensor]:
    with open_sharded(folder, layout, stem) as tensors:
        return {name: stored.read_like(like(name)) for name, stored in tensors.items()}


def read_whole(path, like) -> dict[str, Tensor]:
    with open_whole(path) as tensors:
        return {name: stored.read_like(like(name)) for name, stored in tensors.items()}


@pytest.mark.parametrize("written", LAYOUTS)
def test_any_mesh_reads_what_any_other_wrote(tmp_path, written):
    layout = write(tmp_path, *written)
    for sizes, placements in READERS:
        for rank in range(torch.Size(sizes).numel()):
            with one_of(rank, sizes, placements) as cut:
                for stem, named in WHOLE.items():
                    own = {
                        name: cut(torch.full_like(t, 7)) for name, t in named.items()
                    }
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
    every = {
        f"{stem}/{n}": t for stem, named in WHOLE.items() for n, t in named.items()
    }
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
    assert torch.equal(
        found["w"], WHOLE["model"]["w"]
    )  # the mismatch is for the loader to name


def changed(layout: ShardLayout, name: str, **fields: object) -> bytes:
    record = json.loads(layout.to_json())
    record["tensors"][name] |= fields
    return json.dumps(record).encode()


NONSENSE = {
    "overlaps": (
        {"slices": [[0, 0, 4], [1, 3, 7]]},
        "the slice after 4 is from 3 to 7",
    ),
    "a gap": (
        {"slices": [[0, 0, 3], [1, 4, 7]]},
        "the slice after 3 is from 4 to 7",
    ),
    "an end too early": ({"slices": [[0, 0, 4]]}, "its slices end at 4 of 7"),
    "backwards": (
        {"slices": [[0, 0, 4], [1, 4, 2]]},
        "the slice after 4 is from 4 to 2",
    ),
    "another file": ({"slices": [[0, 0, 4], [2, 4, 7]]}, "a slice is in file 2 of 2"),
    "another dimension": ({"dim": 2}, "split along dimension 2, but has 2 dimensions"),
    "no dtype": ({"dtype": "Tensor"}, "'Tensor' is not a dtype"),
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
    with pytest.raises(
        CheckpointError, match=r"shard-00001-of-00002.*They belong to different saves"
    ):
        parse_layout(layout.to_json(), "shards.json", {shard_name(0, 2)})


def test_a_file_whose_slice_is_another_than_the_layout_says_is_named(tmp_path):
    layout = write(tmp_path, (2,))
    write_tensors({"model/w": torch.zeros(2, 11)}, tmp_path / shard_name(1, 2))
    with pytest.raises(
        CheckpointError, match=r"slice of model/w from 4 to 7 .* different saves"
    ):
        read_sharded(tmp_path, layout, "model", lambda _name: None)


def test_a_file_without_the_tensor_is_named(tmp_path):
    layout = write(tmp_path, (2,))
    write_tensors({"model/v": torch.zeros(3, 11)}, tmp_path / shard_name(1, 2))
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002\.safetensors"):
        read_sharded(tmp_path, layout, "model", lambda _name: None)
    with pytest.raises(CheckpointError, match="no tensors for the average"):
        read_sharded(tmp_path, layout, "average", lambda _name: None)


def test_views_and_transposes_are_written_as_they_read(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "t": base.T,
        "row": base[1],
        "base": base,
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    write_tensors(tensors, tmp_path / "a")
    back = load_file(tmp_path / "a")
    assert torch.equal(back["t"], base.T)
    assert torch.equal(back["row"], base[1])
    assert torch.equal(back["base"], base)
    assert (
        back["nan"].view(torch.int32).tolist()
        == tensors["nan"].view(torch.int32).tolist()
    )
    assert bytes_of(tensors) == 48 + 16 + 48 + 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "declares a header"),
        (
            (10**10).to_bytes(8, "little") + b"{}",
            "declares a header of 10,000,000,000 bytes",
        ),
        ((2).to_bytes(8, "little") + b"[]", "damaged or truncated"),
        (b"\x80\x04\x95 a pickle, say, of some length", "declares a header"),
        (None, "x.safetensors is missing."),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message), open_weights(path):
        pass


def test_tied_parameters_come_once_and_buffers_are_state(tiny_model):
    names = model_tensors(tiny_model).keys()
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert "scale" in names


def test_loading_keeps_ties_and_copies(tiny_model):
    saved = {n: t.clone() for n, t in model_tensors(tiny_model).items()}
    with torch.no_grad():
        for p in tiny_model.parameters():
            p.zero_()
    load_model_tensors(tiny_model, saved, where="x")
    assert tiny_model.head.weight is tiny_model.embed.weight
    assert torch.equal(tiny_model.embed.weight, saved["embed.weight"])


def test_each_difference_is_named_and_nothing_is_loaded(tiny_model):
    saved = {n: t.clone() for n, t in model_tensors(tiny_model).items()}
    saved["norm.weight"] = torch.zeros(3)
    saved["norm.bias"] = saved["norm.bias"].double()
    saved["extra"] = saved.pop("scale")
    before = tiny_model.embed.weight.detach().clone()
    saved["embed.weight"].zero_()
    with pytest.raises(CheckpointError) as error:
        load_model_tensors(tiny_model, saved, where="step-9")
    for part in (
        "norm.weight is float32 3",
        "norm.bias is float64",
        "extra is unk",
        "scale is mi",
    ):
        assert part in str(error.value)
    assert torch.equal(tiny_model.embed.weight, before)
