"""Verdict on a run: what its wall time went into, what limits it, and the lever to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from toque.reports.verdict.facts import Facts, facts_of
from toque.reports.verdict.finding import Case, Finding
from toque.reports.verdict.rules import findings
from toque.reports.verdict.shares import PRODUCTS, Share, share_named, shares_of
from toque.runs.history import METRICS, read_metrics


@dataclass(frozen=True)
class Verdict:
    """What limits a run."""

    shares: tuple[Share, ...]
    """Of the wall time, the largest first; they add up to all of it."""
    sentence: str
    lever: str | None
    """What to do, in words; None where nothing stands out."""
    expected_gain: float | None
    """Of the loop's speed: 0.25 is a quarter faster. None where only a trial tells."""
    found: tuple[Finding, ...]
    """All that limits it, what could give back most first."""
    facts: Facts

    @property
    def cause(self) -> str | None:
        """What limits the run most, in a word or two."""
        return self.found[0].cause if self.found else None

    def __str__(self) -> str:
        """One or two lines for people."""
        return self.sentence if not self.found else f"{self.sentence}\n{advice(self.found[0])}"


def verdict_of(folder: Path, *, measured: Mapping[str, float] | None = None) -> Verdict | None:
    """The verdict on a run that goes on, has ended or was killed; None before its first update.

    Args:
        folder: of the run.
        measured: shares of computing by name, as a profiler measured them.
    """
    try:
        events = read_metrics(folder / METRICS)
    except OSError:
        return None
    facts = facts_of(events)
    if facts is None:
        return None
    shares = shares_of(facts, measured)
    found = tuple(findings(Case(facts, shares)))
    if not found:
        return Verdict(shares, _nothing(facts, shares), None, None, found, facts)
    first = found[0]
    sentence = f"What limits this run: {first.cause}. {_capital(first.sentence)}."
    return Verdict(shares, sentence, first.lever, first.gain, found, facts)


def advice(finding: Finding) -> str:
    """The lever of a finding as a line, with what it is expected to give."""
    if finding.lever is None:
        return "There is no lever for it here."
    variables = [f"{name}={value}" for name, value in finding.environment.items()]
    given = " ".join([*variables, *map(_quoted, finding.settings)])
    if finding.gain is None:
        gain = "what it gives only a trial tells"
    elif finding.gain < 0.005:
        gain = "little to gain"
    else:
        bound = "at most " if finding.at_most else ""
        gain = f"expected: {bound}{finding.gain:.0%} more tokens a second"
    lever = _capital(finding.lever)
    return f"{lever}: {given} ({gain})." if given else f"{lever} ({gain})."


def _nothing(facts: Facts, shares: tuple[Share, ...]) -> str:
    largest = shares[0]
    rate = ""
    if facts.utilisation is not None and share_named(shares, PRODUCTS) > 0.0:
        rate = f", at {facts.utilisation:.0%} of the machine's rate"
    return (
        f"Nothing holds this run up: most of its time ({largest.share:.0%}) went into "
        f"{largest.name}{rate}."
    )


def _quoted(setting: str) -> str:
    name, _, value = setting.partition("=")
    return f'{name}="{value}"' if " " in value else setting


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
