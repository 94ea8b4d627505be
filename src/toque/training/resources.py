"""Resources of a run: how its updates are computed on its machine, chosen once and then kept.

Another choice would change the last bits of every sum. So it is made once:
every checkpoint holds it, and the run's folder in `resources.json`, which adds where memory ran out
since the checkpoint was written and is all there is before the first save.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self

import msgspec

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write
from toque.storage.json_files import KEY, decode_json, seal_of, sealed
from toque.training.checkpoint.saved import Checkpoint

RESOURCES: Final = "resources.json"


@dataclass(frozen=True)
class Resources:
    """Choices of how updates are computed on a machine; none changes what they compute."""

    micro_batch_rows: int
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any] = field(default_factory=dict)
    smaller_from: dict[int, int] = field(default_factory=dict)
    """Step -> rows at once from there on, where memory had run out."""

    def for_checkpoint(self, smaller_from: Sequence[Mapping[int, int]]) -> dict[str, Any]:
        """JSON for a checkpoint; `smaller_from` is every rank's."""
        return asdict(self) | {"smaller_from": [dict(own) for own in smaller_from]}

    def record(self) -> dict[str, Any]:
        """The choices as the start event of a session records them."""
        return {
            "micro_batch_rows": self.micro_batch_rows,
            "gradient_checkpointing": self.gradient_checkpointing,
            "compile": self.compile,
        }

    def save(self, run: Path, *, rank: int = 0) -> None:
        """Write `resources.json` of the run, or another rank's file beside it."""
        try:
            run.mkdir(parents=True, exist_ok=True)
            text = json.dumps(asdict(self) | {KEY: ""}, indent=1) + "\n"
            atomic_write(run / _file_of(rank), sealed(text.encode()))
        except OSError as error:
            raise CheckpointError(
                f"{run / _file_of(rank)} cannot be written: {error.strerror}. It keeps how the "
                "updates are computed, which a continued run needs; choose another run_dir or make "
                "room."
            ) from error

    @classmethod
    def load(cls, run: Path, *, rank: int = 0) -> Self | None:
        """Choices of an earlier session; None when there are none, or the file is damaged."""
        try:
            text = (run / _file_of(rank)).read_bytes()
            stored = decode_json(text, dict[str, Any])
            if seal_of(text) != "whole":
                return None
            del stored[KEY]
            ranks = {"smaller_from": [stored["smaller_from"]]}
            held = msgspec.convert(stored | ranks, _Held, str_keys=True)
        except (OSError, KeyError, msgspec.DecodeError):
            return None
        return cls(**held.of_rank(0))


_Step = Annotated[int, msgspec.Meta(ge=0)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class _Held(msgspec.Struct, forbid_unknown_fields=True):
    """`Resources` as JSON, checked; the ranks' `smaller_from` side by side."""

    micro_batch_rows: _Rows
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any]
    smaller_from: list[dict[_Step, _Rows]]

    def of_rank(self, rank: int) -> dict[str, Any]:
        own = self.smaller_from[rank] if rank < len(self.smaller_from) else {}
        return msgspec.structs.asdict(self) | {"smaller_from": own}


def _file_of(rank: int) -> str:
    return RESOURCES if rank == 0 else f"resources-rank{rank}.json"


def earlier_choices(
    run: Path, found: Checkpoint | None, machine: Mapping[str, Any], *, rank: int = 0
) -> tuple[Resources | None, list[str]]:
    """The choices that a session continues with from the checkpoint `found`; and notes for people.

    None, to be made anew, when there are none or those are of another machine or other settings. A
    CheckpointError where the checkpoint says nonsense.
    """
    file = Resources.load(run, rank=rank)
    if found is None:
        return (file if file is not None and file.machine == machine else None), []
    try:
        stored = msgspec.convert(found.state().get("resources"), _Held, str_keys=True)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{found.path} says nonsense about how its updates were computed: {error}. Put a whole "
            "copy in its place, or move it away to continue from the one before it."
        ) from error
    held = Resources(**stored.of_rank(rank))
    # Another version of Toque alone changes no choice of a run.
    names = sorted((held.machine.keys() | machine.keys()) - {"toque"})
    pairs = {name: (held.machine.get(name), machine.get(name)) for name in names}
    changed = [f"{name}: {then} -> {now}" for name, (then, now) in pairs.items() if then != now]
    if changed:
        note = (
            "the rows at once are chosen anew, for what they depend on changed "
            f"({'; '.join(changed)}): the last bits may be others than in an "
            "undisturbed run"
        )
        return None, [note]
    notes = []
    if file is None or file.record() != held.record():
        state = "cannot be read or is gone" if file is None else "says otherwise"
        notes.append(
            f"{RESOURCES} {state}; how updates are computed is taken from {found.path.name}, which "
            "holds it too"
        )
    later = {} if notes or file is None else file.smaller_from
    smaller = {**held.smaller_from, **{s: r for s, r in later.items() if s >= found.step}}
    return replace(held, machine=dict(machine), smaller_from=smaller), notes
