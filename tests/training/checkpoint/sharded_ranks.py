"""Two ranks that hold a tiny model by FSDP, and save and load it; as a script, one of them.

`python sharded_ranks.py FOLDER` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set writes what
the rank saw to FOLDER/rank<N>.json, and rank 0 the tensors that were saved, whole. One pair of
processes walks all cases: starting torch is what takes time here. In the last the second is killed.
"""

import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from toque.errors import CheckpointError, RankLost
from toque.training.callbacks import Callback, Callbacks, Saved
from toque.training.checkpoint import resume
from toque.training.checkpoint.saved import verify_checkpoint
from toque.training.checkpoint.saver import CheckpointSaver, choose_layout
from toque.training.checkpoint.store import CheckpointStore, SaveError
from toque.training.checkpoint.tensor_files import write_tensors
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.process_group import join_ranks
from toque.training.optim.factory import build_optimizer
from toque.units import Progress


class Parts:
    """A model and its optimizer; by FSDP over `mesh`, or whole."""

    def __init__(self, seed: int, mesh: tuple[int, ...] | None) -> None:
        torch.manual_seed(seed)
        # 7 rows over two ranks are uneven; of 1 row the second rank has none.
        self.model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 1))
        if mesh is not None:
            names = ("replicate", "shard")[-len(mesh) :]
            on = init_device_mesh("cpu", mesh, mesh_dim_names=names)
            for layer in self.model:
                fully_shard(layer, mesh=on)
            fully_shard(self.model, mesh=on)
        self.optimizer = build_optimizer(self.model)

    def update(self, step: int, n: int = 1) -> None:
        """The same updates on every rank, so that any number of them makes the same weights."""
        for t in range(step, step + n):
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(t))
            self.model(inputs).square().mean().backward()
            for group in self.optimizer.param_groups:
                group["lr"] = 0.05
            self.optimizer.step()
            self.optimizer.zero_grad()

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return resume.trainer_tensors(self.model, self.optimizer)

    def whole(self) -> dict[str, Tensor]:
        """Every tensor as one process has it."""
        return {
            f"{stem}/{name}": (t.full_tensor() if isinstance(t, DTensor) else t).clone()
            for stem, named in self.tensors().items()
            for name, t in named.items()
        }

    def load(self, folder: Path) -> None:
        found = verify_checkpoint(folder)
        resume.load_tensors(found, self.model, self.optimizer)


class Told(Callback):
    def __init__(self) -> None:
        self.saved: list[int] = []
        self.warnings: list[str] = []

    def on_save(self, _at: Progress, saved: Saved) -> None:
        self.saved.append(saved.step)

    def on_warning(self, _at: Progress, message: str) -> None:
        self.warnings.append(message)


def saves_in(
    folder: Path,
    ranks: Ranks,
    *,
    background: bool = False,
    after: Callable[[str], None] = lambda _stage: None,
) -> tuple[CheckpointSaver, Told]:
    told = Told()
    store = CheckpointStore(folder / "checkpoints", keep_last=2, after=after)
    return CheckpointSaver(store, Callbacks([told]), ranks, "sharded", background), told


def state(step: int) -> dict[str, Any]:
    return {"progress": {"step": step}, "cursor": {}}


def save(
    saves: CheckpointSaver, parts: Parts, step: int, *, final: bool = True
) -> None:
    saves.save(Progress(step), parts.tensors(), state(step), final=final)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[n], other[n]) for n in one
    )


def saved_and_continued(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Saved after two updates; loaded again, further updates are the same."""
    seen: dict[str, Any] = {}
    for name, mesh in {"fsdp": (2,), "replicas": None}.items():
        parts, other = Parts(1, mesh), Parts(2, mesh)
        parts.update(0, 2)
        saves, told = saves_in(folder / name, ranks)
        save(saves, parts, 2)
        if ranks.is_main or mesh is not None:
            whole = parts.whole()
        if ranks.is_main:
            write_tensors(whole, folder / f"{name}.safetensors")
        other.load(folder / name / "checkpoints" / "step-00000002")
        loaded = (
            same(other.whole(), whole) if ranks.is_main or mesh is not None else True
        )
        parts.update(2, 2), other.update(2, 2)
        seen[name] = {
            "loaded": loaded,
            "continued": same(other.whole(), parts.whole()),
            "told": list(told.saved),
            "counts": saves.counts.written,
        }
        if name == "fsdp":
            save(saves, parts, 4)
    return seen


def loaded_from_one_process(ranks: Ranks, folder: Path) -> bool:
    """What one process saved whole, and in one shard, two ranks read their slices of."""
    alone = Parts(3, None)
    alone.update(0, 2)
    if ranks.is_main:
        CheckpointStore(folder / "one" / "checkpoints").save(
            2, alone.tensors(), state(2)
        )
        save(saves_in(folder / "one-shard", Ranks())[0], alone, 2)
    ranks.broadcast()
    equal = True
    for name in ("one", "one-shard"):
        parts = Parts(1, (2,))
        parts.load(folder / name / "checkpoints" / "step-00000002")
        equal &= same(parts.whole(), alone.whole())
    return equal


def in_the_background(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The second rank's write takes until it is told; a save that is due meanwhile is skipped."""
    go_on = threading.Event()

    def after(stage: str) -> None:
        if stage.startswith("write shard") and ranks.rank == 1:
            go_on.wait()

    saves, told = saves_in(folder / "background", ranks, background=True, after=after)
    parts = Parts(1, (2,))
    with saves.session(lambda: Progress(4)):
        parts.update(0)
        save(saves, parts, 1, final=False)
        before = parts.whole()
        parts.update(1)  # the copies are of before
        save(saves, parts, 2, final=False)
        kept = list((folder / "background" / "checkpoints").glob("step-*"))
        go_on.set()
        saves.save_best(Progress(2), parts.model, {"loss": 2.0})
        saves.save_best(Progress(3), parts.model, {"loss": 3.0})
    other = Parts(2, (2,))
    other.load(folder / "background" / "checkpoints" / "step-00000001")
    return {
        "snapshot": same(other.whole(), before),
        "early": len(kept),
        "told": told.saved,
        "warnings": told.warnings,
        "skipped": saves.counts.skipped,
        "best": sorted(p.name for p in (folder / "background" / "best").iterdir()),
    }


def refused_by_a_disk(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The second rank's disk is full: no rank takes the save for done, the one before stands."""
    failing = [False]

    def after(stage: str) -> None:
        if failing[0] and stage.startswith("write shard-00001"):
            raise OSError(28, "No space left on device")

    saves, told = saves_in(folder / "full", ranks, after=after)
    parts = Parts(1, (2,))
    parts.update(0)
    save(saves, parts, 1)
    failing[0] = True
    parts.update(1)
    save(saves, parts, 2, final=False)
    try:
        save(saves, parts, 3)
        said = ""
    except SaveError as error:
        said = str(error)
    names = sorted(p.name for p in (folder / "full" / "checkpoints").iterdir())
    return {
        "said": said,
        "warnings": told.warnings,
        "failed": saves.counts.failed,
        "names": names,
        "whole": verify_checkpoint(
            folder / "full" / "checkpoints" / "step-00000001"
        ).step,
    }


def choices(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Small shards are gathered; a folder of one's own is refused."""
    found = {}
    for name, mesh in {"fsdp": (2,), "replicas": None}.items():
        parts = Parts(1, mesh)
        found[name] = choose_layout("auto", parts.model, parts.optimizer, ranks=ranks)
    resume.refuse_unshared_folder(folder / "shared", ranks)
    ranks.broadcast()
    left = list((folder / "shared" / "checkpoints").iterdir())
    try:
        resume.refuse_unshared_folder(folder / f"own{ranks.rank}", ranks)
        said = ""
    except CheckpointError as error:
        said = str(error)
    return found | {"said": said, "left": len(left)}


def killed_between_two_writes(ranks: Ranks, folder: Path) -> str:
    """The second rank dies when its shard is written; the first makes no checkpoint of the two."""
    dying = [False]

    def after(stage: str) -> None:
        if dying[0] and stage.startswith("write shard-00001"):
            os.kill(os.getpid(), signal.SIGKILL)

    saves, _ = saves_in(folder / "killed", ranks, after=after)
    parts = Parts(1, (2,))
    parts.update(0)
    save(saves, parts, 1)
    dying[0] = True
    parts.update(1)
    try:
        with saves.session(lambda: Progress(2)):
            save(saves, parts, 2)
    except RankLost:
        return "lost"
    return ""


def work(folder: Path) -> None:
    with join_ranks(strategy="ddp") as ranks:
        seen: dict[str, Any] = {
            "continued": saved_and_continued(ranks, folder),
            "one": loaded_from_one_process(ranks, folder),
            "background": in_the_background(ranks, folder),
            "full": refused_by_a_disk(ranks, folder),
            "choices": choices(ranks, folder),
        }
        path = folder / f"rank{ranks.rank}.json"
        path.write_text(json.dumps(seen))
        ranks.broadcast()
        seen["killed"] = killed_between_two_writes(ranks, folder)
        path.write_text(json.dumps(seen))
        os._exit(0)  # the other is gone: leaving in order would wait for it


if __name__ == "__main__":
    torch.set_num_threads(1)
    shutil.rmtree(sys.argv[1] + "/killed", ignore_errors=True)
    work(Path(sys.argv[1]))
