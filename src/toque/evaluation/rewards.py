"""Rewards: scores of generated texts that grpo and best_of learn from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Self

import numpy as np

from toque.config.schema_methods import ObjectiveConfig
from toque.config.user_code import ForeignCode, import_user_code
from toque.cooking.recipe_scores import NAMES, text_metrics
from toque.data.array_types import Floats
from toque.errors import ConfigError, nearest_hint
from toque.evaluation.text_scores import is_user_metric

Reward = Callable[[list[str], list[str], list[str]], object]
"""Function of prompts, texts and references that returns a number for each text."""
_SHOWN: Final = 200  # characters of a prompt or text in a message
_LARGEST: Final = 1e6  # largest reward; sums of squares stay exact enough
_SETTING: Final = "objective.rewards"


@dataclass(frozen=True)
class Rewards:
    """Weighted sum of named scores."""

    functions: Mapping[str, Reward]
    weights: Mapping[str, float]

    @classmethod
    def from_settings(cls, objective: ObjectiveConfig, foreign: ForeignCode) -> Self:
        """Look up the scores of `objective.rewards`. Import the user's functions.

        Raises:
            ConfigError: A name is not a score, or its code is untrusted or cannot be imported.
        """
        functions = {name: find_reward(name, foreign) for name in objective.rewards}
        return cls(functions, objective.rewards)

    def score(
        self, prompts: list[str], texts: list[str], references: list[str]
    ) -> Floats:
        """Compute the reward of each text, [texts].

        Raises:
            ConfigError: A function fails, or does not return one finite number per text.
        """
        total = np.zeros(len(texts))
        for name, function in self.functions.items():
            values = _call(name, function, prompts, texts, references)
            total += self.weights[name] * values
        if not np.isfinite(total).all() or np.abs(total).max(initial=0.0) > _LARGEST:
            first = int(np.argmax(np.abs(np.nan_to_num(total, nan=np.inf))))
            raise ConfigError(
                f"The weighted sum of {', '.join(self.functions)} is {total[first]:g}. Its "
                f"absolute value may be at most {_LARGEST:g}. "
                f"{_show(prompts[first], texts[first])} Use smaller weights in {_SETTING}."
            )
        return total


def find_reward(name: str, foreign: ForeignCode, *, setting: str = _SETTING) -> Reward:
    """Look up a recipe score, or import a function of the user.

    Args:
        name: Name of a score, or module:function.
        foreign: Untrusted code that must not be imported.
        setting: The setting with this name, for messages.

    Raises:
        ConfigError: The name is not a score, or its code is untrusted or cannot be imported.
    """
    if is_user_metric(name):
        function: Reward = import_user_code(
            foreign, name, setting=setting, kind="a function"
        )
        if not callable(function):
            raise ConfigError(f"{setting} names {name}, which is not a function.")
        return function
    if name in NAMES:
        return _recipe_reward(name)
    raise ConfigError(
        f"{setting} names {name}, which is not a score.{nearest_hint(name, NAMES)} Use "
        f"module:function, or one of {', '.join(NAMES)}."
    )


def _call(
    name: str,
    function: Reward,
    prompts: list[str],
    texts: list[str],
    references: list[str],
) -> Floats:
    """Call a function, and check its numbers."""
    try:
        # Copies, because the function may change its arguments.
        result = function([*prompts], [*texts], [*references])
        values, problem = _to_numbers(result, len(texts))
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"The reward {name} failed with {type(error).__name__}: {str(error)[:_SHOWN]}. It was "
            f"called with {len(texts)} texts. {_show(prompts[0], texts[0])} Correct the function, "
            "and run the same command to continue."
        ) from error

    if problem:
        first = min(len(values), len(texts) - 1)
        raise ConfigError(
            f"The reward {name} {problem}. It must return a list with one finite number for each "
            f"text. {_show(prompts[first], texts[first])} Correct the function, and run the same "
            "command to continue."
        )
    return np.array(values)


def _to_numbers(result: object, n_texts: int) -> tuple[list[float], str]:
    """Convert what a function returned.

    Returns:
        The numbers before the first element that is not a finite number, and an error message. The
        message is empty if every element is finite and the length is right.
    """
    is_other = isinstance(result, str | bytes | Mapping | AbstractSet)
    has_no_axis = getattr(result, "ndim", 1) == 0  # an array or tensor
    if is_other or has_no_axis or not isinstance(result, Iterable):
        return [], f"returned {type(result).__name__} instead of a list of numbers"
    values: list[float] = []
    for element in islice(result, n_texts + 1):  # it may be endless
        value = _to_number(element)
        if value is None:
            shown = repr(element)[:_SHOWN]
            return values, f"returned {shown} for text {len(values) + 1}"
        values.append(value)
    if len(values) > n_texts:
        return [], f"returned more than {n_texts} numbers for {n_texts} texts"
    if len(values) < n_texts:
        return [], f"returned {len(values)} numbers for {n_texts} texts"
    return values, ""


def _to_number(element: Any) -> float | None:
    """Convert a finite number, or a boolean. Return None for anything else."""
    if isinstance(element, str | bytes | list | tuple):
        return None
    if getattr(element, "ndim", 0):  # an array or tensor
        return None
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        number = float(element)
        return number if math.isfinite(number) else None
    return None


def _show(prompt: str, text: str) -> str:
    return f"Prompt: {prompt[:_SHOWN]!r}. Text: {text[:_SHOWN]!r}."


def _recipe_reward(name: str) -> Reward:
    """Return the reward of a recipe score. A text without the score has the reward 0."""

    def score(prompts: Sequence[str], texts: Sequence[str], _: Sequence[str]) -> Floats:
        pairs = zip(prompts, texts, strict=True)
        return np.array([text_metrics(*pair).get(name, 0.0) for pair in pairs])

    return score
