"""The score `cookable`: whether a reader can cook from a recipe as it is.

Two readers judged generated recipes and recipes by people (lab/cookable.md). A logistic regression
on half of the judgements, with weights of at least 0, gave the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

WEIGHTS: Final = {
    "ingredients_named": 2.3,
    "requested_listed": 2.1,
    "added_once": 1.2,
    "foods_listed": 1.4,
    "title_kept": 0.5,
    "oven_fits": 0.9,
    "dish_made": 0.8,
    "food_cooked": 0.7,
    "amounts_usual": 0.9,
    "amounts_differ": 0.8,
    "phrases_once": 0.4,
    "steps_detailed": 0.9,
    "times_and_heat": 1.0,
}
"""Weights of the scores."""


def cookable(scores: Mapping[str, float], *, is_complete: bool) -> float:
    """Combine scores: 1 / (1 + the weighted sum of what each lacks to 1).

    Args:
        scores: Recipe scores by name. A score that is absent does not apply, and lacks nothing.
        is_complete: Whether the text has ingredients and steps. Without, the result is 0.0.
    """
    if not is_complete:
        return 0.0
    lacking = [
        weight * (1.0 - scores.get(name, 1.0)) for name, weight in WEIGHTS.items()
    ]
    return 1.0 / (1.0 + sum(lacking))
