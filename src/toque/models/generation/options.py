"""Options of generation: one frozen value for the command line, Python and evaluation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Literal, get_args

from toque.errors import ConfigError, argument

Precision = Literal["auto", "bf16", "float32"]


def refuse_no_number(kind: type = Integral, **values: object) -> None:
    """Raise a ConfigError for an argument that is no number of its kind; None passes."""
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            wanted = "whole number" if kind is Integral else "number"
            raise ConfigError(f"{argument(name)} is {value!r:.60}; give a {wanted}.")


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options of one generation, checked; temperature, then top_k, then top_p apply."""

    max_new_tokens: int | None = None
    """Tokens of the longest answer; None for what the model was trained on, where that is known."""
    temperature: float = 0.0
    """Divisor of the logits, below 1 to sharpen; 0 takes the likeliest token every time."""
    top_k: int | None = None
    """Number of likeliest tokens to draw from; None or 0 keeps all."""
    top_p: float = 1.0
    """Nucleus: draw from the fewest tokens whose probabilities reach p (Holtzman et al. 2020)."""
    no_repeat_ngram_size: int | None = None
    """Tokens of the shortest run that an answer may not hold twice, its prompt apart; None or 0 for
    none. Transformers' option of this name bans the prompt's runs as well."""
    seed: int = 0
    """Seed that, with a prompt's number and the position, decides the draws."""
    precision: Precision = "float32"
    """Precision of products and KV cache; auto is bf16 where the hardware has it, else float32.

    In bf16 a text may part from float32's, and from its own with other rows beside it, where two
    tokens are about equally likely: sums of a product depend on how many rows it has.
    """
    batch_rows: int | None = None
    """Prompts at a time; None for as many as a quarter of the free memory holds, up to a limit."""

    @property
    def is_greedy(self) -> bool:
        """True where no token is drawn."""
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise ConfigError(f"{argument('precision')} is {self.precision!r}; use one of {known}.")
        refuse_no_number(Real, temperature=self.temperature, top_p=self.top_p)
        whole = ("max_new_tokens", "top_k", "no_repeat_ngram_size", "seed", "batch_rows")
        refuse_no_number(**{name: getattr(self, name) for name in whole})
        if not 0.0 <= self.temperature < math.inf:  # NaN is no number
            raise ConfigError(f"{argument('temperature')} is {self.temperature:g}; use 0 or more.")
        for name, none in (("top_k", "to keep all"), ("no_repeat_ngram_size", "for no such rule")):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(
                    f"{argument(name)} is {value}; use a count of tokens, or 0 {none}."
                )
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigError(
                f"{argument('top_p')} is {self.top_p:g}; use a share above 0, up to 1."
            )
        for name in ("max_new_tokens", "batch_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{argument(name)} is {value}; it must be at least 1.")
