"""Options of generation: one frozen value for command line, Python and evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from toque.errors import ConfigError, argument

Precision = Literal["auto", "bf16", "float32"]


def refuse_non_numbers(kind: type = Integral, **values: object) -> None:
    """Raise a ConfigError for an argument that is not a number of this kind. None is allowed."""
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            expected = "whole number" if kind is Integral else "number"
            raise ConfigError(
                f"{argument(name)} must be a {expected}, not {value!r:.60}."
            )


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of one generation. temperature applies first, then top_k, then top_p."""

    max_new_tokens: int | None = None
    """Maximum length of an answer in tokens; None for the longest text in training, if it is known.
    """
    temperature: float = 0.0
    """Divisor of the logits. Below 1 it sharpens them, and 0 selects the most likely token."""
    top_k: int | None = None
    """Number of most likely tokens to sample from; None or 0 for all tokens."""
    top_p: float = 1.0
    """Nucleus: sample from the fewest tokens with a total probability of p (Holtzman et al. 2020).
    """
    no_repeat_ngram_size: int | None = None
    """Length in tokens of the shortest run that an answer may not repeat; None or 0 for no limit.
    Unlike transformers' option of this name, the answer may repeat runs of the prompt."""
    seed: int = 0
    """Seed. Together with a prompt's number and the position it determines the random numbers."""
    precision: Precision = "float32"
    """Precision of products and KV cache; auto is bf16 if the hardware supports it, else float32.

    In bf16, a text may differ from the float32 text, or depend on other rows, where two tokens are
    about equally likely. The rounding of a product depends on its number of rows.
    """
    batch_rows: int | None = None
    """Prompts at a time; None for as many as fit into a quarter of the free memory, with a limit.
    """

    @property
    def is_greedy(self) -> bool:
        """True if no token is sampled."""
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            allowed = ", ".join(get_args(Precision))
            raise ConfigError(
                f"{argument('precision')} must be one of {allowed}, not {self.precision!r}."
            )
        refuse_non_numbers(Real, temperature=self.temperature, top_p=self.top_p)
        whole_numbers = (
            "max_new_tokens",
            "top_k",
            "no_repeat_ngram_size",
            "seed",
            "batch_rows",
        )
        refuse_non_numbers(**{name: getattr(self, name) for name in whole_numbers})
        if not 0.0 <= self.temperature < math.inf:  # also refuses NaN
            raise ConfigError(
                f"{argument('temperature')} is {self.temperature:g}; use 0 or more."
            )
        for name, effect in (
            ("top_k", "for all tokens"),
            ("no_repeat_ngram_size", "for no limit"),
        ):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"{argument(name)} must be a number of tokens, or 0 {effect}, not {value}."
                )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"{argument('top_p')} must be above 0 and at most 1, not {self.top_p:g}."
            )
        for name in ("max_new_tokens", "batch_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(
                    f"{argument(name)} is {value}; it must be at least 1."
                )
