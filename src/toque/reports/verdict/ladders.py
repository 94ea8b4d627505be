"""Ladders: what to try, in order, when memory runs out or texts stay poor; and signs of learning.

The ladder of a slow run is its verdict: `rules.findings`, what could give back most first.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from toque.cooking.scoring.recipe_scores import POOR
from toque.reports.verdict.facts import Facts, mapping, number
from toque.storage.json_files import decode_json
from toque.training.bottlenecks import GPU_BUSY, GRAD_NORM, RAN_OUT, memory_ladder

_FALLING: Final = 0.01
"""Share by which the last evaluation still lowered the held-out loss, from which more training
pays."""
_GAP: Final = 1.3
"""Held-out over training loss, from which a model learns by heart."""


@dataclass(frozen=True)
class Ladder:
    """What to try, the cheapest and likeliest first."""

    title: str
    because: str
    steps: Sequence[str]


@dataclass(frozen=True)
class Sign:
    """Something to look at while a run learns; `good` is None where nothing tells."""

    name: str
    good: bool | None
    value: str


def ladders(folder: Path, facts: Facts) -> list[Ladder]:
    """Those that a run has reason for."""
    return [*_memory(facts), *_poor_texts(folder, facts)]


def _memory(facts: Facts) -> list[Ladder]:
    error = str(facts.end.get("error") or "")
    again = [text for text in facts.warnings if RAN_OUT in text]
    ended = RAN_OUT in error or "fit into memory" in error or "out of memory" in error.lower()
    if not again and not ended:
        return []
    checkpointing = facts.start.get("gradient_checkpointing") is True
    steps = memory_ladder(checkpointing=checkpointing, optimizer="adamw")
    rows = facts.setting("micro_batch_rows")
    first = ["train.micro_batch_rows=auto"] if isinstance(rows, int) else []
    because = (
        "it ended for want of memory"
        if ended
        else f"{len(again)} times an update did not fit and was computed again with fewer rows"
    )
    return [Ladder("out of memory", because, [*first, *steps])]


def _poor_texts(folder: Path, facts: Facts) -> list[Ladder]:
    score = _recipe_score(folder)
    if score is None or score >= POOR:
        return []
    last = [loss for _, loss in facts.held_out[-2:]]
    falling = len(last) == 2 and last[1] < last[0] * (1.0 - _FALLING)
    trained = statistics.fmean(loss for _, loss in facts.losses[-10:]) if facts.losses else 0.0
    by_heart = bool(last) and trained > 0.0 and last[-1] > _GAP * trained
    longer = "train longer: the held-out loss was still falling (train.stop_after)"
    more_data = "more recipes, or augmentation={paraphrase: 0.3}: it learns its examples by heart"
    steps = [longer] * falling + [more_data] * by_heart
    if not falling and not by_heart:
        steps.append(
            "another learning rate: the held-out loss no longer falls (optim.peak_lr, twice and "
            "half of what it is)"
        )
    steps += [
        "better examples: data.min_quality=0.5",
        "start from a pretrained model (model.start_from), or take a larger one",
        "more kinds of task from the same recipes (data.tasks)",
    ]
    because = f"the recipe score of its texts is {score:.2f} of 1; below {POOR} texts are poor"
    return [Ladder("poor texts", because, steps)]


def _recipe_score(folder: Path) -> float | None:
    try:
        record = decode_json((folder / "evaluation.json").read_bytes(), dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    return number(mapping(record.get("generated")).get("recipe_score"))


def signs(facts: Facts) -> list[Sign]:
    """Whether a run learns and the machine works for it."""
    losses = [loss for _, loss in facts.losses]
    few = max(1, len(losses) // 5)
    first, newest = losses[:few], losses[-few:]
    found = []
    if len(losses) >= 2:
        before, after = statistics.fmean(first), statistics.fmean(newest)
        found.append(Sign("training loss falls", after < before, f"{before:.3f} to {after:.3f}"))
    if len(facts.held_out) >= 2:
        (_, before), (_, after) = facts.held_out[0], facts.held_out[-1]
        found.append(Sign("held-out loss falls", after < before, f"{before:.3f} to {after:.3f}"))
    if facts.grad_norm is not None:
        value = f"{facts.grad_norm:.2f} before clipping"
        found.append(Sign(f"gradient norm below {GRAD_NORM:g}", facts.grad_norm < GRAD_NORM, value))
    if facts.gpu_busy is not None:
        value = f"{facts.gpu_busy:.0%}"
        found.append(Sign(f"GPU busy over {GPU_BUSY:.0%}", facts.gpu_busy > GPU_BUSY, value))
    missed = facts.skipped_saves
    if facts.n_saves or missed:
        found.append(Sign("saves succeed", missed == 0, f"{facts.n_saves} written, {missed} not"))
    late = [text for text in facts.warnings if "is not uploaded yet" in text]
    if late or "uploads" in facts.parts:
        found.append(Sign("uploads succeed", not late, f"{len(late)} tries failed"))
    return found
