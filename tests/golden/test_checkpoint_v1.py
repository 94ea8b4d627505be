"""A checkpoint of each format, and what every later version must make of it (fault 46).

`pytest --regenerate` writes a folder only where it is missing. A new format gets one of its own.
The weights are made up, from a seed.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from tiny import model_of, shape_of
from toque.batch import DecoderBatch
from toque.errors import CheckpointError
from toque.models.forward.loss import loss_sum
from toque.training.checkpoint.resume import load_model_tensors, model_tensors
from toque.training.checkpoint.saved import SHARDED, OtherFormatError, verify_checkpoint
from toque.training.checkpoint.store import CheckpointStore, RunIdentity
from toque.training.checkpoint.tensor_files import (
    LAYOUT,
    CutTensor,
    join_layouts,
    shard_name,
    shard_of,
    write_tensors,
)
from toque.training.optim.factory import (
    build_optimizer,
    load_optimizer_tensors,
    optimizer_tensors,
)

FOLDER = Path(__file__).parent / "checkpoint-v1"
SHARDS = Path(__file__).parent / "checkpoint-v2"
"""The same tensors, in the shards of two ranks."""
STEP = 3
LOSSES = (3.8978245, 3.6584511)
"""Nats per target of the fixed batch: as loaded, and after one more update, which reads the
optimizer's state."""
SHAPE = shape_of("gpt2", width=16, layers=1, heads=2, positions=32)
STATE = {
    "progress": {
        "step": STEP,
        "epoch": 0.25,
        "examples": 12,
        "tokens": 192,
        "target_tokens": 192,
    },
    "cursor": {"epoch": 0, "window": 0, "row": STEP, "stage": 0, "updates": 0},
}


def batch() -> DecoderBatch:
    """Four rows of sixteen made-up tokens, each predicting the next."""
    made = torch.randint(3, 97, (4, 17), generator=torch.Generator().manual_seed(2))
    return DecoderBatch(
        labels=made[:, 1:],
        example_ids=tuple((i,) for i in range(4)),
        tokens=made[:, :-1],
        segments=torch.ones(4, 16, dtype=torch.int32),
        positions=torch.arange(16).expand(4, 16),
    )


def parts() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = model_of("gpt2", vocab=97, seed=4, shape=SHAPE)
    return model, build_optimizer(model, weight_decay=0.1)


def updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """The loss before an update, nats per target."""
    optimizer.zero_grad()
    loss = loss_sum(model, batch()) / 64
    loss.backward()
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    optimizer.step()
    return float(loss.detach())


def write() -> None:
    model, optimizer = parts()
    for _ in range(STEP):
        updated(model, optimizer)
    versions = {"toque": "0.1", "torch": "2.13.0", "python": "3.11"}
    store = CheckpointStore(FOLDER, identity=RunIdentity("c0", "da7a", versions))
    tensors = {
        "model": model_tensors(model),
        "optimizer": optimizer_tensors(optimizer, model),
    }
    store.save(STEP, tensors, STATE)


def write_in_shards() -> None:
    """Two ranks' files, each matrix cut between them, as FSDP cuts it."""
    saved = verify_checkpoint(FOLDER / f"step-{STEP:08d}")
    tensors = {stem: saved.tensors(stem) for stem in ("model", "optimizer")}
    store = CheckpointStore(
        SHARDS, identity=RunIdentity("c0", "da7a", saved.manifest.versions)
    )
    with store.writing(SHARDS, STEP, 0) as writer:
        cuts, files = {}, []
        for rank in range(2):
            slices, cut = shard_of(tensors, rank=rank, world_size=2)
            for stem, named in tensors.items():
                for name, tensor in named.items():
                    if tensor.ndim == 2:
                        key, half = f"{stem}/{name}", -(-len(tensor) // 2)
                        start, stop = (0, half) if rank == 0 else (half, len(tensor))
                        slices[key] = tensor[start:stop]
                        shape = tuple(tensor.shape)
                        cut[key] = CutTensor("float32", shape, 0, ((0, start, stop),))
            file = shard_name(rank, 2)
            files.append(writer.write(file, partial(write_tensors, slices)))
            cuts[file] = cut
        files.append(writer.put(LAYOUT, join_layouts(cuts).to_json()))
        store.seal(writer, STEP, files, STATE, {}, version=SHARDED)


@pytest.mark.golden
def test_a_checkpoint_of_format_2_holds_what_that_of_format_1_does(
    *, regenerate: bool
) -> None:
    if regenerate and not SHARDS.exists():
        write_in_shards()
    whole = verify_checkpoint(FOLDER / f"step-{STEP:08d}")
    found = verify_checkpoint(SHARDS / f"step-{STEP:08d}")
    assert found.manifest.format == 2
    assert found.state() == STATE
    for stem in ("model", "optimizer"):
        mine, wanted = found.tensors(stem), whole.tensors(stem)
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], wanted[name]) for name in mine)
    assert sum(p.stat().st_size for p in SHARDS.rglob("*")) < 200_000


@pytest.mark.golden
def test_a_checkpoint_of_format_1_loads_to_the_same_loss(*, regenerate: bool) -> None:
    if regenerate and not FOLDER.exists():
        write()
    found = verify_checkpoint(FOLDER / f"step-{STEP:08d}")
    assert (found.manifest.format, found.manifest.data_fingerprint) == (1, "da7a")
    assert found.state() == STATE
    model, optimizer = parts()
    fresh = float(loss_sum(model, batch()).detach()) / 64
    load_model_tensors(model, found.tensors("model"), where="v1")
    load_optimizer_tensors(optimizer, model, found.tensors("optimizer"), where="v1")
    losses = (updated(model, optimizer), updated(model, optimizer))
    assert losses == pytest.approx(LOSSES, abs=1e-5)
    assert fresh > LOSSES[0] + 0.01
    assert sum(p.stat().st_size for p in FOLDER.rglob("*")) < 200_000


@pytest.mark.parametrize(
    ("version", "kind", "words"),
    [
        (
            SHARDED + 1,
            OtherFormatError,
            rf"has format {SHARDED + 1}, but this Toque reads",
        ),
        (0, CheckpointError, "has the unknown format 0"),
        (-3, CheckpointError, "has the unknown format -3"),
    ],
)
def test_another_format_is_refused_in_words(
    tmp_path: Path, version: int, kind: type[CheckpointError], words: str
) -> None:
    folder = tmp_path / f"step-{STEP:08d}"
    shutil.copytree(FOLDER / folder.name, folder)
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": version}))
    with pytest.raises(kind, match=words):
        verify_checkpoint(folder)


def test_a_checkpoint_from_before_version_020_is_refused_and_not_changed(
    tmp_path: Path,
) -> None:
    shutil.copytree(FOLDER, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / f"step-{STEP:08d}" / "manifest.json"
    held = {k: v for k, v in json.loads(path.read_text()).items() if k != "settings"}
    path.write_text(json.dumps(held))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(
        OtherFormatError, match=r"before Toque 0\.2\.0\. .* export its model"
    ):
        CheckpointStore(tmp_path / "checkpoints").newest_valid()
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
