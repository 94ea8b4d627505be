"""Generation options, as one frozen value for command line, Python, server and evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from toque.errors import ConfigError, argument

Precision = Literal["auto", "bf16", "float32"]


def refuse_non_numbers(kind: type = Integral, **values: object) -> None:
    """Check that arguments are numbers. None is allowed.

    Raises:
        ConfigError: A value is not a number of this kind.
    """
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            expected = "whole number" if kind is Integral else "number"
            raise ConfigError(
                f"{argument(name)} must be a {expected}, not {value!r:.60}."
            )


def refuse_below(minimum: int, **values: float | None) -> None:
    """Check that arguments are at least `minimum`. None is allowed, but not NaN.

    Raises:
        ConfigError: A value is smaller.
    """
    for name, value in values.items():
        if value is not None and not value >= minimum:  # a comparison with NaN is false
            raise ConfigError(
                f"{argument(name)} is {value:g}; it must be at least {minimum}."
            )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for generating texts. Temperature applies first, then top_k, then top_p."""

    max_new_tokens: int | None = None
    """Maximum length of an answer in tokens; None for the longest text in the model's training."""
    temperature: float = 0.0
    """Divisor of the logits. Below 1 it sharpens the distribution. 0 selects the most likely token.
    """
    top_k: int | None = None
    """Number of most likely tokens to sample from; None or 0 for all tokens."""
    top_p: float = 1.0
    """Nucleus: sample from the fewest tokens with a total probability of p (Holtzman et al. 2020).
    """
    no_repeat_ngram_size: int | None = None
    """Length in tokens of the n-grams that an answer may not repeat; None or 0 for no limit. Unlike
    transformers' option of this name, the answer may repeat n-grams of the prompt."""
    seed: int = 0
    """Seed of the random numbers, which also depend on the prompt's index and the position."""
    precision: Precision = "float32"
    """Precision of matmuls and KV cache; auto is bf16 if the hardware supports it, else float32.

    If two tokens are about equally likely, a bf16 text may differ from the float32 text, or depend
    on the batch size, because the rounding of a matmul depends on its number of rows.
    """
    batch_rows: int | None = None
    """Prompts per batch; None for as many as fit into a quarter of the free memory, up to a limit.
    """

    @property
    def is_greedy(self) -> bool:
        """True if no token is sampled."""
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        """Raise a ConfigError for a value that is not allowed."""
        self._check_types()
        if not 0.0 <= self.temperature < math.inf:  # also refuses NaN
            raise ConfigError(
                f"{argument('temperature')} is {self.temperature:g}; use 0 or more."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"{argument('top_p')} must be above 0 and at most 1, not {self.top_p:g}."
            )
        refuse_below(1, max_new_tokens=self.max_new_tokens, batch_rows=self.batch_rows)
        refuse_below(
            0, top_k=self.top_k, no_repeat_ngram_size=self.no_repeat_ngram_size
        )

    def _check_types(self) -> None:
        """Raise a ConfigError for a value of another type."""
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise ConfigError(
                f"{argument('precision')} must be one of {allowed}, not {self.precision!r}."
            )
        refuse_non_numbers(Real, temperature=self.temperature, top_p=self.top_p)
        refuse_non_numbers(
            max_new_tokens=self.max_new_tokens,
            top_k=self.top_k,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=self.seed,
            batch_rows=self.batch_rows,
        )
