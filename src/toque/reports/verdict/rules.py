"""Rules: what limits a run, by its shares, each with the lever that would give the time back.

A gain is of the loop's speed in useful tokens per second: 0.25 is a quarter faster. It is computed
from what was measured; where nothing measured says it, it is None and only a trial tells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from toque.reports.verdict.computing_rules import COMPUTING_RULES
from toque.reports.verdict.facts import mapping, number
from toque.reports.verdict.finding import AMOUNT, NOTABLE, Case, Finding, gain_of
from toque.reports.verdict.shares import (
    DATA,
    EVALUATION,
    OTHERS,
    SAVING,
    STILL,
    THROTTLED,
    UPLOADS,
    share_named,
)
from toque.training.bottlenecks import DATA_ADVICE

_AIM: Final = 0.02
"""Share that evaluating or saving may keep."""
_FEW: Final = {"max_examples": 64, "texts": 4}
"""Settings of an evaluation that is small. Guesses."""


def findings(case: Case) -> list[Finding]:
    """Everything that limits the run, what could give back most first."""
    found = [finding for rule in RULES for finding in rule(case) if finding.weight >= NOTABLE]
    return sorted(found, key=lambda finding: -finding.weight)


def _data(case: Case) -> Iterator[Finding]:
    share = case.share(DATA)
    readers = number(case.facts.setting("readers")) or 1
    yield Finding(
        "waiting for data",
        share,
        f"{share:.0%} of the time the loop waited for batches",
        lever=DATA_ADVICE if readers > 1 else "make batches in several threads",
        settings=() if readers > 1 else ("train.readers=4",),
        gain=gain_of(share),
        at_most=True,
    )


def _interval(
    case: Case, share: float, n_times: int, *, setting: str
) -> tuple[tuple[str, ...], float]:
    """An interval of at most half the run as an override, and the share it saves; or nothing."""
    found = AMOUNT.match(str(case.facts.setting(setting) or ""))
    if found is None or n_times < 2:
        return (), 0.0
    now, unit = float(found[1]), found[2]
    planned = AMOUNT.match(str(case.facts.start.get("stop_after") or ""))
    seen = float(case.facts.n_updates) if unit == "steps" else now * (n_times - 1)
    whole = float(planned[1]) if planned is not None and planned[2] == unit else seen
    half = 50.0 if unit == "%" else whole / 2
    amount = now * max(1.0, math.ceil(share / (1.0 - min(share, 0.99)) / _AIM))
    amount = min(_round_up(amount), half // 1) if unit == "steps" and now else min(amount, half)
    if not 0 < 2 * now <= amount:
        return (), 0.0
    saved = share * (1.0 - now / amount)
    return (f"train.{setting}={amount:g} {unit}",), saved


def _round_up(amount: float) -> float:
    """To one digit, so that it reads like a choice.

    >>> _round_up(34.0), _round_up(50.0), _round_up(117.0)
    (40.0, 50.0, 200.0)
    """
    unit = 10.0 ** math.floor(math.log10(amount))
    return math.ceil(amount / unit) * unit


def _evaluation(case: Case) -> Iterator[Finding]:
    share, n = case.share(EVALUATION), case.facts.n_evaluations
    interval, saved = _interval(case, share, n, setting="evaluate_every")
    enough = bool(interval) and share - saved < NOTABLE
    # What a run did not tell: null is all examples, and texts there are none.
    had = {"max_examples": None, "texts": 0} | dict(mapping(case.facts.start.get("evaluation")))
    few = [n for n, most in _FEW.items() if had[n] is None or (number(had[n]) or 0) > most]
    fewer = () if enough else tuple(f"evaluation.{name}={_FEW[name]}" for name in few)
    levers = ["less often"] * bool(interval) + ["fewer examples and texts"] * bool(fewer)
    yield Finding(
        "evaluation",
        saved if enough else share,
        f"{share:.0%} of the time went into {_times(n, 'evaluation')}",
        lever=f"evaluate {' and '.join(levers)}" if levers else None,
        settings=(*interval, *fewer),
        gain=gain_of(saved) if enough else None,
    )


def _saving(case: Case) -> Iterator[Finding]:
    facts, share = case.facts, case.share(SAVING)
    n, skipped = facts.n_saves, facts.skipped_saves
    settings, saved = _interval(case, share, n + skipped, setting="save_every")
    also = f"; {skipped} more that were due were skipped, as the disk was too slow for them"
    yield Finding(
        "saving",
        saved if settings else share,
        f"{share:.0%} of the time went into {_times(n, 'checkpoint')}{also if skipped else ''}",
        lever="save less often" if settings else "save to a faster disk",
        settings=settings,
        gain=gain_of(saved) if settings else None,
    )


def _uploads(case: Case) -> Iterator[Finding]:
    share = share_named(case.shares, UPLOADS)
    yield Finding(
        "uploads",
        share,
        f"{share:.0%} of the time the end waited for uploads to the bucket",
        lever="a nearer bucket or a faster line; one kept model less to upload",
        settings=("train.keep_best=0",) if case.facts.setting("keep_best") != 0 else (),
        gain=gain_of(share),
        at_most=True,
    )


def _others(case: Case) -> Iterator[Finding]:
    host = case.facts.host
    if host is None:
        return
    share, cores = case.share(OTHERS), case.facts.start_number("hardware", "cores")
    of = f" of {cores:.0f}" if cores else ""
    yield Finding(
        "other programs",
        share,
        f"other programs kept {host.others_cores:.1f}{of} cores busy, and {share:.0%} of the time "
        "a thread of the run waited for one",
        lever="end the other programs, or train where they do not run",
        gain=gain_of(share),
        at_most=True,
    )


def _still(case: Case) -> Iterator[Finding]:
    share, faults = case.share(STILL), case.facts.host.major_faults if case.facts.host else 0
    read = f"; {faults:,.0f} pages of memory were read back from disk meanwhile" if faults else ""
    yield Finding(
        "standing still",
        share,
        f"{share:.0%} of the time the process neither computed nor wanted to: it was stopped, or "
        f"waited for something outside it{read}",
        lever="look at what stops it: a scheduler, a debugger, a disk that does not answer",
        gain=gain_of(share),
        at_most=True,
    )


def _throttled(case: Case) -> Iterator[Finding]:
    share = case.share(THROTTLED)
    yield Finding(
        "throttling",
        share,
        f"{share:.0%} of the time a limit on processor time (of a container or a job) held "
        "everything back",
        lever="raise the limit, or use as many threads as it allows",
        gain=gain_of(share),
        at_most=True,
    )
    hot = case.facts.gpu_throttled
    if hot:
        reason, often = max(hot.items(), key=lambda each: each[1])
        yield Finding(
            "throttling",
            often * 0.5,
            f"the GPU's clock was held down for {reason} in {often:.0%} of the looks",
            lever="more cooling or a higher power limit",
        )


RULES: Final[Sequence[Callable[[Case], Iterator[Finding]]]] = (
    _data,
    _evaluation,
    _saving,
    _uploads,
    _others,
    _still,
    _throttled,
    *COMPUTING_RULES,
)


def _times(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
