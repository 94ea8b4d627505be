"""Tuning cache: measurements of this machine, and the choices a run was begun with.

A choice made by timing could be another one the next time, and with it the last bits of every sum.
So it is made once: kept in every checkpoint and in the run's folder, which a continued run obeys,
and in a cache of this machine, which a second run with the same model, data shape and settings
obeys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write
from toque.storage.checksums import KEY, seal_of, sealed
from toque.storage.json_files import decode_json

RESOURCES: Final = "resources.json"


def machine_facts(device: torch.device) -> dict[str, Any]:
    """The machine that measurements depend on, besides the work measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "device": f"{device.type} {name or platform.machine()}",
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


@dataclass(frozen=True)
class MachineCache:
    """Measurements by the work measured, one small file each. It may vanish at any time."""

    folder: Path

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The measurement of an equal `key`."""
        with contextlib.suppress(OSError, ValueError):
            stored = json.loads(self._path(key).read_text(encoding="utf-8"))
            if isinstance(stored, dict) and stored.get("of") == json.loads(json.dumps(key)):
                return dict(stored["found"])
        return None

    def put(self, key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Remember; a folder that cannot be written costs a measurement next time."""
        text = json.dumps({"of": key, "found": found}, indent=1) + "\n"
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), text.encode())

    def _path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps(key, sort_keys=True).encode()
        return self.folder / f"{hashlib.sha256(text).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class Resources:
    """How a run's updates are computed on its machine; none of it changes what they compute."""

    micro_batch_rows: int
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any] = field(default_factory=dict)
    smaller_from: dict[int, int] = field(default_factory=dict)
    """Step -> rows at once from there on, where memory had run out."""

    def for_checkpoint(self, smaller_from: Sequence[Mapping[int, int]]) -> dict[str, Any]:
        """JSON for a checkpoint; `smaller_from` is every rank's."""
        return asdict(self) | {"smaller_from": [dict(own) for own in smaller_from]}

    @classmethod
    def of_checkpoint(cls, state: Mapping[str, Any], *, rank: int, where: str) -> Resources | None:
        """What `for_checkpoint` gave, in a checkpoint's state; None in those of version 0.1.0.

        Raises:
            CheckpointError: it is nonsense.
        """
        if "resources" not in state:
            return None
        try:
            held = msgspec.convert(state["resources"], _Held, str_keys=True)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{where} says nonsense about how its updates were computed: {error}. Put a whole "
                "copy in its place, or move it away to continue from the one before it."
            ) from error
        own = held.smaller_from[rank] if rank < len(held.smaller_from) else {}
        return cls(
            held.micro_batch_rows, held.gradient_checkpointing, held.compile, held.machine, own
        )

    def save(self, run: Path, *, rank: int = 0) -> None:
        """Write `resources.json` of the run, or another rank's file beside it.

        Raises:
            CheckpointError: the folder cannot be written.
        """
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
    def load(cls, run: Path, *, rank: int = 0) -> Resources | None:
        """Those of an earlier session; None when there are none, or the file is damaged."""
        try:
            text = (run / _file_of(rank)).read_bytes()
            stored = decode_json(text, dict[str, Any])
            seal = seal_of(text)
            # Version 0.1.0 wrote no hash; an unknown name may be a damaged one.
            if seal == "damaged" or (seal == "absent" and stored.keys() > _OLD_NAMES):
                return None
            stored.pop(KEY, None)
            ranks = {"smaller_from": [stored["smaller_from"]]}
            held = msgspec.convert(stored | ranks, _Held, str_keys=True)
        except (OSError, KeyError, msgspec.DecodeError):
            return None
        return cls(
            held.micro_batch_rows,
            held.gradient_checkpointing,
            held.compile,
            held.machine,
            held.smaller_from[0],
        )


_Step = Annotated[int, msgspec.Meta(ge=0)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class _Held(msgspec.Struct, forbid_unknown_fields=True):
    """`Resources` as JSON, checked; the ranks' `smaller_from` side by side."""

    micro_batch_rows: _Rows
    gradient_checkpointing: bool
    compile: bool
    machine: dict[str, Any]
    smaller_from: list[dict[_Step, _Rows]]


_OLD_NAMES: Final = {field.name for field in msgspec.structs.fields(_Held)}


def _file_of(rank: int) -> str:
    return RESOURCES if rank == 0 else f"resources-rank{rank}.json"
