"""Verdict on a run, from its files: the use of its time, its bottlenecks, and their remedies."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from toque.cooking.recipe_scores import POOR
from toque.reports.bottleneck_rules import Finding, find_bottlenecks
from toque.reports.run_shares import MATMULS, Facts, Share, collect_facts, nested_number
from toque.runs.history import METRICS, read_metrics
from toque.storage.json_files import read_json
from toque.training.bottlenecks import GPU_BUSY, GRAD_NORM, RAN_OUT, memory_ladder

_FALLING: Final = 0.01
"""Relative decrease of the held-out loss above which more training helps."""
_GAP: Final = 1.3
"""Ratio of the held-out loss to the training loss above which a model memorises."""


@dataclass(frozen=True)
class Verdict:
    """Bottlenecks of a run, the most important first."""

    facts: Facts
    sentence: str
    """Description of the most important bottleneck."""
    findings: tuple[Finding, ...]

    @property
    def shares(self) -> tuple[Share, ...]:
        """Shares of the wall time, the largest first. Their sum is 1."""
        return self.facts.shares

    def __str__(self) -> str:
        if not self.findings:
            return self.sentence
        return f"{self.sentence} {describe_remedy(self.findings[0])}"


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
    """True if the result is good; None if unknown."""
    value: str


def judge_run(folder: Path) -> Verdict | None:
    """Judge a finished or training run from its metrics. Return None before the first update."""
    try:
        facts = collect_facts(read_metrics(folder / METRICS))
    except OSError:
        return None
    if facts is None:
        return None
    bottlenecks = find_bottlenecks(facts)
    return Verdict(facts, _summarise(facts, bottlenecks), tuple(bottlenecks))


def _summarise(facts: Facts, bottlenecks: Sequence[Finding]) -> str:
    """Name the most important bottleneck, or the largest share if nothing slows the run."""
    if bottlenecks:
        first = bottlenecks[0]
        return f"What limits this run: {first.cause}. {_capitalise(first.sentence)}."
    largest = facts.shares[0]
    sentence = (
        f"Nothing slows this run down: most of its time ({largest.share:.0%}) went into "
        f"{largest.name}"
    )
    if facts.utilisation is not None and facts.share(MATMULS) > 0.0:
        sentence += f", at {facts.utilisation:.0%} of the machine's speed"
    return f"{sentence}."


def describe_remedy(finding: Finding) -> str:
    """Describe the remedy for a finding and its expected gain."""
    if finding.lever is None:
        return "No setting changes this."

    overrides = dict(setting.split("=", 1) for setting in finding.settings)
    arguments = [
        f'{name}="{value}"' if " " in value else f"{name}={value}"
        for name, value in {**finding.environment, **overrides}.items()
    ]
    lever = _capitalise(finding.lever)
    if arguments:
        lever += f": {' '.join(arguments)}"

    if finding.gain is None:
        gain = "the gain is unknown before a trial"
    elif finding.gain < 0.005:
        gain = "little gain"  # it would be shown as 0 %
    else:
        limit = "at most " if finding.at_most else ""
        gain = f"expected: {limit}{finding.gain:.0%} more tokens per second"
    return f"{lever} ({gain})."


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def list_ladders(folder: Path, facts: Facts) -> list[Ladder]:
    """List the ladders for the problems of a run."""
    return [*_ladder_for_memory(facts), *_ladder_for_poor_texts(folder, facts)]


def _ladder_for_memory(facts: Facts) -> list[Ladder]:
    """Advise on a run that ran out of memory."""
    error = str(facts.end.get("error") or "")
    n_retried = sum(RAN_OUT in text for text in facts.warnings)
    has_ended = (
        RAN_OUT in error
        or "fit into memory" in error
        or "out of memory" in error.lower()
    )
    if not n_retried and not has_ended:
        return []

    is_checkpointing = facts.start.get("gradient_checkpointing") is True
    steps = memory_ladder(checkpointing=is_checkpointing, optimizer="adamw")
    if isinstance(facts.setting("micro_batch_rows"), int):
        steps = ["train.micro_batch_rows=auto", *steps]
    because = f"{n_retried} updates did not fit and were retried with fewer rows"
    if has_ended:
        because = "the run ended because memory ran out"
    return [Ladder("out of memory", because, steps)]


def _ladder_for_poor_texts(folder: Path, facts: Facts) -> list[Ladder]:
    """Advise on a run with a low recipe score, by the course of its losses."""
    record = read_json(folder / "evaluation.json", dict[str, Any]) or {}
    score = nested_number(record, "generated", "recipe_score")
    if score is None or score >= POOR:
        return []

    steps = _remedies_by_loss(facts)
    if facts.rewards:
        steps = ["a start model that imitates recipes better (model.start_from)"]
    steps += [
        "better examples: data.min_quality=0.5",
        "a pretrained model (model.start_from) or a larger model",
        "more tasks from the same recipes (data.tasks)",
    ]
    because = (
        f"the recipe score of the generated texts is {score:.2f}, and texts below {POOR} of 1 "
        "are poor"
    )
    return [Ladder("poor texts", because, steps)]


def _remedies_by_loss(facts: Facts) -> list[str]:
    """Choose remedies for poor texts by the course of the losses."""
    steps = []
    if _is_loss_falling(facts):
        steps.append(
            "train longer: the held-out loss was still falling (train.stop_after)"
        )
    if _memorises(facts):
        steps.append(
            "more recipes, or 'augmentation={paraphrase: 0.3}': the model memorises its examples"
        )
    if not steps:
        steps.append(
            "another learning rate: the held-out loss stopped falling (try half and twice the "
            "current optim.peak_lr)"
        )
    return steps


def _is_loss_falling(facts: Facts) -> bool:
    """Check if the held-out loss fell notably between the last two evaluations."""
    if len(facts.held_out) < 2:
        return False
    before, last = facts.held_out[-2:]
    return last < before * (1.0 - _FALLING)


def _memorises(facts: Facts) -> bool:
    """Check if the held-out loss is much higher than the training loss."""
    if not facts.held_out or not facts.losses:
        return False
    training_loss = statistics.fmean(facts.losses[-10:])
    return training_loss > 0.0 and facts.held_out[-1] > _GAP * training_loss


def list_signs(facts: Facts) -> list[Sign]:
    """List signs that a run learns and that the machine works properly."""
    n = max(1, len(facts.losses) // 5)
    if facts.rewards:
        signs = _trend_signs("reward", facts.rewards, n, rises=True)
    else:
        signs = [
            *_trend_signs("training loss", facts.losses, n),
            *_trend_signs("held-out loss", facts.held_out, 1),
        ]
    norm = facts.grad_norm
    if norm is not None:
        name = f"gradient norm below {GRAD_NORM:g}"
        signs.append(Sign(name, norm < GRAD_NORM, f"{norm:.2f} before clipping"))
    busy = facts.gpu_busy
    if busy is not None:
        signs.append(
            Sign(f"GPU busy over {GPU_BUSY:.0%}", busy > GPU_BUSY, f"{busy:.0%}")
        )

    n_skipped = facts.skipped_saves
    if facts.n_saves or n_skipped:
        value = f"{facts.n_saves} written, {n_skipped} skipped"
        signs.append(Sign("saves succeed", n_skipped == 0, value))
    n_late = sum("is not uploaded yet" in text for text in facts.warnings)
    if n_late or "uploads" in facts.parts:
        signs.append(Sign("uploads succeed", n_late == 0, f"{n_late} attempts failed"))
    return signs


def _trend_signs(
    name: str, values: Sequence[float], n: int, *, rises: bool = False
) -> list[Sign]:
    """Compare the means of the first and the last `n` values."""
    if len(values) < 2:
        return []
    before = statistics.fmean(values[:n])
    after = statistics.fmean(values[-n:])
    value = f"{before:.3f} to {after:.3f}"
    if rises:
        return [Sign(f"{name} rises", after > before, value)]
    return [Sign(f"{name} falls", after < before, value)]
