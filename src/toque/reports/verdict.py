"""Verdict on a run, from its files alone: what its time went into, what limits it, what to do."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toque.cooking.recipe_scores import POOR
from toque.reports.bottleneck_rules import Finding, findings
from toque.reports.run_shares import PRODUCTS, Facts, Share, facts_of, mapping
from toque.runs.history import METRICS, number, read_metrics
from toque.storage.json_files import read_json
from toque.training.bottlenecks import GPU_BUSY, GRAD_NORM, RAN_OUT, memory_ladder

_FALLING: Final = 0.01  # share by which held-out loss must still fall for more training to pay
_GAP: Final = 1.3  # held-out over training loss, from which a model learns by heart


@dataclass(frozen=True)
class Verdict:
    """Judgement of what limits a run: findings, what could give back most first."""

    facts: Facts
    sentence: str
    found: tuple[Finding, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the wall time, the largest first; they add up to all of it."""
        return self.facts.shares

    def __str__(self) -> str:
        return self.sentence if not self.found else f"{self.sentence} {advice(self.found[0])}"


@dataclass(frozen=True)
class Ladder:
    """Steps to try, the cheapest and likeliest first."""

    title: str
    because: str
    steps: Sequence[str]


@dataclass(frozen=True)
class Sign:
    """Something to look at while a run learns; `good` is None where nothing tells."""

    name: str
    good: bool | None
    value: str


def verdict_of(folder: Path) -> Verdict | None:
    """The verdict on a run that goes on, has ended or was killed; None before its first update."""
    try:
        facts = facts_of(read_metrics(folder / METRICS))
    except OSError:
        return None
    if facts is None:
        return None
    found = tuple(findings(facts))
    if found:
        sentence = f"What limits this run: {found[0].cause}. {_capital(found[0].sentence)}."
        return Verdict(facts, sentence, found)
    largest, rate = facts.shares[0], ""
    if facts.utilisation is not None and facts.share(PRODUCTS) > 0.0:
        rate = f", at {facts.utilisation:.0%} of the machine's rate"
    most = f"most of its time ({largest.share:.0%}) went into {largest.name}{rate}"
    return Verdict(facts, f"Nothing holds this run up: {most}.", found)


def advice(finding: Finding) -> str:
    """The lever of a finding as a line, with what it is expected to give."""
    if finding.lever is None:
        return "There is no lever for it here."
    pairs = [*finding.environment.items(), *(s.split("=", 1) for s in finding.settings)]
    given = " ".join(f'{n}="{value}"' if " " in value else f"{n}={value}" for n, value in pairs)
    if finding.gain is None:
        gain = "what it gives only trying tells"
    elif finding.gain < 0.005:
        gain = "little to gain"
    else:
        bound = "at most " if finding.at_most else ""
        gain = f"expected: {bound}{finding.gain:.0%} more tokens a second"
    lever = _capital(finding.lever)
    return f"{lever}: {given} ({gain})." if given else f"{lever} ({gain})."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def ladders(folder: Path, facts: Facts) -> list[Ladder]:
    """The ladders that a run has reason for."""
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
    record = read_json(folder / "evaluation.json", dict[str, Any]) or {}
    score = number(mapping(record.get("generated")).get("recipe_score"))
    if score is None or score >= POOR:
        return []
    last = facts.held_out[-2:]
    falling = len(last) == 2 and last[1] < last[0] * (1.0 - _FALLING)
    trained = statistics.fmean(facts.losses[-10:]) if facts.losses else 0.0
    by_heart = bool(last) and trained > 0.0 and last[-1] > _GAP * trained
    longer = "train longer: the held-out loss was still falling (train.stop_after)"
    more_data = "more recipes, or 'augmentation={paraphrase: 0.3}': it learns its examples by heart"
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


def signs(facts: Facts) -> list[Sign]:
    """Signs that a run learns and that the machine works for it."""
    few = max(1, len(facts.losses) // 5)
    found = []
    for name, losses, n in (("training", facts.losses, few), ("held-out", facts.held_out, 1)):
        if len(losses) >= 2:
            before, after = statistics.fmean(losses[:n]), statistics.fmean(losses[-n:])
            value = f"{before:.3f} to {after:.3f}"
            found.append(Sign(f"{name} loss falls", after < before, value))
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
