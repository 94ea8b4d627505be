"""Plan for the further training of a pretrained model: its batch, learning rate and forecast."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from toque.config import RunConfig
from toque.errors import ConfigError, argument
from toque.reporter import clock_text
from toque.units import Duration
from toque.workflows.configure import configure
from toque.workflows.first_config.sizing import Passes, about, choose_batch
from toque.workflows.first_config.source_survey import (
    DOCUMENTS,
    PREFERENCES,
    RECIPES,
    TOKENS,
    Survey,
    kinds_of,
)

MAX_PASSES: Final = 4.0
"""Passes over the texts after which a pretrained model stops. Up to four passes are worth nearly as
much as fresh text (Muennighoff et al. 2023; lab/dial.md)."""
MAX_BATCH_TOKENS: Final = 16_384
"""Maximum tokens per update of a pretrained model."""
_TUNED_LR: Final = (1e-4, 135e6)
"""AdamW's peak rate for all weights of a model, and the parameters of that model. The rate scales
with the inverse root of the parameters (lab/dial.md)."""
_MAX_TUNED_LR: Final = 5e-4
_ADAPTER_LR: Final = 1e-3  # a guess
REWARD_PROMPTS: Final = 8
"""Prompts per update of a run that learns from rewards."""
_SFT_WEIGHT: Final = 0.1
"""Weight of imitation in a run that learns from rewards."""
FORWARD_PASSES_PER_UPDATE: Final = 3
"""Work of an update, in forward passes. An evaluation computes only the forward pass."""


def tuned_lr(parameters: int, *, adapted: bool) -> float:
    """Return AdamW's peak rate for a pretrained model. 0 parameters means an unknown number."""
    if adapted:
        return _ADAPTER_LR
    base_lr, base_parameters = _TUNED_LR
    n = parameters or base_parameters
    lr = base_lr * math.sqrt(base_parameters / n)
    return float(f"{min(_MAX_TUNED_LR, lr):.1g}")


def set_objective(
    draft: RunConfig, survey: Survey, rewards: Sequence[str]
) -> RunConfig:
    """Set the objective, because its updates have other rows and another speed.

    Raises:
        ConfigError: A reward is unknown, or cannot be combined with the data or a new model.
    """
    from toque.evaluation.rewards import find_reward  # loads the scores

    kinds = kinds_of(survey)
    if not rewards:
        if PREFERENCES not in kinds:
            return draft
        return configure(draft, objective={"kind": "dpo"})
    name = argument("rewards")
    if draft.model.start_from == "scratch":
        raise ConfigError(
            f"{name} improve a model that can already write, so {argument('start_from')} must "
            "name one: the model folder of a run, or a Hugging Face name."
        )
    for reward in rewards:
        find_reward(reward, {}, setting=name)
    has_own = any(":" in reward for reward in rewards)
    if kinds & {PREFERENCES, DOCUMENTS, TOKENS} or not (
        has_own or kinds <= {RECIPES, ""}
    ):
        raise ConfigError(
            f"{name} {' '.join(rewards)} cannot be used with {', '.join(sorted(kinds))}. The "
            "scores of Toque are for recipes. For other texts with prompts, use a function of "
            "your own, module:function: docs/guides/learn-from-rewards.md."
        )
    objective = {
        "kind": "grpo",
        "rewards": dict.fromkeys(rewards, 1.0),
        "sft_weight": _SFT_WEIGHT,
    }
    batch = f"{REWARD_PROMPTS} examples"
    return configure(draft, objective=objective, train={"batch": batch})


class RewardPace(NamedTuple):
    """Speed of a run that learns from rewards."""

    samples: int
    """Number of texts per prompt."""
    texts_per_second: float
    """Texts that are generated, and from which the model then learns."""
    updates: float
    """Number of updates in the run."""

    def __str__(self) -> str:
        """Describe the updates in a sentence."""
        return (
            f"The run makes about {about(self.updates)} updates, each with {self.samples} texts "
            f"for each of {REWARD_PROMPTS} prompts, at {self.texts_per_second:.2g} texts/s."
        )


class Tuning(NamedTuple):
    """Further training of a pretrained model in a limited time."""

    batch: str
    """Value of `train.batch`."""
    tokens: float
    """Number of training tokens in the run."""
    rate: float
    """Training speed of this machine, in tokens per second."""
    passes: Passes
    writing: float = 0.0
    """Generation speed, in tokens per second. 0.0: not measured."""
    reference: float | None = None
    """Seconds of the reference pass over all preference pairs. None without pairs."""
    rewards: RewardPace | None = None
    """Speed with rewards. None for other objectives."""

    def with_rewards(
        self, samples: int, tokens_each: float, writing: float, seconds: float
    ) -> Tuning:
        """Return the plan of a run that learns from rewards in the same time.

        Args:
            samples: Number of texts per prompt.
            tokens_each: Mean number of tokens of a text.
            writing: Generation speed for the texts of an update, in tokens per second.
            seconds: Time for training.
        """
        seconds_per_text = tokens_each * (1.0 / writing + 1.0 / self.rate)
        updates = seconds / (REWARD_PROMPTS * samples * seconds_per_text)
        return self._replace(
            passes=Passes(MAX_PASSES, 0.0),  # a run never repeats all prompts so often
            rewards=RewardPace(samples, 1.0 / seconds_per_text, updates),
        )

    def forecast(self, total: Duration) -> str:
        """Describe the speed and the length of the run."""
        speed = f"Forecast: about {about(self.rate)} tokens/s on this machine."
        if self.rewards is not None:
            return (
                f"Forecast: {self.rewards} How far the reward rises depends on the model and "
                "cannot be predicted. A higher reward does not prove that the texts are better: "
                "docs/guides/learn-from-rewards.md."
            )
        length = self.passes.describe(self.tokens, self.rate, total)
        if self.reference is not None:
            return (
                f"{speed} Before training, the log-probabilities of all answers are computed with "
                f"the start model, in about {clock_text(self.reference)}. The run reads {length}. "
                "The loss begins at 0.69. Its end depends on the model and the pairs and cannot "
                "be predicted. Compare rewards/accuracies, the share of held-out pairs with a "
                "preferred chosen answer, with 50 %: docs/guides/learn-from-preferences.md."
            )
        return (
            f"{speed} The run reads {length}. The loss depends on the "
            "model and cannot be predicted. SmolLM2-135M reached 0.51 bits per byte of recipes "
            "after 340,000 tokens and 0.44 after 2,300,000: docs/explanation/what-to-expect.md."
        )


def plan_tuning(
    texts: float, records: int, seconds: float, rate: float, *, longest: int
) -> Tuning:
    """Plan the further training of a pretrained model.

    Args:
        texts: Number of tokens in all training texts, after the length limits, or 0 if it is
            unknown.
        records: Number of texts, or 0 if it is unknown.
        seconds: Time for training.
        rate: Training speed of this machine, in tokens per second.
        longest: Length of the longest text in tokens, which must fit into an update.
    """
    passes = Passes(MAX_PASSES, rate * seconds / texts if texts else 0.0)
    read = passes.tokens(rate, seconds)
    batch = choose_batch(
        read, texts, records, max_tokens=MAX_BATCH_TOKENS, longest=longest
    )
    return Tuning(batch, read, rate, passes)


def reference_seconds(
    tokens: float, rate: float, seconds: float, total: Duration
) -> float:
    """Estimate the seconds of the reference pass over all preference pairs.

    Args:
        tokens: Number of tokens in all pairs.
        rate: Training speed of this machine, in tokens per second.
        seconds: Time for this pass and training.
        total: Time of the entire run.

    Raises:
        ConfigError: The pass leaves less than half of the time for training.
    """
    reference = tokens / rate / FORWARD_PASSES_PER_UPDATE
    if reference > seconds / 2:
        minutes = math.ceil((total.seconds or 0.0) * 2 * reference / seconds / 60)
        minimum = argument(f'for_="{minutes} minutes"')
        raise ConfigError(
            f'{argument("for_")} is "{replace(total, total=False)}", but the log-probabilities of '
            f"all answers, which are computed before training, take about {clock_text(reference)}. "
            f"Use at least {minimum}, or fewer pairs."
        )
    return reference
