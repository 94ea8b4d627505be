"""Tuning cache: measurements of this machine, and the choices a run was begun with.

A choice made by timing could be another one the next time, and with it the last bits of every sum.
So it is made once: kept in the run's folder, which a continued run obeys, and in a cache of
this machine, which a second run with the same model, data shape and settings obeys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from toque.errors import CheckpointError
from toque.storage.atomic import atomic_write

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
            held = json.loads(self._path(key).read_text(encoding="utf-8"))
            if isinstance(held, dict) and held.get("of") == json.loads(json.dumps(key)):
                return dict(held["found"])
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

    def save(self, run: Path, *, rank: int = 0) -> None:
        """Write `resources.json` of the run, or another rank's file beside it.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        try:
            run.mkdir(parents=True, exist_ok=True)
            atomic_write(run / _file_of(rank), (json.dumps(asdict(self), indent=1) + "\n").encode())
        except OSError as error:
            raise CheckpointError(
                f"{run / _file_of(rank)} cannot be written: {error.strerror}. It keeps how the "
                "updates are computed, which a continued run needs; choose another run_dir or make "
                "room."
            ) from error

    @classmethod
    def load(cls, run: Path, *, rank: int = 0) -> Resources | None:
        """Those of an earlier session; None when there are none, or none that can be read."""
        try:
            held = json.loads((run / _file_of(rank)).read_text(encoding="utf-8"))
            smaller = {int(step): int(rows) for step, rows in held.pop("smaller_from").items()}
            return cls(**held, smaller_from=smaller)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def _file_of(rank: int) -> str:
    return RESOURCES if rank == 0 else f"resources-rank{rank}.json"
