"""Sharded checkpoints: two ranks write one, any number reads it, and half of one is none."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixtures.damage import flip
from fixtures.ranks import as_rank, loaded, surroundings
from toque.errors import CheckpointError
from toque.storage.atomic import sweep
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore
from toque.workflows.report import verify

SCRIPT = Path(__file__).parent / "sharded_ranks.py"
SHARDS = ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
sharded_ranks = loaded(SCRIPT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks left."""
    folder = tmp_path_factory.mktemp("sharded")
    shared = surroundings(timeout=300)
    both = [as_rank(n, shared, str(SCRIPT), str(folder)) for n in range(2)]
    said = [each.communicate(timeout=570)[0] for each in both]
    assert (folder / "rank0.json").exists(), said[0][-6000:]
    assert (folder / "rank1.json").exists(), said[1][-6000:]
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("strategy", ["fsdp", "replicas"])
def test_two_ranks_load_what_they_saved_and_go_on_to_the_bit(seen, strategy):
    first, second = (rank["continued"][strategy] for rank in seen)
    assert first == {"loaded": True, "continued": True, "told": [2], "counts": 1}
    assert second == first | {"told": []}


@pytest.mark.parametrize("strategy", ["fsdp", "replicas"])
def test_one_process_reads_what_two_wrote(folder, strategy):
    step = folder / strategy / "checkpoints" / "step-00000002"
    assert sorted(p.name for p in step.iterdir()) == [
        "manifest.json", *SHARDS, "shards.json", "state.json",
    ]  # fmt: skip
    found = verify_checkpoint(step)
    whole = load_file(folder / f"{strategy}.safetensors")
    for stem in ("model", "optimizer"):
        tensors = found.tensors(stem)
        assert tensors.keys() == {
            n.removeprefix(f"{stem}/") for n in whole if n.startswith(f"{stem}/")
        }
        for name, tensor in tensors.items():
            assert torch.equal(tensor, whole[f"{stem}/{name}"])
    assert found.state() == sharded_ranks.state(2)
    parts = sharded_ranks.Parts(9, None)
    parts.load(step)
    assert sharded_ranks.same(parts.whole(), whole)
    assert "in 2 shards, all hashes correct" in str(verify(step))


def test_two_ranks_read_what_one_process_wrote(seen):
    assert [rank["one"] for rank in seen] == [True, True]


def test_the_copies_are_of_the_step_and_a_save_due_meanwhile_is_skipped(seen):
    for rank, told in zip(seen, (True, False), strict=True):
        said = rank["background"]
        assert said["snapshot"]
        assert said["early"] == 0
        assert said["told"] == ([1] if told else [])
        assert said["skipped"] == 1
        assert [w.split(",")[0] for w in said["warnings"]] == (
            ["the save at step 2 is skipped"] if told else []
        )
        assert said["best"] == ["step-00000002"]


def test_a_full_disk_of_one_rank_is_a_failed_save_on_all(seen):
    for rank, told in zip(seen, (True, False), strict=True):
        said = rank["full"]
        assert "Cannot save step 3" in said["said"]
        assert "rank 1: No space left on device" in said["said"]
        assert ["Cannot save step 2" in w for w in said["warnings"]] == (
            [True] if told else []
        )
        assert said["failed"] == 2
        assert said["names"] == ["step-00000001"]
        assert said["whole"] == 1


def test_a_rank_killed_between_two_writes_leaves_the_checkpoint_before(seen, folder):
    assert seen[0]["killed"] == "lost"
    store = CheckpointStore(folder / "killed" / "checkpoints")
    found = store.newest_valid()
    assert found is not None
    assert (found.step, found.skipped) == (1, ())
    sweep(store.folder)
    assert [p.name for p in store.folder.iterdir()] == ["step-00000001"]


def test_shards_are_chosen_by_memory_and_need_a_shared_folder(seen):
    for rank in seen:
        assert rank["choices"]["fsdp"] == rank["choices"]["replicas"] == "whole"
        assert rank["choices"]["left"] == 0
        assert "Rank 1 cannot see the files of rank 0 in" in rank["choices"]["said"]


def mixed(step: Path) -> None:
    """The second rank's shard of another step, of the same size."""
    shutil.copy(step.with_name("step-00000002") / SHARDS[1], step / SHARDS[1])


def of_another_world(step: Path) -> None:
    """The manifest of a save by one process."""
    other = (
        step.parents[2]
        / "one-shard"
        / "checkpoints"
        / "step-00000002"
        / "manifest.json"
    )
    shutil.copy(other, step / "manifest.json")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (
        lambda s: flip(s / SHARDS[1]),
        f"{SHARDS[1]} is damaged: its SHA-256",
    ),
    "a missing shard": (lambda s: (s / SHARDS[0]).unlink(), f"{SHARDS[0]} is missing"),
    "shards of two saves": (mixed, f"{SHARDS[1]} is damaged: its SHA-256"),
    "a flipped bit of the layout": (
        lambda s: flip(s / "shards.json"),
        "shards.json is damaged",
    ),
    "a manifest of another world": (
        of_another_world,
        "has the checkpoint of step 2. It was renamed",
    ),
    "no layout": (lambda s: (s / "shards.json").unlink(), "shards.json is missing"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_taken(
    folder, tmp_path, case
):
    damage, words = DAMAGE[case]
    for name in ("fsdp", "one-shard"):
        shutil.copytree(folder / name, tmp_path / name)
    store = CheckpointStore(tmp_path / "fsdp" / "checkpoints")
    newest = store.folder / "step-00000004"
    damage(newest)
    found = store.newest_valid()
    assert found is not None
    assert found.step == 2
    (skipped,) = found.skipped
    assert words in skipped[1]
    with pytest.raises(CheckpointError, match=words):
        verify_checkpoint(newest)
    assert newest.exists()  # said, and left as it is
