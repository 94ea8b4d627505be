"""Units: durations, progress, and the cursor into the data.

`epoch` counts passes over the data and may be a fraction. `tokens` are all tokens of prompts and
targets, without padding. `target_tokens` are the tokens with loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from toque.errors import ConfigError

Unit = Literal[
    "steps", "epochs", "tokens", "examples", "hours", "minutes", "seconds", "%"
]
UNITS: tuple[str, ...] = get_args(Unit)
SECONDS: Mapping[str, float] = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
"""Seconds per unit of time."""
_MAX_AMOUNT = 1e15
"""Largest amount. A larger number of seconds would overflow."""
_PATTERN = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([a-z]+|%)(\s+total)?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Cursor:
    """Position of the next row to train on: row `row` of window `window` of epoch `epoch`.

    A window is a group of consecutive examples, in the epoch's order, that are packed together.
    """

    epoch: int = 0
    window: int = 0
    row: int = 0
    stage: int = 0
    """Stage of a curriculum. Epochs count from 0 in each stage."""
    updates: int = 0
    """Number of updates in this stage, if the lengths of the stages are in steps."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run, counted over all sessions and ranks."""

    step: int = 0
    epoch: float = 0.0
    examples: int = 0
    tokens: int = 0
    target_tokens: int = 0
    seconds: float = 0.0
    """Seconds spent on updates. If the time limit applies to the entire command, also on the
    evaluations and saves between them.
    """


@dataclass(frozen=True)
class Duration:
    """An amount of training in a unit.

    >>> str(Duration.parse("3 epochs"))
    '3 epochs'
    >>> Duration.parse("200 steps").crossed(Progress(step=199), Progress(step=200))
    True
    """

    amount: float
    unit: Unit
    total: bool = False
    """True if the time limit applies to the entire command, not only to its updates."""

    @classmethod
    def parse(cls, text: str | Duration) -> Duration:
        """Parse "N unit" or "N minutes total". The unit may be in the singular.

        Raises:
            ConfigError: The text is not a duration.
        """
        if isinstance(text, Duration):
            return text
        match = _PATTERN.fullmatch(str(text))
        unit = match[2].lower() if match else ""
        if unit not in UNITS:
            unit += "s"
        if match is None or unit not in UNITS:
            raise ConfigError(
                f"{text!r} is not a duration. Write a number and a unit, one of "
                f'{", ".join(UNITS)}, e.g. "200 steps" or "10 %".'
            )
        amount = float(match[1].replace("_", ""))
        if amount > _MAX_AMOUNT:
            raise ConfigError(
                f"{text!r} is too long. Use at most {_MAX_AMOUNT:g} {unit}."
            )
        total = match[3] is not None
        if total and unit not in SECONDS:
            raise ConfigError(
                f"{text!r} is not a duration: only {', '.join(SECONDS)} can be a total, the time "
                'limit of the entire command, e.g. "10 minutes total".'
            )
        return cls(amount, unit, total)  # type: ignore[arg-type]  # checked against UNITS above

    def __str__(self) -> str:
        # Large numbers would become 1e+06 in the general format.
        number = f"{self.amount:g}" if self.amount < 1e6 else f"{self.amount:.0f}"
        suffix = " total" if self.total else ""
        return f"{number} {self.unit}{suffix}"

    def in_words(self) -> str:
        """Format the duration for a sentence.

        >>> Duration.parse("1 hours total").in_words(), Duration.parse("2 epochs").in_words()
        ('1 hour total', '2 epochs')
        """
        number, unit, *total = str(self).split()
        if self.amount == 1:
            unit = unit.removesuffix("s")
        return " ".join([number, unit, *total])

    @property
    def seconds(self) -> float | None:
        """Length in seconds. None if the unit is not a unit of time."""
        return self.amount * SECONDS[self.unit] if self.unit in SECONDS else None

    def in_minutes(self) -> Duration:
        """Convert a duration in a unit of time to minutes, so that two durations can be compared.

        >>> str(Duration.parse("90 seconds").in_minutes())
        '1.5 minutes'
        """
        if self.seconds is None or self.unit == "minutes":
            return self
        return Duration(self.seconds / SECONDS["minutes"], "minutes", self.total)

    def measure(self, progress: Progress, length: Duration | None = None) -> float:
        """Convert `progress` to this duration's unit. For "%", to per cent of the run's `length`.

        Raises:
            ConfigError: The unit is "%", and `length` is missing or also in "%".
        """
        if self.unit == "%":
            if length is None or length.unit == "%":
                raise ConfigError(
                    f'"{self}" is a percentage of a run, but the length of the run is unknown.'
                )
            return 100.0 * length.measure(progress) / length.amount
        value = {
            "steps": progress.step,
            "epochs": progress.epoch,
            "tokens": progress.tokens,
            "examples": progress.examples,
            "hours": progress.seconds / SECONDS["hours"],
            "minutes": progress.seconds / SECONDS["minutes"],
            "seconds": progress.seconds,
        }[self.unit]
        return float(value)

    def reached(self, progress: Progress) -> bool:
        """Return whether `progress` is at or past this duration."""
        return self.measure(progress) >= self.amount

    def crossed(
        self, before: Progress, after: Progress, length: Duration | None = None
    ) -> bool:
        """Return whether a multiple of this duration is in the interval (before, after]."""
        if self.amount <= 0:
            return False
        multiples_before = math.floor(self.measure(before, length) / self.amount)
        multiples_after = math.floor(self.measure(after, length) / self.amount)
        return multiples_after > multiples_before

    def fraction(self, progress: Progress) -> float:
        """Return the completed fraction of this duration, in [0, 1]."""
        if self.amount <= 0:
            return 1.0
        return min(1.0, self.measure(progress) / self.amount)
