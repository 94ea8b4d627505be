"""Setting aside: what a run holds beyond the checkpoint it is told to continue from.

    set-aside/2026-11-22T14-45-25Z/{checkpoints,best}/step-00000400, ...

Nothing is deleted: a folder moved back is a checkpoint again. In a bucket the same names are used.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from toque.errors import CheckpointError, argument
from toque.storage.atomic import ASIDE_PREFIX, atomic_write, move_into
from toque.storage.bucket import Bucket
from toque.training.checkpoint.fetch import complete_steps
from toque.training.checkpoint.manifest import MANIFEST
from toque.training.checkpoint.saved import step_folders, step_name, step_of
from toque.training.checkpoint.upload import OUTBOX

SET_ASIDE: Final = "set-aside"
_KINDS: Final = ("checkpoints", "best")
_DONE: Final = "resumed.json"
"""The checkpoint that a command has gone back to; read when its launcher starts it again."""


def named_step(name: str, run: Path, bucket: Bucket | None) -> int:
    """The step of the checkpoint that `name` names: "step-00000200", or "200".

    Raises:
        CheckpointError: there is none of that name, here or in the bucket.
    """
    here = {step_of(path) for path in step_folders(run / "checkpoints")}
    names = bucket.names("checkpoints") if bucket is not None else []
    there = {int(n.removeprefix("step-")) for n in complete_steps(names, "checkpoints")}
    number = name.removeprefix("step-")
    if number.isdecimal() and (step := int(number)) in here | there:
        return step
    listed = ", ".join(step_name(step) for step in sorted(here | there)) or "none yet"
    places = f"{run}" if bucket is None else f"{run} or {bucket.address}"
    raise CheckpointError(
        f"There is no checkpoint {name!r:.60} in {places} to continue from; there are: {listed}. "
        "Name one of these, as step-00000200 or 200. (The best models hold weights alone, from "
        f"which a new run begins: {argument('start=FOLDER')} with another run_dir. What was set "
        f"aside before lies in {run / SET_ASIDE}; moved back, it counts again.)"
    )


def set_aside(run: Path, step: int, *, bucket: Bucket | None) -> list[str]:
    """Move what lies beyond `step` out of the way, the newest first, here and in the bucket.

    A kill in between leaves a run that the same command takes up again.

    Returns:
        What was moved, e.g. "checkpoints/step-00000400", or nothing.

    Raises:
        CheckpointError: the run's folder cannot be written.
        BucketError: the service refused or stayed away.
    """
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    place = run / SET_ASIDE / when
    moved = []
    try:
        for kind in _KINDS:
            for path in step_folders(run / kind):
                if step_of(path) > step:
                    name = path.name.removeprefix(ASIDE_PREFIX)
                    move_into(path, place / kind, name)
                    moved.append(f"{kind}/{name}")
        for path in sorted((run / OUTBOX).glob("*-step-*"), reverse=True):  # to be uploaded
            if int(path.name.rpartition("-")[2]) > step:
                move_into(path, place / OUTBOX, path.name)
        if moved and (run / "end.json").exists():  # the end that is undone
            move_into(run / "end.json", place, "end.json")
    except OSError as error:
        raise CheckpointError(
            f"What lies beyond step {step} in {run} cannot be set aside: {error.strerror}. "
            f"{len(moved)} were moved to {place}. Give yourself the right to write, and repeat "
            "the command."
        ) from error
    if bucket is not None:
        moved += [name for name in _set_aside_there(bucket, step, when) if name not in moved]
    return moved


def _set_aside_there(bucket: Bucket, step: int, when: str) -> list[str]:
    moved = []
    for kind in _KINDS:
        names = bucket.names(kind)
        for folder in complete_steps(names, kind):
            if int(folder.removeprefix("step-")) <= step:
                continue
            place = f"{kind}/{folder}"
            inside = [name for name in names if name.startswith(f"{place}/")]
            inside.sort(key=lambda name: name.endswith(f"/{MANIFEST}"))
            for name in inside:  # the manifest last: only it makes a checkpoint of them
                bucket.copy(name, f"{SET_ASIDE}/{when}/{name}")
            bucket.remove(reversed(inside))
            moved.append(place)
    return moved


def is_done(run: Path, name: str) -> bool:
    """True if this command went back to the checkpoint `name` before its launcher started it again.

    What it has saved since is newer, and is its own work. A launcher that counts its restarts says
    so by TORCHELASTIC_RESTART_COUNT, as torchrun does.
    """
    mark = run / SET_ASIDE / _DONE
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        mark.unlink(missing_ok=True)
        return False
    try:
        found = json.loads(mark.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return bool(found == {"name": name})


def mark_done(run: Path, name: str) -> None:
    """Remember, for a restart by a launcher, that the run went back to the checkpoint `name`."""
    mark = run / SET_ASIDE / _DONE
    mark.parent.mkdir(exist_ok=True)
    atomic_write(mark, json.dumps({"name": name}).encode())
