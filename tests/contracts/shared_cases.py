"""Tiny real runs shared by strategies; as a script, what one rank of several does.

`python shared_cases.py FOLDER VERB CASE...` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set
writes what the rank saw to FOLDER/rank<N>.json. One group of processes walks many cases: starting
torch is what takes time here. A case is family/strategy/weights/share: t5/fsdp/lora/uneven.
"""

import hashlib
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fixtures.trainers import Numbers, small_trainer
from tiny import model_of, shape_of, stream_of, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.lora.layers import attach, refuse_unreached
from toque.training.callbacks import Requests, StepInfo
from toque.training.checkpoint.resume import model_tensors
from toque.training.distributed.collectives import Ranks, weights_sum
from toque.training.distributed.data_parallel import (
    DataParallel,
    Replicated,
    gather_tensors,
    local_part,
)
from toque.training.distributed.process_group import join_ranks
from toque.training.distributed.sharding import Sharded
from toque.training.optim.factory import (
    build_optimizer,
    optimizer_tensors,
    step_if,
)
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.optim.weight_average import AVERAGE, keep_average
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.units import Cursor, Duration

UPDATES = 10
SAVED_AT = 4
"""Step of the checkpoint that a run is continued from."""
ROWS = {"even": 4, "uneven": 5}
"""Rows of an update; of 5 the ranks have 3 and 2, in 2 micro-batches and 1, and of the last update
of an epoch one rank has none."""


def shared(model: nn.Module, strategy: str, ranks: Ranks) -> DataParallel:
    if strategy == "single":
        return DataParallel(model)
    if strategy == "ddp":
        return Replicated(model)
    return Sharded(model, ranks, device=torch.device("cpu"), dtype=torch.float32)


def run_of(
    case: str, ranks: Ranks, folder: Path, *, stop_at: int | None = None
) -> tuple[Trainer, Numbers]:
    """A run with packing, accumulation, clipping and noise, ready to go on."""
    family, strategy, weights, share = case.split("/")
    model = model_of(family, seed=5, shape=shape_of(family, dropout=0.1)).train()
    if weights == "lora":
        attach(model, AdapterConfig(r=4, dropout=0.1), base="tiny", seed=3)
    use_keyed_dropout(model)
    use_cpu_layers(model)
    runtime = Runtime.detect(device="cpu", precision="float32", ranks=ranks)

    def ask(info: StepInfo) -> Requests | None:
        if info.progress.step == stop_at:
            return Requests(stop=True, save=True, reason="enough")
        return Requests(save=True) if info.progress.step == SAVED_AT else None

    sharing, seen = shared(model, strategy, ranks), Numbers(ask)
    optimizer = build_optimizer(model)
    keep_average(optimizer, 0.9)
    trainer = small_trainer(
        model,
        stream_of(
            uneven_examples(38),
            family,
            update_rows=ROWS[share],
            rank=ranks.rank,
            world_size=ranks.world_size,
        ),
        folder=folder,
        runtime=runtime,
        schedule=Schedule(
            Duration(UPDATES, "steps"), Duration(5, "steps"), Duration(20, "steps")
        ),
        callbacks=(seen,),
        sharing=sharing,
        optimizer=optimizer,
        check_reached=refuse_unreached if weights == "lora" else None,
        noise=GradientNoise(eta=1e-4, gamma=0.55, seed=1),
    )
    return trainer, seen


def ended(trainer: Trainer, seen: Numbers) -> dict[str, Any]:
    end = trainer.fit()
    state = optimizer_tensors(trainer.optimizer, trainer.model)
    averages = {key: t for key, t in state.items() if key.endswith(AVERAGE)}
    assert averages
    whole = gather_tensors({"": model_tensors(trainer.model) | averages}, keep=True)[""]
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(
            whole[name].detach().contiguous().view(torch.uint8).numpy().tobytes()
        )
    return {
        "losses": seen.losses,
        "norms": seen.norms,
        "best": end.best.loss if end.best else None,
        "weights": digest.hexdigest(),
        "notes": trainer.notes,
        "waits": sorted(waits_of(trainer.model)),
    }


def waits_of(model: nn.Module) -> set[float]:
    """Seconds that the groups wait over which a model is divided."""
    divided = [p for p in model.parameters() if isinstance(p, DTensor)]
    groups = [group for p in divided for group in p.device_mesh.get_all_groups()]
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def moved(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """So many more updates of a run that other numbers of processes began or will end."""
    stop_at = int(os.environ["STOP_AT"])
    return ended(*run_of(case, ranks, folder / "moved", stop_at=stop_at))


def both(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The run by all ranks, and from its checkpoint; and by one of the processes alone."""
    family, _, weights, share = case.split("/")
    single = f"{family}/single/{weights}/{share}"
    whole, part = folder / "whole" / case, folder / "part" / case
    found = {"shared": ended(*run_of(case, ranks, whole))}
    if ranks.rank == 0:
        saved = f"checkpoints/step-{SAVED_AT:08d}"
        shutil.copytree(whole / saved, part / saved)
    ranks.all_reduce_sum([0.0])  # it is there for all
    found["continued"] = ended(*run_of(case, ranks, part))
    if (
        zlib.crc32(case.encode()) % ranks.world_size == ranks.rank
    ):  # the cases are dealt out
        found["alone"] = ended(*run_of(single, Ranks(), folder / "alone" / case))
    return found


def skipped(case: str, ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Updates as a GPU skips them: of the second a gradient is infinite, on rank 1 alone."""
    trainer, _ = run_of(case, ranks, folder / "skipped")
    model, optimizer, step = (
        trainer.model,
        trainer.optimizer,
        trainer.batches.at(Cursor()),
    )
    micro_batches = trainer.sharing.micro_batches(step.batch, 2)
    (group, *_) = optimizer.param_groups
    found: dict[str, Any] = {"changed": [], "finite": [], "state": []}
    for broken in (None, 1, None):
        trainer.forward_backward(micro_batches, step.n_targets)
        if broken == ranks.rank:
            local_part(group["params"][0].grad).fill_(torch.inf)
        finite = torch.isfinite(trainer.runtime.clip_gradients(optimizer, 0.5))
        group["lr"], before = 1e-2, weights_sum(model)
        step_if(optimizer, finite, torch.device("cuda"), step=0)
        optimizer.zero_grad()
        found["finite"].append(bool(finite))
        found["changed"].append(weights_sum(model) != before)
        steps = {float(state["step"]) for state in optimizer.state.values()}
        found["state"].append(sorted(steps))
    return found


VERBS: dict[str, Callable[[str, Ranks, Path], dict[str, Any]]] = {
    "both": both, "moved": moved, "skipped": skipped,
}  # fmt: skip


def work(folder: Path, verb: str, cases: list[str]) -> None:
    strategy = cast("Any", cases[0].split("/")[1])
    with join_ranks(strategy="auto" if strategy == "copies" else strategy) as ranks:
        seen = {case: VERBS[verb](case, ranks, folder / verb) for case in cases}
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    work(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    os._exit(0)  # gloo may abort a process that is done
