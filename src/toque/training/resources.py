"""Resources of a run: how its machine computes an update.

These choices affect the last bits of every sum, so a run makes them once. Every checkpoint contains
them. `resources.json` in the run folder contains them before the first save. After a save it adds
the later steps at which memory ran out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write
from toque.storage.json_files import KEY, add_seal, check_seal, decode_json
from toque.training.checkpoint.saved import Checkpoint

RESOURCES: Final = "resources.json"

_Step = Annotated[int, msgspec.Meta(ge=0)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


@dataclass(frozen=True)
class Resources:
    """Choices about how updates are computed. They affect only the last bits of an update."""

    micro_batch_rows: _Rows
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any] = field(default_factory=dict)
    """Facts about the machine on which the choices depend."""
    smaller_from: dict[_Step, _Rows] = field(default_factory=dict)
    """Reduced rows per micro-batch after memory ran out, by the first step that uses them."""

    def checkpoint_record(self, smaller_from: list[dict[int, int]]) -> dict[str, Any]:
        """Return the choices as JSON for a checkpoint, with the `smaller_from` of every rank."""
        return asdict(self) | {"smaller_from": smaller_from}

    def record(self) -> dict[str, Any]:
        """Return the choices without the machine, e.g. for the start event of a session."""
        return {
            "micro_batch_rows": self.micro_batch_rows,
            "gradient_checkpointing": self.gradient_checkpointing,
            "compile": self.compile,
        }

    def save(self, run: Path, *, rank: int = 0) -> None:
        """Write `resources.json`, or the file of another rank, into the run folder."""
        path = run / _file_name(rank)
        text = json.dumps(asdict(self) | {KEY: ""}, indent=1) + "\n"
        try:
            run.mkdir(parents=True, exist_ok=True)
            atomic_write(path, add_seal(text.encode()))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}. A continued run needs it to compute "
                "its updates in the same way. Choose another run_dir or free some space."
            ) from error

    @classmethod
    def load(cls, run: Path, *, rank: int = 0) -> Self | None:
        """Read the choices from an earlier session. Return None if they are missing or damaged."""
        try:
            text = (run / _file_name(rank)).read_bytes()
            if check_seal(text) != "whole":
                return None
            return msgspec.convert(
                decode_json(text, dict[str, Any]), cls, str_keys=True
            )
        except (OSError, msgspec.DecodeError):
            return None


class _CheckpointResources(msgspec.Struct, forbid_unknown_fields=True):
    """`Resources` in a checkpoint, with `smaller_from` of every rank."""

    micro_batch_rows: _Rows
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any]
    smaller_from: list[dict[_Step, _Rows]]

    def of_rank(self, rank: int) -> Resources:
        """Return the choices of one rank. A run may continue with more ranks than before."""
        fields = msgspec.structs.asdict(self)
        ranks = fields.pop("smaller_from")
        smaller_from = ranks[rank] if rank < len(ranks) else {}
        return Resources(**fields, smaller_from=smaller_from)


def _file_name(rank: int) -> str:
    return RESOURCES if rank == 0 else f"resources-rank{rank}.json"


def previous_resources(
    run: Path,
    checkpoint: Checkpoint | None,
    machine: Mapping[str, Any],
    *,
    rank: int = 0,
) -> tuple[Resources | None, list[str]]:
    """Return the choices from the previous session, if they still apply, and notes for the user.

    Args:
        run: The run folder.
        checkpoint: Checkpoint from which the session continues.
        machine: Facts on which new choices would depend.
        rank: Rank of this process.

    Returns:
        The choices, or None if they are missing or were made for other facts.

    Raises:
        CheckpointError: The record of the checkpoint is invalid.
    """
    in_folder = Resources.load(run, rank=rank)
    if checkpoint is None:
        is_usable = in_folder is not None and in_folder.machine == machine
        return (in_folder if is_usable else None), []

    previous = _resources_in(checkpoint, rank)
    # A new version of Toque alone does not change the choices.
    names = sorted((previous.machine.keys() | machine.keys()) - {"toque"})
    changes = [
        f"{name}: {previous.machine.get(name)} -> {machine.get(name)}"
        for name in names
        if previous.machine.get(name) != machine.get(name)
    ]
    if changes:
        note = (
            "the rows per micro-batch are chosen again, because they depend on changed facts "
            f"({'; '.join(changes)}). The last bits may differ from an uninterrupted run"
        )
        return None, [note]

    smaller_from = previous.smaller_from
    notes: list[str] = []
    if in_folder is not None and in_folder.record() == previous.record():
        # Memory may have run out between the save and the end of the session.
        for step, rows in in_folder.smaller_from.items():
            if step >= checkpoint.step:
                smaller_from[step] = rows
    else:
        problem = "is missing or damaged" if in_folder is None else "has other choices"
        notes.append(
            f"{RESOURCES} {problem}, so the choices of how updates are computed are read from "
            f"{checkpoint.path.name}"
        )
    return replace(previous, machine=dict(machine), smaller_from=smaller_from), notes


def _resources_in(checkpoint: Checkpoint, rank: int) -> Resources:
    """Read the choices of a rank from a checkpoint.

    Raises the same errors as `previous_resources`.
    """
    record = checkpoint.state().get("resources")
    try:
        resources = msgspec.convert(record, _CheckpointResources, str_keys=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{checkpoint.path} has an invalid record of its micro-batches: {error}. Replace it "
            "with a good copy, or move it away to continue from the previous checkpoint."
        ) from error
    return resources.of_rank(rank)
