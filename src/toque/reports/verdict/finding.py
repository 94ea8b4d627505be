"""Finding: something that limits a run, with the lever that would give the time back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.reports.verdict.facts import Facts
from toque.reports.verdict.shares import (
    COMPILING,
    COMPUTING,
    FINISHING,
    PADDING,
    PRODUCTS,
    PROFILING,
    STARTING,
    UPLOADS,
    Share,
    share_named,
)

NOTABLE: Final = 0.05
"""Share from which something is worth a word."""
AMOUNT = re.compile(r"([0-9.]{1,20}) ?([a-z%]{1,12})\Z")
"""A length as settings have it, number and unit."""


@dataclass(frozen=True)
class Finding:
    """Something that limits the run."""

    cause: str
    """In a word or two, the name of a share or a setting."""
    weight: float
    """What it could give back at most, as a share of the loop's time; findings are ranked by it."""
    sentence: str
    lever: str | None = None
    """What to do, in words."""
    settings: tuple[str, ...] = ()
    """The lever as overrides, `train.pack=true`; empty where no setting is one."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """The lever as variables of the environment."""
    gain: float | None = None
    at_most: bool = False
    """Whether `gain` is a bound."""


@dataclass(frozen=True)
class Case:
    """What a rule looks at."""

    facts: Facts
    shares: tuple[Share, ...]

    def share(self, *names: str) -> float:
        """Of the loop's time: what is done once, before or after it, does not count."""
        return share_named(self.shares, *names) / self.loop

    @property
    def loop(self) -> float:
        """The loop's share of the wall time."""
        once = share_named(self.shares, STARTING, COMPILING, PROFILING, FINISHING, UPLOADS)
        return max(1e-9, 1.0 - once)

    @property
    def computing(self) -> float:
        """Share of forward and backward."""
        return self.share(COMPUTING, PRODUCTS, PADDING)


def gain_of(saved: float) -> float:
    """The gain in speed when a share of the time is saved.

    >>> gain_of(0.2)
    0.25
    """
    return 1.0 / (1.0 - min(saved, 0.99)) - 1.0
