"""Check: one update of the user's model and data, computed in every way and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from toque.errors import CheckFailed, ConfigError, argument
from toque.workflows.configure import Configured, configure


class Tolerance(NamedTuple):
    """Largest relative differences that rounding explains."""

    loss: float
    gradient: float


FLOAT32: Final = Tolerance(1e-5, 1e-4)
"""Sums in another order differ by a tenth of these."""
HALF: Final = Tolerance(1e-2, 5e-2)
"""The same in 16 bits, whose numbers have 8 (bf16) or 11 bits of precision."""


class Difference(NamedTuple):
    """Distance of an update from the reference, each as a share of the reference's."""

    loss: float
    norm: float
    """Difference of the lengths of the whole gradients."""
    element: float
    """The largest difference of any element, as a share of the largest element."""
    where: str
    """The parameter that holds that element."""

    def within(self, tolerance: Tolerance) -> bool:
        """True where all of it is; what is not a number is not."""
        gradient = tolerance.gradient
        return self.loss <= tolerance.loss and self.norm <= gradient and self.element <= gradient


@dataclass(frozen=True)
class Outcome:
    """One way of computing the update."""

    name: str
    verdict: Literal["same", "DIFFERENT", "skipped"]
    seconds: float = 0.0
    found: Difference | None = None
    reason: str = ""
    """Why it was skipped."""


@dataclass(frozen=True)
class Check:
    """The ways of computing an update, beside the reference."""

    loss: float
    examples: int
    target_tokens: int
    reference_seconds: float
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """True where nothing that was computed is different."""
        return all(outcome.verdict != "DIFFERENT" for outcome in self.outcomes)

    def raise_if_failed(self) -> None:
        """Refuse to go on with a wrong update.

        Raises:
            CheckFailed: some way of computing gives another loss or gradient.
        """
        wrong = ", ".join(f'"{o.name}"' for o in self.outcomes if o.verdict == "DIFFERENT")
        if wrong:
            raise CheckFailed(
                f"The update computed as {wrong} is not the one that transformers computes, beyond "
                "what rounding explains. Do not trust training with it: avoid that way "
                "(train.pack, train.compile, train.precision), and report this table with your "
                "versions."
            )

    def __str__(self) -> str:
        """The table for people."""
        rows, skipped = [], []
        for way in self.outcomes:
            if way.found is None:
                skipped.append(f"Skipped: {way.name}: {way.reason}.")
                continue
            numbers = "".join(f"{number:9.1e}" for number in way.found[:3])
            where = f"  worst in {way.found.where}" if way.verdict == "DIFFERENT" else ""
            rows.append(f"{way.name:44}{numbers}{way.seconds:9.1f}  {way.verdict}{where}")
        total = self.reference_seconds + sum(outcome.seconds for outcome in self.outcomes)
        verdict = "One loss and one gradient" if self.passed else "NOT one loss and one gradient"
        return "\n".join(
            [
                f"reference: {self.examples} examples with {self.target_tokens:,} target tokens,",
                "each alone through transformers in float32:",
                f"loss {self.loss:.6f} nats a token, {self.reference_seconds:.1f} s",
                "",
                f"{'the same update':44}{'loss':>9}{'norm':>9}{'element':>9}{'seconds':>9}",
                *rows,
                "",
                "Relative differences from the reference; dropout is off. Allowed in float32:",
                f"loss {FLOAT32.loss:.0e}, gradient {FLOAT32.gradient:.0e};",
                f"in 16 bits: loss {HALF.loss:.0e}, gradient {HALF.gradient:.0e}.",
                *skipped,
                f"{verdict}; {total:.1f} s.",
            ]
        )


def check(config: Configured, *, examples: int = 16) -> Check:
    """Compute one update in every way and compare each with transformers' own.

    Args:
        config: what `configure` takes; its store must be prepared.
        examples: examples in the update, from the shortest to the longest of the store.

    Returns:
        `passed` tells whether all agree; as a text it is a table.

    Raises:
        ConfigError: fewer than two examples, or a configuration that cannot be used.
        DataError: no prepared store.
    """
    if examples < 2:
        raise ConfigError(
            f"{argument('examples')} must be at least 2: rows are packed from several."
        )
    settings = configure(config)
    from toque.workflows.update_ways import compare_ways  # with torch

    return compare_ways(settings, examples)
