"""Names of metrics: title, unit and direction of each metric in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

T = TypeVar("T")
REWARD: Final = "reward"
"""Mean reward of generated texts."""
PAIR_LOSS: Final = "pair_loss"
"""Name of a loss in nats per pair. The files call it `loss`, like a loss per token."""
LOSSES: Final = ("loss", PAIR_LOSS)
"""Names of losses, which are also measured on held-out examples."""
ACCURACY: Final = "rewards/accuracies"
"""Share of the pairs with a higher reward for the chosen answer. Only a loss of pairs has it."""
MARGIN: Final = "rewards/margins"
SUMMARY_SCORES: Final = ("cookable", "recipe_score")
"""Scores of an entire recipe, the most informative first."""
MAIN_SCORES: Final = (*SUMMARY_SCORES, "rougeL")
"""Scores in order of preference where only one score is shown."""


@dataclass(frozen=True)
class MetricInfo:
    """Title, unit and direction of a metric."""

    title: str
    unit: str
    better: Literal["lower", "higher"] | None = "higher"


METRIC_NAMES: Final[Mapping[str, MetricInfo]] = {
    "loss": MetricInfo("loss", "nats per target token", "lower"),
    PAIR_LOSS: MetricInfo("loss of pairs", "nats per pair", "lower"),
    ACCURACY: MetricInfo("accuracy of pairs", "share of pairs"),
    MARGIN: MetricInfo("margin of pairs", "difference in reward"),
    "rewards/chosen": MetricInfo("reward of chosen answers", "reward"),
    "rewards/rejected": MetricInfo("reward of rejected answers", "reward", None),
    "logps/chosen": MetricInfo("log-probability of chosen answers", "nats"),
    "logps/rejected": MetricInfo("log-probability of rejected answers", "nats", None),
    REWARD: MetricInfo("reward", "reward"),
    "equal_groups": MetricInfo("equal rewards", "share of prompts", "lower"),
    "cut_texts": MetricInfo("cut texts", "share of texts", "lower"),
    "entropy": MetricInfo("entropy", "nats per token", None),
    "text_tokens": MetricInfo("length of texts", "tokens", None),
    "kl": MetricInfo("divergence from the start model", "nats", None),
    "rollouts": MetricInfo("generating texts", "share of the time", "lower"),
    "perplexity": MetricInfo("perplexity", "perplexity", "lower"),
    "bits_per_byte": MetricInfo("bits per byte", "bits per byte of text", "lower"),
    "repetition": MetricInfo("repetition", "share of four-word sequences", "lower"),
    "hallucinated_ingredients": MetricInfo(
        "hallucinated ingredients", "share of listed ingredients", "lower"
    ),
    "lr": MetricInfo("learning rate", "learning rate", None),
    "grad_norm": MetricInfo("gradient norm", "norm before clipping", None),
    "tokens_per_second": MetricInfo("speed", "tokens per second"),
    "data_wait": MetricInfo("waiting for data", "share of the time", "lower"),
    "pad_fraction": MetricInfo("padding", "share of computed tokens", "lower"),
    "mfu": MetricInfo("utilisation", "share of peak arithmetic"),
}
"""Metrics with a title that differs from their name, or with a known direction."""
_LOWER_IS_BETTER: Final = ("_no_class", "_repetition", "_hallucinated_ingredients")
"""Suffixes of scores that should be low. The name of a task's score begins with the task."""


def metric_named(name: str) -> MetricInfo:
    """Look up a metric. The title of an unknown metric is its name, and higher is better.

    >>> metric_named("ingredient_coverage").title, metric_named("loss").better
    ('ingredient coverage', 'lower')
    """
    if name in METRIC_NAMES:
        return METRIC_NAMES[name]
    title = name.replace("_", " ")
    is_lower_better = name.endswith(_LOWER_IS_BETTER)
    return MetricInfo(title, title, "lower" if is_lower_better else "higher")


def name_pair_loss(metrics: Mapping[str, T]) -> dict[str, T]:
    """Rename the loss of pairs, so that it is not compared with a loss per token.

    >>> name_pair_loss({"loss": 0.5, "rewards/accuracies": 0.9})
    {'pair_loss': 0.5, 'rewards/accuracies': 0.9}
    """
    if ACCURACY not in metrics:
        return dict(metrics)
    return {PAIR_LOSS if name == "loss" else name: v for name, v in metrics.items()}
