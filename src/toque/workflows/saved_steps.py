"""Checkpoints and best models of a run, named by their folders: RUN/best/step-00000200."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from toque.errors import CheckpointError

KINDS: Final = ("checkpoints", "best")
SET_ASIDE: Final = "set-aside"
_STEP: Final = re.compile(r"step-[0-9]{8,}")
_ADDRESS: Final = re.compile(rf"(.+)/((?:{'|'.join(KINDS)})/{_STEP.pattern})")


def is_step(name: str) -> bool:
    """Return whether a folder is named like a checkpoint."""
    return _STEP.fullmatch(name) is not None


def run_of(folder: Path) -> Path | None:
    """Return the run of a checkpoint's folder, or None for any other folder.

    >>> run_of(Path("/runs/my/best/step-00000200"))
    PosixPath('/runs/my')
    """
    kind, *above = folder.absolute().parents
    if not is_step(folder.absolute().name) or kind.name not in KINDS or not above:
        return None
    # A checkpoint that was set aside is in RUN/set-aside/TIME/checkpoints.
    is_aside = len(above) > 2 and above[1].name == SET_ASIDE
    return above[2] if is_aside else above[0]


def config_of(folder: Path) -> Path:
    """Return the path of the configuration of a run, or of a checkpoint's run."""
    return (run_of(folder) or folder) / "config.yaml"


def split_address(address: str) -> tuple[str, str]:
    """Split an address into a run in a bucket and the path of a checkpoint, or "" without one.

    >>> split_address("gs://mine/run/best/step-00000200/")
    ('gs://mine/run', 'best/step-00000200')
    """
    parts = _ADDRESS.fullmatch(address.rstrip("/"))
    return (parts[1], parts[2]) if parts else (address.rstrip("/"), "")


def list_steps(run: Path) -> str:
    """Return a sentence that lists the checkpoints and best models of a run."""
    folders = sorted(path for kind in KINDS for path in (run / kind).glob("step-*"))
    names = [path.relative_to(run).as_posix() for path in folders if is_step(path.name)]
    if not names:
        return f"{run} has no checkpoint yet."
    return f"{run} has {', '.join(names)}."


def find_step(run: Path, step: int) -> Path:
    """Return the folder of a run's checkpoint or best model, given its step.

    Raises:
        CheckpointError: The run has no such step.
    """
    for kind in KINDS:
        folder = run / kind / f"step-{step:08d}"
        if folder.is_dir():
            return folder
    raise CheckpointError(
        f"{run} has no checkpoint or best model of step {step:,}. {list_steps(run)} Name one of "
        "these steps."
    )
