"""Adapter that a run continues: its copy in the run folder, and the state of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import nn

from toque.config import RunConfig
from toque.config.schema import OptimConfig
from toque.config.schema_methods import AdapterConfig
from toque.errors import CheckpointError
from toque.models.lora.adapter_files import CONFIG, WEIGHTS
from toque.models.lora.continued import start_folder
from toque.storage.atomic import atomic_folder, disk_faults
from toque.storage.no_follow import refuse_endless_files
from toque.training.checkpoint.resume import broadcast_checkpoint, model_tensors
from toque.training.checkpoint.saved import Checkpoint, step_folders
from toque.training.checkpoint.store import CheckpointStore
from toque.training.distributed.data_parallel import local_part, shard_like
from toque.training.trainer import Trainer
from toque.user_paths import named_path

START_FILES: Final = tuple(f"start-adapter/{name}" for name in (CONFIG, WEIGHTS))
"""Copy of the adapter to continue, in the run folder."""
_OPTIMIZER: Final = ("name", "weight_decay", "betas", "eps", "momentum")
"""Settings of `optim` that must be equal to continue the optimizer's state."""


def copy_start_adapter(config: RunConfig) -> None:
    """Copy the adapter to continue into a new run's folder, on the first rank.

    Raises:
        ConfigError: The folder has no adapter.
        CheckpointError: The copy cannot be written.
    """
    folder = None if config.adapter is None else start_folder(config.adapter)
    if folder is None:
        return
    refuse_endless_files(folder)
    copy = _copy_folder(config)
    action = "copying the adapter to continue"
    faults = disk_faults(copy, action, setting="run_dir", error=CheckpointError)
    with faults, atomic_folder(copy) as writer:
        for name in (CONFIG, WEIGHTS):
            if (folder / name).exists():  # loading the adapter reports a missing file
                writer.put(name, (folder / name).read_bytes())


def adapter_of_run(config: RunConfig) -> AdapterConfig | None:
    """Return the adapter's settings. A run with a checkpoint continues the copy in its folder.

    The copy makes a resume independent of the folder in `adapter.start_from`.
    """
    adapter = config.adapter
    if adapter is None or adapter.start_from is None:
        return adapter
    copy = _copy_folder(config)
    has_checkpoint = bool(step_folders(Path(config.run_dir) / "checkpoints"))
    if not (has_checkpoint and copy.is_dir()):
        return adapter
    return adapter.model_copy(update={"start_from": str(copy)})


def continue_optimizer(
    trainer: Trainer, config: RunConfig, say: Callable[[str], None]
) -> None:
    """Begin a new run with the optimizer's state of the run in `adapter.start_from`.

    Without a state that fits, the optimizer starts new. `say` receives the decision.

    Raises:
        CheckpointError: The run has no valid checkpoint, or its state does not fit the model.
    """
    if config.adapter is None or config.adapter.start_from is None:
        return
    start = config.adapter.start_from
    store = CheckpointStore(named_path(start) / "checkpoints")
    checkpoint = broadcast_checkpoint(store.newest_valid, trainer.runtime.ranks)
    if checkpoint is None:
        say(
            f"note: the optimizer starts new, because {start} is not a run with a checkpoint. To "
            "continue the optimizer too, set adapter.start_from to the run."
        )
        return
    reason = _find_difference(trainer, checkpoint, config.optim)
    if reason:
        say(f"note: the optimizer starts new, because {reason}")
        return
    trainer.continue_optimizer(checkpoint)
    say(f"the optimizer continues from step {checkpoint.step:,} of {start}")
    optim = config.optim
    if optim.schedule != "constant" or optim.warmup.amount > 0:
        say(
            f"note: the learning rate starts its schedule again: {optim.schedule}, with a warm-up "
            f"of {optim.warmup}. To continue without a jump, set optim.schedule=constant, "
            '"optim.warmup=0 steps" and optim.peak_lr to the last rate of the earlier run.'
        )


def _copy_folder(config: RunConfig) -> Path:
    return (Path(config.run_dir) / START_FILES[0]).parent


def _find_difference(
    trainer: Trainer, checkpoint: Checkpoint, optim: OptimConfig
) -> str:
    """Describe why a checkpoint's optimizer does not belong to this run; "" if it does."""
    saved = checkpoint.manifest.settings.get("optim", {})
    settings = optim.model_dump(mode="json")
    changed = [
        f"optim.{name} was {saved.get(name)} and is {settings[name]}"
        for name in _OPTIMIZER
        if saved.get(name) != settings[name]
    ]
    if changed:
        return "; ".join(changed)
    is_same = _has_weights(trainer.model, checkpoint)
    if not all(trainer.runtime.ranks.all_gather(is_same)):
        return (
            f"the adapter does not have the weights of {checkpoint.path}, the newest checkpoint. A "
            "finished run keeps its best weights (train.keep_best)"
        )
    return ""


def _has_weights(model: nn.Module, checkpoint: Checkpoint) -> bool:
    """Check whether a model's trainable weights equal a checkpoint's, bit for bit."""
    current = model_tensors(model)
    stored = checkpoint.tensors("model", current.get)
    if current.keys() != stored.keys():
        return False
    for name, tensor in current.items():
        expected = local_part(shard_like(tensor, stored[name]))
        if not torch.equal(local_part(tensor).cpu(), expected.cpu()):
            return False
    return True
