"""Resume: the state of a trainer in a checkpoint, and everything that differs from the save."""

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
from toque.training.distributed.sharing import divided_like, own_part
from toque.training.optim.factory import load_optimizer_tensors, optimizer_tensors
from toque.training.state_values import (
    count_in,
    flag_in,
    impossible_weights,
    number_in,
    object_in,
    refuse,
)
from toque.units import Cursor, Progress

_UNFIT: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError)
"""Errors that parts may raise when they are handed a state of another form."""

DROPOUT_MASKS: Final = "dropout masks"
"""Key of a checkpoint's versions: "keyed" if dropout's masks are. Older checkpoints have no such
key, and neither has a model without dropout, nor one with PyTorch's masks."""


class Stateful(Protocol):
    """A part of the trainer with JSON of its own, which a restart cannot recompute."""

    def state_dict(self) -> State | None:
        """JSON of this part."""

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`'s result."""


@dataclass(frozen=True)
class TrainerState:
    """The state of a run that a restart cannot recompute: no learning rate, no data order."""

    progress: Progress
    cursor: Cursor
    best: Best | None
    owes_evaluation: bool

    def to_json(self, parts: Mapping[str, Stateful], ranks: Ranks, *, base: str | None) -> State:
        """The JSON of a checkpoint; `base` is the hash of the frozen weights it leaves out."""
        states = {name: part.state_dict() for name, part in parts.items()}
        return asdict(self) | states | {"base_sha256": base, **environment_fingerprint(ranks)}

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
        """The state in `checkpoint`, and sentences about it; `parts` take theirs."""
        state = checkpoint.state()
        then = state.get("base_sha256")
        if then != base:
            raise CheckpointError(
                f"{checkpoint.path} holds an adapter that was trained beside other frozen weights "
                f"(then {then}, now {base}): the model in model.start_from changed. Put it "
                "back to continue, or start a new run folder."
            )
        manifest = checkpoint.manifest
        try:
            progress = Progress(**_checked(state, "progress", manifest.progress))
            if progress.step != checkpoint.step or progress.target_tokens > progress.tokens:
                raise ValueError(f"step {checkpoint.step} cannot have the progress {progress}")
            cursor = Cursor(**_checked(state, "cursor", manifest.cursor))
            owes_evaluation = flag_in(state, "owes_evaluation")
            found = cls(progress, cursor, _best_in(state, progress), owes_evaluation)
            for name, part in parts.items():
                part.load_state_dict(state[name])
            return found, _notes_on(checkpoint, versions, state, ranks)
        except _UNFIT as error:
            missing = "lacks " if isinstance(error, KeyError) else ""
            raise CheckpointError(
                f"{checkpoint.path} has a state this Toque cannot read, though its hashes are "
                f"right: {missing}{error}. Put a whole copy in its place, or move it away to "
                "continue from the one before it."
            ) from error

    def refuse_other_data(self, batches: BatchStream, *, where: str) -> None:
        """Refuse a place that the data does not have, or that is elsewhere than the progress."""
        # An update takes the run on, by one pass at most; fractions are rounded.
        why, least, most = "", 0.0, 1.0
        try:
            planned = batches.planned(self.cursor)
            after = planned.epoch
            # Where a stage in steps ends in epochs is an estimate; earlier versions had another.
            if planned.cursor.stage != self.cursor.stage:
                most = math.inf
            if self.cursor.stage:
                least = -math.inf
        except (IndexError, ValueError, OverflowError) as error:
            after, why = math.nan, f" ({error})"
        if not least - 1e-6 <= after - self.progress.epoch <= most + 1e-6:
            raise CheckpointError(
                f"{where} continues at {self.cursor}, which is no place of this data after "
                f"{self.progress.epoch:g} epochs{why}. Put a whole copy in its place, or move it "
                "away to continue from the one before it."
            )


def _checked(state: Mapping[str, Any], part: str, repeated: Mapping[str, Any]) -> Mapping[str, Any]:
    """The progress or cursor of a state, whose manifest repeats it."""
    found = object_in(state, part)
    for name in found:
        if (part, name) in {("progress", "epoch"), ("progress", "seconds")}:
            number_in(found, name, least=0.0)
        else:
            count_in(found, name)
    if found != repeated:
        raise ValueError(f"its {part} is {found}, its manifest's {repeated}")
    return found


def _best_in(state: Mapping[str, Any], progress: Progress) -> Best | None:
    if state["best"] is None:
        return None
    best = object_in(state, "best")
    metric, value = best.get("metric", "loss"), best.get("value")
    if not isinstance(metric, str):
        raise TypeError(f"metric is {metric!r:.60}, not a name")
    value = None if value is None else number_in(best, "value")
    return Best(count_in(best, "step", most=progress.step), number_in(best, "loss"), metric, value)


def broadcast_checkpoint(find: Callable[[], Checkpoint | None], ranks: Ranks) -> Checkpoint | None:
    """The checkpoint that rank 0 finds; the others read the same one, whatever they would find."""
    found = find() if ranks.is_main else None
    told = ranks.broadcast(None if found is None else (found.path, found.manifest))
    if ranks.is_main or told is None:
        return found
    path, manifest = told
    if manifest.format != SHARDED:
        return verify_checkpoint(path)
    if read_manifest(path) != manifest:
        raise CheckpointError(f"{path / MANIFEST} is not the one that rank 0 reads there.")
    verify_files(path, manifest, hashed=False)  # rank 0 has hashed what each reads little of
    return Checkpoint(path, manifest)


def refuse_unshared_folder(run: Path, ranks: Ranks) -> None:
    """Make sure, before the first update, that all ranks see the run folder of the first."""
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
            f"{folder} cannot be written ({fault}). Mend it, or choose another run_dir."
        )
    seen = ranks.all_gather((folder / name).exists())
    if ranks.is_main:
        (folder / name).unlink()
    if not all(seen):
        blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
        raise CheckpointError(
            f"Rank {blind} does not see what rank 0 writes in {folder}. Put run_dir on a file "
            "system that all machines share. Where it is a bucket's address, set TOQUE_CACHE to a "
            "shared folder on every machine: its working files lie there."
        )


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's trainable parameters, tied ones once, and its buffers that are state."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}


@torch.no_grad()
def load_model_tensors(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Copy `tensors` into `model`; else a CheckpointError names each difference from its own."""
    own = model_tensors(model)
    wrong = [f"{name} is missing" for name in own.keys() - tensors.keys()]
    wrong += [f"{name} is unknown to the model" for name in tensors.keys() - own.keys()]
    for name in own.keys() & tensors.keys():
        mine, theirs = own[name], tensors[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wrong.append(f"{name} is {_kind(theirs)}, the model has {_kind(mine)}")
        elif isinstance(mine, nn.Parameter) and (why := impossible_weights(theirs, own_part(mine))):
            wrong.append(f"{name} {why}, which training cannot have made of it")
    refuse(wrong, where=where, what="the model")
    for name, tensor in own.items():
        tensor.copy_(divided_like(tensor, tensors[name]))


def _kind(tensor: Tensor) -> str:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return f"{str(tensor.dtype).removeprefix('torch.')} {shape}"


def trainer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """A checkpoint's tensors by file: of the model and of the optimizer."""
    return {"model": model_tensors(model), "optimizer": optimizer_tensors(optimizer, model)}


def load_tensors(
    checkpoint: Checkpoint, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load what `trainer_tensors` gave; CheckpointError unless it fits model and optimizer."""
    where = str(checkpoint.path)
    own = dict(model.named_parameters())
    stored = checkpoint.tensors("model", model_tensors(model).get)
    load_model_tensors(model, stored, where=where)
    # Of a tensor that is no parameter's shape (a step, a row's average) every rank has the whole.
    state = checkpoint.tensors("optimizer", lambda key: own.get(key.rpartition("/")[0]))
    load_optimizer_tensors(optimizer, model, state, where=where, steps=checkpoint.step)


def environment_fingerprint(ranks: Ranks) -> dict[str, int | str]:
    """Facts about this machine that the last bits of a sum depend on, besides versions."""
    # Kernels are chosen by a processor's instructions and a GPU's kind, and add up differently.
    return {
        "threads": torch.get_num_threads(),
        "ranks": ranks.world_size,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _notes_on(
    checkpoint: Checkpoint, versions: Mapping[str, Any], state: Mapping[str, Any], ranks: Ranks
) -> list[str]:
    """Sentences for the user about resuming from `checkpoint`."""
    notes = [f"skipped {name}: {reason}" for name, reason in checkpoint.skipped]
    saved = checkpoint.manifest.versions
    changed = [
        f"{name}: {saved.get(name, 'absent')} -> {versions.get(name, 'absent')}"
        for name in sorted((saved.keys() | versions.keys()) - {DROPOUT_MASKS})
        if saved.get(name) != versions.get(name)
    ]
    for name, now in environment_fingerprint(ranks).items():
        then = type(now)(state.get(name, now))  # what an older checkpoint lacks is unchanged
        if then != now:
            changed.append(f"{name}: {then} -> {now}")
    if saved.get(DROPOUT_MASKS) != versions.get(DROPOUT_MASKS):
        notes.append(
            f"dropout uses other masks after step {checkpoint.step} than before, because another "
            "version of Toque saved this checkpoint"
        )
    if changed:
        notes.append(f"the bits may differ from an undisturbed run's: {'; '.join(changed)}")
    return notes
