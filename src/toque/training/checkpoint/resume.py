"""Resume: the trainer's state in a checkpoint, and notes on changes since the save."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from toque.data.loader.batch_stream import BatchStream
from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write
from toque.training.callbacks import Best, State
from toque.training.checkpoint.saved import (
    MANIFEST,
    SHARDED,
    Checkpoint,
    read_manifest,
    verify_checkpoint,
    verify_files,
)
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.data_parallel import local_part, shard_like
from toque.training.optim.factory import load_optimizer_tensors, optimizer_tensors
from toque.training.state_values import (
    count_in,
    find_impossible_weights,
    flag_in,
    number_in,
    object_in,
    optional_number_in,
    refuse_differences,
)
from toque.units import Cursor, Progress

_UNFIT: Final = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
    RuntimeError,
)
"""Errors that `load_state_dict` raises for a state in another format."""
_REPLACE: Final = (
    "Replace it with a good copy, or move it away to continue from the previous "
    "checkpoint."
)
_EARLIER: Final = "earlier_updates"
_EPOCH_ROUNDING: Final = 1e-6
"""Largest rounding error in a position, in epochs."""

DROPOUT_MASKS: Final = "dropout masks"
"""Key in a checkpoint's versions, with the value "keyed". It is missing if the model has no dropout
or uses PyTorch's masks."""


class Stateful(Protocol):
    """Part of the trainer with a state that a restart cannot recompute."""

    def state_dict(self) -> State | None:
        """Return the state of this part as JSON."""

    def load_state_dict(self, state: Any) -> None:
        """Restore the result of `state_dict`."""


@dataclass(frozen=True)
class TrainerState:
    """State of a run that a restart cannot recompute.

    Learning rate and data order are functions of this state.
    """

    progress: Progress
    cursor: Cursor
    best: Best | None
    owes_evaluation: bool

    def to_json(
        self, parts: Mapping[str, Stateful], ranks: Ranks, *, base: str | None
    ) -> State:
        """Return the state as JSON. `base` is the hash of frozen weights outside the checkpoint."""
        states = {name: part.state_dict() for name, part in parts.items()}
        environment = environment_fingerprint(ranks)
        return {**asdict(self), **states, "base_sha256": base, **environment}

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        parts: Mapping[str, Stateful],
        ranks: Ranks,
        *,
        versions: Mapping[str, Any],
        base: str | None,
    ) -> tuple[TrainerState, list[str]]:
        """Load the trainer's state from `checkpoint`, and restore the states of `parts`.

        Returns:
            The state, and notes for the user.

        Raises:
            CheckpointError: The checkpoint belongs to other frozen weights, or is invalid.
        """
        state = checkpoint.state()
        saved_base = state.get("base_sha256")
        if saved_base != base:
            raise CheckpointError(
                f"{checkpoint.path} has an adapter for frozen weights with hash {saved_base}, but "
                f"the model in model.start_from has hash {base}. Restore that model to continue, "
                "or start a new run folder."
            )
        try:
            trainer_state = cls._parse(state, checkpoint)
            for name, part in parts.items():
                part.load_state_dict(state[name])
            return trainer_state, _list_changes(checkpoint, versions, state, ranks)
        except _UNFIT as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(
                f"{checkpoint.path} has valid hashes but an invalid state: {reason}. {_REPLACE}"
            ) from error

    @classmethod
    def _parse(cls, state: State, checkpoint: Checkpoint) -> TrainerState:
        """Check the trainer's own state, which repeats parts of the manifest."""
        manifest = checkpoint.manifest
        progress = Progress(**_checked_part(state, "progress", manifest.progress))
        has_other_step = progress.step != checkpoint.step
        if has_other_step or progress.target_tokens > progress.tokens:
            raise ValueError(
                f"step {checkpoint.step} cannot have the progress {progress}"
            )
        cursor = Cursor(**_checked_part(state, "cursor", manifest.cursor))
        best = _best_in(state, progress)
        return cls(progress, cursor, best, flag_in(state, "owes_evaluation"))

    def refuse_other_data(self, batches: BatchStream, *, where: str) -> None:
        """Refuse a cursor that is not valid for this data, or that contradicts the progress.

        Args:
            batches: The data of this run.
            where: Path of the checkpoint, for the message.

        Raises:
            CheckpointError: The cursor is impossible.
        """
        # The next update advances the run by 0 to 1 epochs.
        low, high = 0.0, 1.0
        reason = ""
        try:
            planned = batches.plan_update(self.cursor)
            epoch = planned.epoch
            # A stage's length in epochs is only an estimate if the setting is in steps.
            if planned.cursor.stage != self.cursor.stage:
                high = math.inf
            if self.cursor.stage:
                low = -math.inf
        except (IndexError, ValueError, OverflowError) as error:
            epoch = math.nan  # every comparison with it is false
            reason = f" ({error})"
        advance = epoch - self.progress.epoch
        if not low - _EPOCH_ROUNDING <= advance <= high + _EPOCH_ROUNDING:
            raise CheckpointError(
                f"{where} continues at {self.cursor}, a position that this data does not have "
                f"after {self.progress.epoch:g} epochs{reason}. {_REPLACE}"
            )


def _checked_part(
    state: Mapping[str, Any], part: str, in_manifest: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return the progress or the cursor of a state, if it is valid and equal to the manifest's."""
    fields = object_in(state, part)
    for name in fields:
        if name in ("epoch", "seconds") and part == "progress":
            number_in(fields, name, least=0.0)
        else:
            count_in(fields, name)
    if fields != in_manifest:
        raise ValueError(f"its {part} is {fields}, but the manifest has {in_manifest}")
    return fields


def _best_in(state: Mapping[str, Any], progress: Progress) -> Best | None:
    """Return the best evaluation in a state. It cannot be later than the progress."""
    if state["best"] is None:
        return None
    best = object_in(state, "best")
    metric = best["metric"]
    if not isinstance(metric, str):
        raise TypeError(f"metric is {metric!r:.60}, not a name")
    step = count_in(best, "step", maximum=progress.step)
    return Best(
        step, number_in(best, "loss"), metric, optional_number_in(best, "value")
    )


def broadcast_checkpoint(
    find: Callable[[], Checkpoint | None], ranks: Ranks
) -> Checkpoint | None:
    """Find a checkpoint on rank 0, and read the same checkpoint on all ranks.

    Raises:
        CheckpointError: A rank cannot read the checkpoint, or reads a different checkpoint.
    """
    checkpoint = find() if ranks.is_main else None
    message = None
    if checkpoint is not None:
        message = checkpoint.path, checkpoint.manifest
    message = ranks.broadcast(message)
    if ranks.is_main or message is None:
        return checkpoint
    path, manifest = message
    if manifest.format != SHARDED:
        return verify_checkpoint(path)
    if read_manifest(path) != manifest:
        raise CheckpointError(
            f"{path / MANIFEST} differs from the manifest that rank 0 reads."
        )
    # Rank 0 has hashed the shards, and this rank reads only a small part of them.
    verify_files(path, manifest, hashed=False)
    return Checkpoint(path, manifest)


def refuse_unshared_folder(run: Path, ranks: Ranks) -> None:
    """Check that all ranks see the same run folder, with a file that rank 0 writes and removes.

    Raises:
        CheckpointError: A rank does not see the folder of rank 0, or rank 0 cannot write to it.
    """
    folder = run / "checkpoints"
    name = f"probe-{os.urandom(8).hex()}"
    reason = ""
    if ranks.is_main:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / name, b"Which ranks see this?\n")
        except OSError as error:
            reason = error.strerror or str(error)
    name, reason = ranks.broadcast((name, reason))
    if reason:
        raise CheckpointError(
            f"Cannot write {folder} ({reason}). Change its permissions, or choose another run_dir."
        )

    sees_probe = ranks.all_gather((folder / name).exists())
    if ranks.is_main:
        (folder / name).unlink()
    if not all(sees_probe):
        blind = ", ".join(str(rank) for rank, sees in enumerate(sees_probe) if not sees)
        raise CheckpointError(
            f"Rank {blind} cannot see the files of rank 0 in {folder}. Put run_dir on a file "
            "system that all machines share. If run_dir is a bucket, set TOQUE_CACHE to a shared "
            "folder on every machine, because the working files are there."
        )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Collect a model's trainable parameters, without duplicates of tied ones, and its buffers."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}


@torch.no_grad()
def load_model_tensors(
    model: nn.Module, tensors: Mapping[str, Tensor], *, where: str
) -> None:
    """Copy tensors into a model.

    Args:
        model: The model.
        tensors: Tensors by the names of `model_tensors`.
        where: Path of the checkpoint, for the message.

    Raises:
        CheckpointError: Names, shapes, types or values do not fit. The message lists them.
    """
    current = model_tensors(model)
    missing = current.keys() - tensors.keys()
    unknown = tensors.keys() - current.keys()
    differences = [f"{name} is missing" for name in missing]
    differences += [f"{name} is unknown to the model" for name in unknown]
    for name in current.keys() & tensors.keys():
        tensor, stored = current[name], tensors[name]
        if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
            differences.append(
                f"{name} is {_kind(stored)}, but the model has {_kind(tensor)}"
            )
        elif isinstance(tensor, nn.Parameter):
            reason = find_impossible_weights(stored, local_part(tensor))
            if reason is not None:
                differences.append(
                    f"{name} {reason}, which is not a result of training"
                )
    refuse_differences(differences, where=where, what="the model")
    for name, tensor in current.items():
        tensor.copy_(shard_like(tensor, tensors[name]))


def _kind(tensor: Tensor) -> str:
    """Describe the type and the shape of a tensor, e.g. float32 61×16."""
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def trainer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Collect the tensors of a checkpoint by file stem: "model" and "optimizer"."""
    return {
        "model": model_tensors(model),
        "optimizer": optimizer_tensors(optimizer, model),
    }


def count_earlier_updates(checkpoint: Checkpoint) -> int:
    """Count the updates of earlier runs from which the optimizer's state was continued.

    Raises:
        CheckpointError: The count is not a whole number.
    """
    try:
        # Older versions of Toque did not continue the state of another run.
        return count_in({_EARLIER: 0} | checkpoint.state(), _EARLIER)
    except ValueError as error:
        raise CheckpointError(
            f"{checkpoint.path} has valid hashes but an invalid state: {error}. {_REPLACE}"
        ) from error


def load_tensors(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the tensors of `trainer_tensors` from a checkpoint.

    Raises:
        CheckpointError: They do not fit the model or the optimizer.
    """
    stored = checkpoint.tensors("model", model_tensors(model).get)
    load_model_tensors(model, stored, where=str(checkpoint.path))
    load_optimizer(checkpoint, model, optimizer)


def load_optimizer(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the optimizer's state from a checkpoint.

    Raises:
        CheckpointError: It does not fit the model or the optimizer.
    """
    parameters = dict(model.named_parameters())
    # State tensors with the shape of a sharded parameter are read as slices. All ranks read the
    # rest entirely: step counts and averages of rows.
    state = checkpoint.tensors(
        "optimizer", lambda key: parameters.get(key.rpartition("/")[0])
    )
    load_optimizer_tensors(
        optimizer,
        model,
        state,
        where=str(checkpoint.path),
        steps=checkpoint.step + count_earlier_updates(checkpoint),
    )


def environment_fingerprint(ranks: Ranks) -> dict[str, int | str]:
    """Return the facts that affect the last bits of a sum, in addition to software versions.

    Kernels for other processors and GPUs sum in another order.
    """
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.world_size,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _list_changes(
    checkpoint: Checkpoint,
    versions: Mapping[str, Any],
    state: Mapping[str, Any],
    ranks: Ranks,
) -> list[str]:
    """List notes for the user on skipped checkpoints and on changes since the save."""
    notes = [f"skipped {name}: {reason}" for name, reason in checkpoint.skipped]
    saved = checkpoint.manifest.versions
    changed = [
        f"{name}: {saved.get(name, 'absent')} -> {versions.get(name, 'absent')}"
        for name in sorted((saved.keys() | versions.keys()) - {DROPOUT_MASKS})
        if saved.get(name) != versions.get(name)
    ]
    for name, current in environment_fingerprint(ranks).items():
        if state[name] != current:
            changed.append(f"{name}: {state[name]!s:.60} -> {current}")
    if saved.get(DROPOUT_MASKS) != versions.get(DROPOUT_MASKS):
        notes.append(
            f"dropout uses other masks after step {checkpoint.step} than before, because another "
            "version of Toque saved this checkpoint"
        )
    if changed:
        notes.append(
            f"the last bits may differ from an uninterrupted run: {'; '.join(changed)}"
        )
    return notes
