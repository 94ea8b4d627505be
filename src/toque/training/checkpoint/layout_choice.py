"""Choice of a run's checkpoint layout: whole tensors by rank 0, or slices by every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import psutil
import torch
from torch import nn

from toque.errors import CheckpointError
from toque.training.checkpoint.delivery import first_to_see
from toque.training.checkpoint.sharded_saver import Layout
from toque.training.checkpoint.state_tensors import bytes_of, model_tensors
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.parts import is_divided
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
) -> Layout:
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
    own: Layout = "whole" if fits else "sharded"
    told: Layout = ranks.broadcast(own)
    return told


def refuse_unshared_folder(run: Path, ranks: Ranks) -> None:
    """Make sure, before the first update, that all ranks see the folder they write shards into.

    Raises:
        CheckpointError: on every rank, when some do not.
    """
    folder = run / "checkpoints"
    blind = [str(rank) for rank, first in enumerate(first_to_see(folder, ranks)) if first]
    if blind:
        raise CheckpointError(
            f"Rank {', '.join(blind)} does not see what rank 0 writes in {folder}, and with "
            "checkpoint.layout sharded every rank writes its slices there. Set checkpoint.upload "
            "to a folder in a bucket, through which machines without a common folder continue; or "
            "put run_dir on a file system that all of them share; or set checkpoint.layout=whole, "
            "which rank 0 writes alone where the whole tensors fit its memory."
        )
