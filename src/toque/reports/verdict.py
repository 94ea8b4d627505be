"""Verdict on a run, from its files: the use of its time, its bottlenecks, and their remedies."""

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

_FALLING: Final = 0.01
"""Relative fall of the held-out loss above which more training helps."""
_GAP: Final = 1.3
"""Ratio of held-out and training loss above which a model memorises."""


@dataclass(frozen=True)
class Verdict:
    """Bottlenecks of a run, the most important first."""

    facts: Facts
    sentence: str
    """Message about the most important bottleneck."""
    findings: tuple[Finding, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the wall time, the largest first. Their sum is 1."""
        return self.facts.shares

    def __str__(self) -> str:
        if not self.findings:
            return self.sentence
        return f"{self.sentence} {advice(self.findings[0])}"


@dataclass(frozen=True)
class Ladder:
    """Remedies for a problem, in the order in which to try them."""

    title: str
    because: str
    """Evidence of the problem."""
    steps: Sequence[str]


@dataclass(frozen=True)
class Sign:
    """Sign of progress to check while a run trains."""

    name: str
    good: bool | None
    """None if unknown."""
    value: str


def verdict_of(folder: Path) -> Verdict | None:
    """Judge a run that continues, has ended or was killed. Return None before the first update."""
    try:
        facts = facts_of(read_metrics(folder / METRICS))
    except OSError:
        return None
    if facts is None:
        return None
    notable = tuple(findings(facts))
    if notable:
        first = notable[0]
        sentence = (
            f"What limits this run: {first.cause}. {_capitalise(first.sentence)}."
        )
    else:
        largest = facts.shares[0]
        sentence = (
            f"Nothing holds this run up: most of its time ({largest.share:.0%}) went into "
            f"{largest.name}"
        )
        if facts.utilisation is not None and facts.share(PRODUCTS) > 0.0:
            sentence += f", at {facts.utilisation:.0%} of the speed of the machine"
        sentence += "."
    return Verdict(facts, sentence, notable)


def advice(finding: Finding) -> str:
    """Format the remedy of a finding with the expected gain."""
    if finding.lever is None:
        return "No setting changes this."
    values = dict(setting.split("=", 1) for setting in finding.settings)
    arguments = [
        f'{name}="{value}"' if " " in value else f"{name}={value}"
        for name, value in {**finding.environment, **values}.items()
    ]
    if finding.gain is None:
        gain = "the gain is unknown before a trial"
    elif finding.gain < 0.005:
        gain = "little gain"
    else:
        limit = "at most " if finding.at_most else ""
        gain = f"expected: {limit}{finding.gain:.0%} more tokens per second"
    lever = _capitalise(finding.lever)
    if arguments:
        lever += f": {' '.join(arguments)}"
    return f"{lever} ({gain})."


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def ladders(folder: Path, facts: Facts) -> list[Ladder]:
    """List the ladders for the problems of a run."""
    return [*_out_of_memory(facts), *_poor_texts(folder, facts)]


def _out_of_memory(facts: Facts) -> list[Ladder]:
    error = str(facts.end.get("error") or "")
    n_repeated = sum(RAN_OUT in text for text in facts.warnings)
    has_ended = (
        RAN_OUT in error
        or "fit into memory" in error
        or "out of memory" in error.lower()
    )
    if not n_repeated and not has_ended:
        return []

    is_checkpointing = facts.start.get("gradient_checkpointing") is True
    steps = memory_ladder(checkpointing=is_checkpointing, optimizer="adamw")
    if isinstance(facts.setting("micro_batch_rows"), int):
        steps = ["train.micro_batch_rows=auto", *steps]
    because = f"{n_repeated} updates did not fit and were repeated with fewer rows"
    if has_ended:
        because = "the run ended because memory ran out"
    return [Ladder("out of memory", because, steps)]


def _poor_texts(folder: Path, facts: Facts) -> list[Ladder]:
    record = read_json(folder / "evaluation.json", dict[str, Any]) or {}
    score = number(mapping(record.get("generated")).get("recipe_score"))
    if score is None or score >= POOR:
        return []

    last = facts.held_out[-2:]
    is_falling = len(last) == 2 and last[1] < last[0] * (1.0 - _FALLING)
    training_loss = statistics.fmean(facts.losses[-10:]) if facts.losses else 0.0
    memorises = bool(last) and training_loss > 0.0 and last[-1] > _GAP * training_loss
    steps = []
    if is_falling:
        steps.append(
            "train longer: the held-out loss was still falling (train.stop_after)"
        )
    if memorises:
        steps.append(
            "more recipes, or 'augmentation={paraphrase: 0.3}': the model memorises its examples"
        )
    if not steps:
        steps.append(
            "another learning rate: the held-out loss no longer falls (try half and twice the "
            "present optim.peak_lr)"
        )
    steps += [
        "better examples: data.min_quality=0.5",
        "a pretrained model (model.start_from) or a larger model",
        "more tasks from the same recipes (data.tasks)",
    ]
    because = f"the recipe score of its texts is {score:.2f} of 1; texts below {POOR} are poor"
    return [Ladder("poor texts", because, steps)]


def signs(facts: Facts) -> list[Sign]:
    """List signs that a run learns and that the machine works properly."""
    result = []
    first_fifth = max(1, len(facts.losses) // 5)
    for name, losses, n in (
        ("training", facts.losses, first_fifth),
        ("held-out", facts.held_out, 1),
    ):
        if len(losses) >= 2:
            before = statistics.fmean(losses[:n])
            after = statistics.fmean(losses[-n:])
            value = f"{before:.3f} to {after:.3f}"
            result.append(Sign(f"{name} loss falls", after < before, value))
    if (norm := facts.grad_norm) is not None:
        value = f"{norm:.2f} before clipping"
        result.append(
            Sign(f"gradient norm below {GRAD_NORM:g}", norm < GRAD_NORM, value)
        )
    if (busy := facts.gpu_busy) is not None:
        result.append(
            Sign(f"GPU busy over {GPU_BUSY:.0%}", busy > GPU_BUSY, f"{busy:.0%}")
        )

    n_missed = facts.skipped_saves
    if facts.n_saves or n_missed:
        value = f"{facts.n_saves} written, {n_missed} not"
        result.append(Sign("saves succeed", n_missed == 0, value))
    n_late = sum("is not uploaded yet" in text for text in facts.warnings)
    if n_late or "uploads" in facts.parts:
        result.append(Sign("uploads succeed", n_late == 0, f"{n_late} tries failed"))
    return result
