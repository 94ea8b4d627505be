"""What the user should know when a run continues: what was skipped, what is not as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from toque.train.checkpoint import Checkpoint
from toque.train.manifest import differences
from toque.train.ranks import Ranks


def circumstances(ranks: Ranks) -> dict[str, int]:
    """What the last bits of a sum depend on, besides versions and the machine."""
    return {"threads": torch.get_num_threads(), "ranks": ranks.world_size}


def notes_on(
    checkpoint: Checkpoint, versions: Mapping[str, Any], state: Mapping[str, Any], ranks: Ranks
) -> list[str]:
    """Sentences about continuing from `checkpoint`.

    Args:
        checkpoint: with the newer ones that could not be used.
        versions: of now.
        state: the checkpoint's.
        ranks: of now.

    Raises:
        ValueError: the state's circumstances are no numbers. TypeError, too.
    """
    notes = [f"skipped {skipped.path.name}: {skipped.reason}" for skipped in checkpoint.skipped]
    changed = differences(checkpoint.manifest.versions, versions)
    for name, now in circumstances(ranks).items():
        then = int(state.get(name, 1))
        if then != now:
            changed.append(f"{name}: {then} -> {now}")
    if changed:
        notes.append(f"the bits may differ from an undisturbed run's: {'; '.join(changed)}")
    return notes
