"""Choice of a run's checkpoint layout: whole tensors by rank 0, or slices by every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

import psutil
import torch
from torch import nn

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write
from toque.training.checkpoint.saver import CheckpointLayout
from toque.training.checkpoint.state_tensors import bytes_of, model_tensors
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.sharing import is_divided
from toque.training.optim.factory import state_bytes

MOST_OF_MEMORY: Final = 0.5
"""Share of rank 0's free memory that whole tensors may take."""


def chosen_layout(
    asked: Literal["auto", "whole", "sharded"],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    averages: bool,
    ranks: Ranks,
) -> CheckpointLayout:
    """The layout of the run's checkpoints; the same on all ranks.

    Args:
        asked: auto takes shards where weights are sharded and do not fit rank 0 whole.
        model: with its parameters as the strategy holds them.
        optimizer: of the run.
        averages: whether averaged weights are saved besides.
        ranks: the processes that share the run.
    """
    if asked != "auto":
        return asked
    if not any(is_divided(p) for p in model.parameters()):
        return "whole"
    weights = bytes_of(model_tensors(model))  # a DTensor counts as the whole of it
    needed = weights * (2 if averages else 1) + state_bytes(optimizer)
    fits = needed <= MOST_OF_MEMORY * psutil.virtual_memory().available
    own: CheckpointLayout = "whole" if fits else "sharded"
    told: CheckpointLayout = ranks.broadcast(own)
    return told


def refuse_unshared_folder(run: Path, ranks: Ranks) -> None:
    """Make sure, before the first update, that all ranks see the run folder of the first.

    Raises:
        CheckpointError: on every rank, when some do not, or it cannot be written.
    """
    folder, name, fault = run / "checkpoints", f"probe-{os.urandom(8).hex()}", ""
    if ranks.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / name, b"Which ranks see this?\n")
        except OSError as error:
            fault = error.strerror or str(error)
    name, fault = ranks.broadcast((name, fault))
    if fault:
        raise CheckpointError(
            f"{folder} cannot be written ({fault}). Choose another run_dir, or mend its "
            "permissions."
        )
    seen = ranks.all_gather((folder / name).exists())
    if ranks.is_main:
        (folder / name).unlink()
    if not all(seen):
        blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise CheckpointError(
            f"Rank {blind} does not see what rank 0 writes in {folder}. A run over several "
            "machines needs a folder that all of them see: put run_dir on a file system that they "
            "share, to continue from there whichever machine is lost. Where run_dir is a bucket's "
            "address, set TOQUE_CACHE to a shared folder on every machine: its working files lie "
            "there."
        )
