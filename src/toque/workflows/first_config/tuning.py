"""Plan for the further training of a pretrained model: its batch, learning rate and forecast."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, NamedTuple

from toque.errors import ConfigError, argument
from toque.reporter import clock_text
from toque.units import Duration
from toque.workflows.first_config.sizing import Passes, about, choose_batch

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

    def forecast(self, total: Duration) -> str:
        """Describe the speed and the length of the run."""
        speed = f"Forecast: about {about(self.rate)} tokens/s on this machine."
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
