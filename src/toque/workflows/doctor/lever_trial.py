"""Trial of a lever: a run trained for some updates as it is and with it, in turn, and the gain.

Each turn is `toque train` in a process of its own, on the run's own store, into a scratch folder on
the run's disk. Nothing is uploaded or announced, and the run's folder is only read. The first
update of a turn is left out: it loads and chooses kernels. Evaluations and saves count by what one
takes, as often as each side's interval has them.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from toque.config import load_config, resolved_yaml
from toque.errors import ConfigError
from toque.reporter import Reporter
from toque.reports.bottleneck_rules import AMOUNT
from toque.reports.run_shares import Facts, facts_of
from toque.reports.verdict import Finding, Verdict
from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import atomic_write
from toque.units import Duration

_QUIET: Final = (
    "observe.trackers=[]",
    "observe.webhook=null",
    "observe.callbacks=[]",
    'observe.log_every="1 step"',
    "checkpoint.upload=null",
    "evaluation.prompts=[]",
    "train.early_stopping=null",
)
"""Settings of a turn: it informs nobody."""
_MOST: Final = 2
"""Findings that are tried."""


@dataclass(frozen=True)
class Rate:
    """Useful tokens a second of one turn, and what they are made of."""

    tokens_per_second: float
    update_seconds: float
    evaluation_seconds: float
    """Seconds of one evaluation."""
    save_seconds: float
    """Seconds that the loop waited for one save."""


@dataclass(frozen=True)
class Trial:
    """A lever beside the run as it is."""

    finding: Finding
    as_it_is: Sequence[Rate]
    with_lever: Sequence[Rate]
    not_tried: str = ""
    """Why nothing was measured; empty where it was."""

    @property
    def gain(self) -> float | None:
        """Median over the pairs: 0.25 is a quarter more tokens a second."""
        pairs = zip(self.with_lever, self.as_it_is, strict=True)
        ratios = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
        return statistics.median(ratios) - 1.0 if ratios else None

    def record(self) -> dict[str, Any]:
        """Trial as JSON."""
        return {
            "cause": self.finding.cause,
            "settings": list(self.finding.settings),
            "environment": dict(self.finding.environment),
            "measured_gain": self.gain,
            "expected_gain": self.finding.gain,
            "as_it_is": [asdict(rate) for rate in self.as_it_is],
            "with_lever": [asdict(rate) for rate in self.with_lever],
            "not_tried": self.not_tried,
        }

    def __str__(self) -> str:
        """A line for people."""
        variables = [f"{name}={value}" for name, value in self.finding.environment.items()]
        given = " ".join([*variables, *self.finding.settings]) or str(self.finding.lever)
        if self.gain is None:
            return f"not tried: {given}. {self.not_tried}"
        before, after = (
            statistics.median(rate.tokens_per_second for rate in side)
            for side in (self.as_it_is, self.with_lever)
        )
        return (
            f"tried: {given}: {self.gain:+.0%} tokens a second ({before:,.0f} as it is, "
            f"{after:,.0f} with it, {len(self.as_it_is)} turns each)"
        )


def try_findings(
    folder: Path, verdict: Verdict, *, steps: int, pairs: int, reporter: Reporter
) -> list[Trial]:
    """Try the first findings that are a matter of settings.

    Args:
        folder: of the run.
        verdict: on it.
        steps: updates of each turn.
        pairs: turns of each side.
        reporter: hears of progress.

    Raises:
        ConfigError: the run's configuration cannot be used, or a turn failed.
    """
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory(prefix=".toque-trial-", dir=folder.parent) as scratch:
        turns = _Turns(folder, Path(scratch), verdict.facts, steps, reporter)
        for number, finding in enumerate(verdict.found[:_MOST]):
            if finding.cause == "uploads":
                trials.append(Trial(finding, [], [], "The scratch folder uploads nothing."))
            elif not (finding.settings or finding.environment):
                trials.append(Trial(finding, [], [], "It is no setting of a run."))
            else:
                settings, environment = finding.settings, finding.environment
                both = [
                    (
                        turns.rate(f"{number}-{turn}-as-it-is", [], {}),
                        turns.rate(f"{number}-{turn}-lever", settings, environment),
                    )
                    for turn in range(pairs)
                ]
                trials.append(Trial(finding, [a for a, _ in both], [b for _, b in both]))
    return trials


@dataclass(frozen=True)
class _Turns:
    folder: Path
    scratch: Path
    facts: Facts
    steps: int
    reporter: Reporter

    def rate(self, name: str, settings: Sequence[str], environment: Mapping[str, str]) -> Rate:
        """Train for some updates, and measure."""
        run, config = self.scratch / name, self.scratch / f"{name}.yaml"
        own, facts = str(self.folder / "config.yaml"), self.facts
        overrides = [*_QUIET, f"run_dir={run}", *settings]
        asked = load_config(own, overrides).config
        train, evaluation = asked.train, asked.evaluation
        saves = facts.n_saves + facts.skipped_saves
        every = updates_of(train.evaluate_every, facts, "evaluate_every", facts.n_evaluations)
        save_every = updates_of(train.save_every, facts, "save_every", saves)
        short = [
            # At its end a turn writes no more texts than at each evaluation.
            f"evaluation.generate={min(evaluation.generate, evaluation.texts)}",
            f'train.stop_after="{self.steps} steps"',
            f'train.evaluate_every="{max(1, round(every))} steps"',
            f'train.save_every="{max(1, round(save_every))} steps"',
        ]
        resolved = load_config(own, [*overrides, *short])
        atomic_write(config, resolved_yaml(resolved).encode())
        with self.reporter.working(f"training {self.steps} updates: {name}"):
            self._train(config, environment)
        return rate_of(read_metrics(run / METRICS), evaluate_every=every, save_every=save_every)

    def _train(self, config: Path, environment: Mapping[str, str]) -> None:
        # As many threads as the run had, which may have begun in another environment.
        threads = self.facts.start_number("hardware", "threads")
        own = {"OMP_NUM_THREADS": f"{threads:.0f}"} if threads else {}
        done = subprocess.run(  # noqa: S603 - our own command
            [sys.executable, "-m", "toque", "train", str(config), "--no-prepare"],
            env={**os.environ, **own, **environment},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode < 0:
            raise ConfigError(
                f"A trial of {self.folder} was killed by {signal.Signals(-done.returncode).name}. "
                "The run itself is untouched. SIGKILL mostly means that the machine's memory ran "
                "out: end other programs."
            )
        if done.returncode:
            said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise ConfigError(
                f"A trial of {self.folder} ended with an error: {said[0]} The run itself is "
                "untouched. Its store must be where data.store says; mend that and try again."
            )


def updates_of(every: Duration, facts: Facts, setting: str, n_times: int) -> float:
    """An interval in updates: as set, or by how often the run's own came."""
    if every.unit == "steps":
        return every.amount
    own = AMOUNT.match(str(facts.setting(setting) or ""))
    longer = every.amount / float(own[1]) if own is not None and own[2] == every.unit else 1.0
    return longer * facts.n_updates / max(1, n_times)


def rate_of(
    events: Sequence[Mapping[str, Any]], *, evaluate_every: float, save_every: float
) -> Rate:
    """The rate of a turn from its events.

    Args:
        events: of its metrics.jsonl.
        evaluate_every: updates between evaluations in the run that is tried.
        save_every: updates between checkpoints.

    Raises:
        ConfigError: it has fewer than two updates.
    """
    steps = [event for event in events if event.get("event") == "step"]
    whole, later = facts_of(events), facts_of(steps[1:])
    if whole is None or later is None:
        raise ConfigError("A trial had fewer than two updates: the run's data is too little.")
    n = len(steps) - 1
    update = (later.wall - later.part("starting", "evaluation", "texts", "saving")) / n
    evaluation = whole.part("evaluation", "texts") / max(1, whole.n_evaluations)
    save = whole.part("saving") / max(1, whole.n_saves + whole.skipped_saves)
    seconds = update + evaluation / evaluate_every + save / save_every
    return Rate(later.tokens / n / seconds, update, evaluation, save)
