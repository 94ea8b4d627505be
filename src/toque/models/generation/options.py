"""Generation options, as one frozen value for command line, Python, server and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

from toque.errors import ConfigError, argument

Precision = Literal["auto", "bf16", "int8", "float32"]


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


_SAMPLING: Final = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


def check_sampling(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return options that are given by name.

    Raises:
        ConfigError: A name is unknown.
    """
    for name in options:
        if name not in _SAMPLING:
            raise ConfigError(
                f"The option {name!r} of sampling does not exist. Use {', '.join(_SAMPLING)}."
            )
    return options


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Options for generating texts.

    The order is: logit_bias, the penalties, temperature, min_p, top_k, top_p.
    """

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
    min_p: float = 0.0
    """Sample only from tokens with at least this fraction of the highest probability (Nguyen et al.
    2024). 0 for all tokens."""
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative logits, of each token in the answer, and
    in the prompt of a decoder-only model (Keskar et al. 2019). Above 1, repetition is less likely.
    """
    presence_penalty: float = 0.0
    """Number that is subtracted from the logit of each token in the answer."""
    frequency_penalty: float = 0.0
    """Number that is subtracted from the logit of a token for each time it is in the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Number that is added to the logit of each of these tokens."""
    no_repeat_ngram_size: int | None = None
    """Length in tokens of the n-grams that an answer may not repeat; None or 0 for no limit. Unlike
    transformers' option of this name, the answer may repeat n-grams of the prompt."""
    seed: int = 0
    """Seed of the random numbers, which also depend on the prompt's index and the position."""
    precision: Precision = "float32"
    """Precision of matmuls and KV cache; auto is bf16 if the hardware supports it, else float32.
    int8 is auto, but while a CPU generates one text, weights and inputs of its matmuls are rounded
    to 8 bits (`onnx/single_row.py`).

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

    @property
    def changes_logits(self) -> bool:
        """True if a penalty or a bias changes logits."""
        has_penalty = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return has_penalty or self.repetition_penalty != 1.0 or bool(self.logit_bias)

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
        if not 0.0 <= self.min_p <= 1.0:
            raise ConfigError(
                f"{argument('min_p')} must be from 0 to 1, not {self.min_p:g}."
            )
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"{argument('repetition_penalty')} must be above 0, not "
                f"{self.repetition_penalty:g}. 1 has no effect."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(penalty := getattr(self, name)):
                raise ConfigError(
                    f"{argument(name)} must be a finite number, not {penalty:g}."
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
        refuse_non_numbers(
            Real,
            temperature=self.temperature,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )
        for token, bias in self.logit_bias.items():
            refuse_non_numbers(logit_bias=token)
            refuse_non_numbers(Real, logit_bias=bias)
            if token < 0 or not math.isfinite(bias):
                raise ConfigError(
                    f"logit_bias has {bias:g} for the token {token}. Use ids from 0 and finite "
                    "numbers."
                )
        refuse_non_numbers(
            max_new_tokens=self.max_new_tokens,
            top_k=self.top_k,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=self.seed,
            batch_rows=self.batch_rows,
        )
