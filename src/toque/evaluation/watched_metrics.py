"""Watched metrics of a run: those that early stopping and the best model go by."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from toque.config.schema import EvaluationConfig, TrainConfig
from toque.cooking.recipe_scores import NAMES as RECIPE_NAMES
from toque.errors import ConfigError
from toque.evaluation.text_metrics.rouge import NAMES as ROUGE_NAMES
from toque.evaluation.text_samples import Prompt
from toque.evaluation.text_scores import GROUPS
from toque.runs.history import metric_named
from toque.training.callbacks import Goal

HELD_OUT: Final = ("loss", "perplexity")
_OF_GROUPS: Final[Mapping[str, tuple[str, ...]]] = {
    "bleu": ("bleu",),
    "chrf": ("chrf",),
    "rouge": ROUGE_NAMES,
    "repetition": ("repetition", "distinct_1", "distinct_2"),
    "recipe": RECIPE_NAMES,
}
BITS: Final = "bits_per_byte"
"""Measured where the bytes of the held-out targets are known."""


def goal_of(metric: str) -> Goal:
    """The metric as a goal."""
    return Goal(metric, rises=metric_named(metric).better != "lower")


@dataclass(frozen=True)
class Watched:
    """The metrics that a run goes by, among those it measures."""

    names: Sequence[str]
    known: Sequence[str]
    """Measured by what comes with Toque."""


def watched_metrics(
    train: TrainConfig,
    evaluation: EvaluationConfig,
    prompts: Sequence[Prompt],
    *,
    bits: bool = False,
) -> Watched:
    """The metrics that the run goes by.

    Args:
        train: names the metrics.
        evaluation: names what is measured.
        prompts: the held-out ones that are written for at every evaluation.
        bits: whether the bytes of the held-out targets are known.

    Raises:
        ConfigError: one that this run does not measure.
    """
    asked = {"train.best_by": train.best_by}
    if train.early_stopping is not None:
        asked["train.early_stopping.metric"] = train.early_stopping.metric
    known, own = _measured(evaluation, prompts)
    known += [BITS] if bits else []
    for setting, metric in asked.items():
        if metric in known or (own and prompts):
            continue  # what functions of the user's give is known when they have been called
        near = difflib.get_close_matches(metric, known, n=1)
        why = (
            ""
            if prompts
            else " Scores of texts are measured where held-out examples have prompts, and "
            "evaluation.texts and evaluation.generate are above 0."
        )
        raise ConfigError(
            f"{setting} is {metric}, which the evaluations of this run do not measure."
            + (f" Nearest: {near[0]}." if near else "")
            + f" Allowed: {', '.join(known)}.{why}"
        )
    return Watched(list(dict.fromkeys(asked.values())), known)


def _measured(evaluation: EvaluationConfig, prompts: Sequence[Prompt]) -> tuple[list[str], bool]:
    """The metrics that come with Toque, and whether there are others."""
    names = ("auto",) if evaluation.metrics == "auto" else evaluation.metrics
    own = any(":" in name for name in names)
    if not prompts:
        return [*HELD_OUT], own
    groups = [group for group in GROUPS if group in names or "auto" in names]
    return [*HELD_OUT, *(name for group in groups for name in _OF_GROUPS[group])], own
