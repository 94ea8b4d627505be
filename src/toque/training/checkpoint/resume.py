"""Resume: load a checkpoint on every rank, and name everything that differs from the save."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from toque.training.checkpoint.manifest import differences
from toque.training.checkpoint.state_tensors import has_frozen, load_model_tensors
from toque.training.checkpoint.store import Checkpoint, verify_checkpoint
from toque.training.distributed.collectives import Ranks
from toque.training.optim.factory import load_optimizer_tensors
from toque.training.optim.weight_average import WeightAverage


def broadcast_checkpoint(find: Callable[[], Checkpoint | None], ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that rank 0 finds; the others read the same one, whatever they would find.

    Raises:
        CheckpointError: another rank does not see it: the run folder is not shared.
    """
    found = find() if ranks.is_main else None
    path = ranks.broadcast(str(found.path) if found is not None else None)
    return found if ranks.is_main or path is None else verify_checkpoint(Path(path))


def load_tensors(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: WeightAverage | None,
) -> None:
    """Load the tensors of `checkpoint` into the model, the optimizer and the weight average.

    Raises:
        CheckpointError: it does not fit them.
    """
    where, frozen = str(checkpoint.path), has_frozen(model)
    load_model_tensors(model, checkpoint.tensors("model"), trainable_only=frozen, where=where)
    load_optimizer_tensors(optimizer, model, checkpoint.tensors("optimizer"), where=where)
    if average is not None:
        average.load(model, checkpoint.tensors("average"), where=where)


def environment_fingerprint(ranks: Ranks) -> dict[str, int | str]:
    """What the last bits of a sum depend on, besides versions.

    Kernels are chosen by the instructions a processor has (and matrix products on a GPU by its
    kind), and another kernel adds up in another order.
    """
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.world_size,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def notes_on(
    checkpoint: Checkpoint, versions: Mapping[str, Any], state: Mapping[str, Any], ranks: Ranks
) -> list[str]:
    """Sentences for the user about resuming from `checkpoint`.

    Args:
        checkpoint: with the newer ones that could not be used.
        versions: of now.
        state: the checkpoint's.
        ranks: of now.

    Raises:
        ValueError, TypeError: the state's environment holds other things than numbers and words.
    """
    notes = [f"skipped {skipped.path.name}: {skipped.reason}" for skipped in checkpoint.skipped]
    changed = differences(checkpoint.manifest.versions, versions)
    for name, now in environment_fingerprint(ranks).items():
        # Older checkpoints say nothing of the later entries, and nothing can be said of them.
        then = type(now)(state.get(name, now))
        if then != now:
            changed.append(f"{name}: {then} -> {now}")
    if changed:
        notes.append(f"the bits may differ from an undisturbed run's: {'; '.join(changed)}")
    return notes
