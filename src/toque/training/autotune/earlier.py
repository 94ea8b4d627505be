"""Earlier choices of a run: by its checkpoint, then its folder, and what is said where they differ.

How many rows are computed at once decides every dropout mask and the last bits of every sum. The
checkpoint's own record is hashed with it and goes first; `resources.json` adds only where memory
ran out after the checkpoint was written, and is all there is before the first save and beside
checkpoints of version 0.1.0.

Masks drawn by example, the same for every layout, would not do instead: sums over micro-batches
are rounded differently for every split, so the layout has to be kept for equal bits anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toque.training.autotune.cache import RESOURCES, Resources
from toque.training.checkpoint.saved import Checkpoint


def earlier_choices(
    run: Path, found: Checkpoint | None, machine: Mapping[str, Any], *, rank: int = 0
) -> tuple[Resources | None, list[str]]:
    """The choices that a session goes on with, and sentences for the user.

    Args:
        run: its folder.
        found: the checkpoint that is continued from; None at the beginning.
        machine: everything that choices depend on, now.
        rank: whose.

    Returns:
        None when there are none, or they are of another machine or other settings: then they are
        made anew.

    Raises:
        CheckpointError: the checkpoint says nonsense.
    """
    file = Resources.load(run, rank=rank)
    if found is None:
        return (file if file is not None and file.machine == machine else None), []
    held = Resources.of_checkpoint(found.state(), rank=rank, where=str(found.path))
    if held is None:
        return _beside_an_old_checkpoint(file, found, machine)
    changed = _changes(held.machine, machine)
    if changed:
        return None, [_made_anew(changed)]
    notes = []
    if file is None or not _alike(file, held):
        state = "cannot be read or is gone" if file is None else "says otherwise"
        notes.append(
            f"{RESOURCES} {state}; how updates are computed is taken from {found.path.name}, which "
            "holds it too"
        )
    later = {} if notes or file is None else file.smaller_from
    smaller = {**held.smaller_from, **{s: r for s, r in later.items() if s >= found.step}}
    return replace(held, machine=dict(machine), smaller_from=smaller), notes


def _beside_an_old_checkpoint(
    file: Resources | None, found: Checkpoint, machine: Mapping[str, Any]
) -> tuple[Resources | None, list[str]]:
    why = (
        f"{found.path.name} was written by version 0.1.0 and does not hold how updates are computed"
    )
    if file is None:
        anew = "the rows at once are chosen anew, so dropout masks and last bits may be others"
        return None, [f"{why}, and {RESOURCES} cannot be read or is gone: {anew} than before"]
    changed = _changes(file.machine, machine)
    if changed:
        return None, [_made_anew(changed)]
    taken = replace(file, machine=dict(machine))
    return taken, [f"{why}: it is taken from {RESOURCES} ({file.micro_batch_rows} rows at once)"]


def _made_anew(changed: str) -> str:
    return (
        f"the rows at once are chosen anew, for what they depend on changed ({changed}): dropout "
        "masks and the last bits may be others than in an undisturbed run"
    )


def _alike(file: Resources, held: Resources) -> bool:
    return (file.micro_batch_rows, file.gradient_checkpointing, file.compile) == (
        held.micro_batch_rows,
        held.gradient_checkpointing,
        held.compile,
    )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs, in words; another version of Toque alone changes no choice of a run."""
    names = sorted((then.keys() | now.keys()) - {"toque"})
    return "; ".join(
        f"{name}: {then.get(name)} -> {now.get(name)}"
        for name in names
        if then.get(name) != now.get(name)
    )
