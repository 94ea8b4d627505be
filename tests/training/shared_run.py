"""Tiny real runs that one process or several can share; as a script, what one rank of two does.

`python shared_run.py FOLDER` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set writes what the
rank saw to FOLDER/rank<N>.json. One pair of processes does everything: starting torch is what takes
time here.
"""

import gc
import json
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fixtures.trainers import Numbers, small_trainer
from tiny import model_of, shape_of, stream_of, uneven_examples
from toque.batch import Batch
from toque.data.loader.batch_stream import BatchStream
from toque.errors import CheckpointError, ConfigError, NonFiniteError
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.forward.loss import loss_sum
from toque.training.callbacks import Requests, StepInfo
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import Replicated
from toque.training.distributed.process_group import (
    join_ranks,
    refuse_different_ranks,
    versions,
)
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.runtime import Runtime
from toque.training.trainer import Schedule, Trainer
from toque.units import Cursor, Duration

FAMILIES = ("gpt2", "t5")
"""One of each kind; the contract on shared updates walks all of them in every strategy."""
N = 38
STEPS = 6
"""Updates of 5 rows; GPT-2's fourth has a single one, so of two ranks the second has none."""


def stream(family: str, ranks: Ranks) -> BatchStream:
    pairs = uneven_examples(N)
    return stream_of(
        pairs, family, update_rows=5, rank=ranks.rank, world_size=ranks.world_size
    )


def run_of(
    family: str,
    ranks: Ranks,
    folder: Path,
    *,
    steps: int = STEPS,
    stop_after: str = "",
    ask: Callable[[StepInfo], Requests | None] | None = None,
    loss_fn: Callable[[nn.Module, Batch], Tensor] | None = None,
) -> tuple[Trainer, Numbers]:
    """A run with packing, accumulation, clipping, noise and smoothing, ready to go."""
    model = model_of(
        family, seed=5, shape=shape_of(family, layers=1, dropout=0.1)
    ).train()
    use_keyed_dropout(model)
    runtime = Runtime.detect(device="cpu", precision="float32", ranks=ranks)
    seen = Numbers(ask)
    trainer = small_trainer(
        model,
        stream(family, ranks),
        folder=folder,
        runtime=runtime,
        schedule=Schedule(
            Duration.parse(stop_after or f"{steps} steps"),
            Duration(3, "steps"),
            Duration(3, "steps"),
        ),
        callbacks=(seen,),
        loss_fn=loss_fn,
        sharing=Replicated(model) if ranks.is_distributed else None,
        noise=GradientNoise(eta=1e-4, gamma=0.55, seed=1),
    )
    return trainer, seen


class Three(nn.Module):
    """One parameter that all reach, one that nobody does, one that the second rank does."""

    def __init__(self) -> None:
        super().__init__()
        self.mine, self.nobodys, self.second_ranks = (
            nn.Parameter(torch.zeros(n)) for n in (3, 2, 4)
        )


def gradients(ranks: Ranks) -> list[list[float] | None]:
    model = Three()
    sharing = Replicated(model)

    def loss_fn(model: nn.Module, _batch: Batch) -> Tensor:
        assert isinstance(model, Three)
        loss = (model.mine * (torch.arange(3.0) + ranks.rank)).sum()
        return loss + 1.5 * model.second_ranks.sum() if ranks.rank == 1 else loss

    batch = stream("gpt2", ranks).at(Cursor()).batch
    for last in (
        False,
        True,
    ):  # only the last backward exchanges, and all that was added up
        sharing.loss(loss_fn, batch, last=last).backward()
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def exchanges(ranks: Ranks) -> dict[str, Any]:
    """Everything ranks say to each other."""
    wants = Requests(
        save=ranks.rank == 1, stop=True, reason="tired" if ranks.rank else ""
    )
    return {
        "total": ranks.all_reduce_sum([1.0, ranks.rank]),
        "gather": ranks.all_gather({"rank": ranks.rank, "name": "é" * ranks.rank}),
        "first": ranks.broadcast(["of", ranks.rank]),
        "agreed": asdict(ranks.combine_requests(wants)),
        "nothing": asdict(ranks.combine_requests(Requests())),
        "most": ranks.all_reduce_max(3 + ranks.rank),
        "loss": float(ranks.total(torch.tensor(1.0 + ranks.rank))),
        "gradients": gradients(ranks),
    }  # fmt: skip


def families(ranks: Ranks, folder: Path) -> dict[str, Any]:
    found = {}
    for family in FAMILIES:
        trainer, seen = run_of(family, ranks, folder / family)
        end = trainer.fit()
        found[family] = {
            "losses": seen.losses,
            "norms": seen.norms,
            "computed": seen.computed,
            "best": end.best.loss if end.best else None,
            "progress": asdict(end.progress),
        }
    return found


def stopped_by_the_second(ranks: Ranks, folder: Path) -> dict[str, Any]:
    def ask(info: StepInfo) -> Requests | None:
        tired = ranks.rank == 1 and info.progress.step == 2
        return Requests(stop=True, save=True, reason="tired") if tired else None

    trainer, _ = run_of("gpt2", ranks, folder / "tired", ask=ask)
    end = trainer.fit()
    return {"reason": end.reason, "step": end.progress.step}


def short_of_memory(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """The second rank runs out of memory once, in the middle of an update."""
    calls = [0]

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        if ranks.rank == 1 and calls[0] == 4:
            raise torch.OutOfMemoryError("out of memory")
        return loss_sum(model, batch, smoothing=0.1)

    trainer, seen = run_of("gpt2", ranks, folder / "memory", loss_fn=loss_fn)
    trainer.fit()
    return {"losses": seen.losses, "smaller_from": trainer.oom_fallback.smaller_from}


def refusal(kind: type[Exception], work: Callable[[], object]) -> str:
    """The message of the error that ends `work`; "" where it is not of that kind."""
    try:
        work()
    except kind as error:
        return str(error)
    return ""


def not_a_number(ranks: Ranks, folder: Path) -> dict[str, Any]:
    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        loss = loss_sum(model, batch)
        return (
            loss * float("nan")
            if ranks.rank == 1 and trainer.progress.step == 2
            else loss
        )

    trainer, _ = run_of("gpt2", ranks, folder / "nan", loss_fn=loss_fn)
    return {"said": refusal(NonFiniteError, trainer.fit), "step": trainer.progress.step}


def apart(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """One bit of one weight of the second rank changes."""

    def flip(info: StepInfo) -> None:
        if ranks.rank == 1 and info.progress.step == 2:
            weight = next(trainer.model.parameters()).detach().view(-1)
            weight.view(torch.int32)[7] ^= 1 << 20

    trainer, _ = run_of("gpt2", ranks, folder / "apart", ask=flip)
    return {"said": refusal(CheckpointError, trainer.fit)}


def in_minutes(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Clocks differ; the end of a run in minutes must not."""
    trainer, seen = run_of(
        "gpt2", ranks, folder / "minutes", stop_after="0.005 minutes"
    )
    end = trainer.fit()
    return {"progress": asdict(end.progress), "updates": len(seen.losses)}


def unlike(ranks: Ranks) -> dict[str, Any]:
    """Another version of torch beside the first rank's; then nothing that differs."""
    refuse_different_ranks(ranks, versions())
    other = {"torch": f"2.{ranks.rank}", "python": "3.11"}
    return {"said": refusal(ConfigError, lambda: refuse_different_ranks(ranks, other))}


def work(folder: Path) -> None:
    with join_ranks(strategy="ddp") as ranks:
        group = weakref.ref(dist.group.WORLD)
        seen: dict[str, Any] = {
            "exchanges": exchanges(ranks),
            "unlike": unlike(ranks),
            "families": families(ranks, folder),
            "stopped": stopped_by_the_second(ranks, folder),
            "memory": short_of_memory(ranks, folder),
            "nan": not_a_number(ranks, folder),
            "apart": apart(ranks, folder),
            "minutes": in_minutes(ranks, folder),
        }
        # The test made three updates alone, and goes on alone after three of ours.
        trainer, losses = run_of("gpt2", ranks, folder / "changing", steps=6)
        trainer.fit()
        seen["changing"] = {"losses": losses.losses, "notes": trainer.notes}
    del trainer  # whose sharing holds the group
    gc.collect()
    seen["group_is_kept"] = group() is not None
    (folder / f"rank{ranks.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    work(Path(sys.argv[1]))
