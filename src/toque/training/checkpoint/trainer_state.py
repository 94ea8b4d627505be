"""Trainer state: the JSON and the tensors of a checkpoint, and the way back into a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from toque.errors import CheckpointError
from toque.training.checkpoint.resume import environment_fingerprint, notes_on
from toque.training.checkpoint.state_tensors import has_frozen, model_tensors
from toque.training.checkpoint.store import Checkpoint
from toque.training.distributed.collectives import Ranks
from toque.training.events import Best, State
from toque.training.optim.factory import optimizer_tensors
from toque.training.optim.weight_average import WeightAverage
from toque.units import Cursor, Progress


class Stateful(Protocol):
    """A part of the trainer with JSON of its own."""

    def state_dict(self) -> State | None:
        """JSON that a restart cannot recompute."""

    def load_state_dict(self, state: Any) -> None:
        """Restore `state_dict`'s result."""


@dataclass(frozen=True)
class TrainerState:
    """Where a run is: what a step reads and a restart cannot recompute. No rate, no data order."""

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
        """The state in `checkpoint`, and sentences about it; `parts` take theirs.

        Raises:
            CheckpointError: it is of another form, or of an adapter beside other frozen weights.
        """
        state = checkpoint.state()
        then = state.get("base_sha256")
        if then != base:
            raise CheckpointError(
                f"{checkpoint.path} holds an adapter that was trained beside other frozen weights "
                f"(then {then}, now {base}): the model in model.start_from changed. Put it "
                "back to continue, or start a new run folder."
            )
        try:
            best = Best(**state["best"]) if state["best"] else None
            progress, cursor = Progress(**state["progress"]), Cursor(**state["cursor"])
            found = cls(progress, cursor, best, bool(state["owes_evaluation"]))
            for name, part in parts.items():
                part.load_state_dict(state[name])
            return found, notes_on(checkpoint, versions, state, ranks)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{checkpoint.path} has a state this Toque cannot read: {error}."
            ) from error

    @staticmethod
    def tensors(
        model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage | None
    ) -> dict[str, dict[str, Tensor]]:
        """A checkpoint's tensors by file, as `resume.load_tensors` takes them back."""
        tensors = {"model": kept_tensors(model), "optimizer": optimizer_tensors(optimizer, model)}
        return tensors if average is None else tensors | {"average": average.tensors()}


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors that a checkpoint holds: without frozen weights."""
    return model_tensors(model, trainable_only=has_frozen(model))
