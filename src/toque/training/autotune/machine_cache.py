"""Machine cache: measurements of this machine, remembered by the work that was measured."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toque.storage.atomic import atomic_write


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
