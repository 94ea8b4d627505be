"""Doctor: this machine checked, or a run's bottleneck told and its lever tried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import CheckpointError, ConfigError, argument
from toque.reporter import SILENT, Reporter
from toque.reports.verdict import Ladder, Sign, Verdict, advice, ladders, signs, verdict_of
from toque.runs.history import METRICS
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.workflows.doctor.check_table import Checkup
    from toque.workflows.doctor.lever_trial import Trial


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on a run, with the advice and what was measured of it."""

    folder: Path
    verdict: Verdict
    ladders: Sequence[Ladder]
    signs: Sequence[Sign]
    trials: Sequence[Trial] = ()

    def record(self) -> dict[str, Any]:
        """The diagnosis as a JSON value."""
        verdict = self.verdict
        return {
            "run": str(self.folder),
            "wall_seconds": verdict.facts.wall,
            "shares": [asdict(share) for share in verdict.shares],
            "sentence": verdict.sentence,
            "cause": verdict.cause,
            "lever": verdict.lever,
            "expected_gain": verdict.expected_gain,
            "findings": [asdict(finding) for finding in verdict.found],
            "signs": [asdict(sign) for sign in self.signs],
            "ladders": [asdict(ladder) for ladder in self.ladders],
            "trials": [trial.record() for trial in self.trials],
        }

    def __str__(self) -> str:
        """A table and sentences for people."""
        verdict = self.verdict
        rows = [(s.name, f"{s.seconds:,.1f} s", f"{s.share:.1%}") for s in verdict.shares]
        rows.append(("all of it", f"{verdict.facts.wall:,.1f} s", "100.0%"))
        lines = [f"{name:<40}{seconds:>14}{share:>9}" for name, seconds, share in rows]
        lines += ["", verdict.sentence]
        lines += [f"{n}. {advice(f)}" for n, f in enumerate(verdict.found[:3], start=1)]
        lines += [f"   besides: {f.sentence}." for f in verdict.found[1:3]]
        lines += ["", *(f"{_word(sign.good):<8}{sign.name}: {sign.value}" for sign in self.signs)]
        for ladder in self.ladders:
            lines += ["", f"{ladder.title}: {ladder.because}. Try, in this order:"]
            lines += [f"  {n}. {step}" for n, step in enumerate(ladder.steps, start=1)]
        lines += ["", *map(str, self.trials)] if self.trials else []
        return "\n".join(lines)


def _word(good: bool | None) -> str:  # noqa: FBT001 - what is turned into a word
    return "-" if good is None else "ok" if good else "look"


def diagnose(
    run: Model,
    *,
    try_levers: bool = False,
    steps: int = 12,
    pairs: int = 2,
    reporter: Reporter = SILENT,
) -> Diagnosis:
    """Tell what limits a run: one that goes on, has ended or was killed.

    Args:
        run: its folder.
        try_levers: measure the lever on the run's data, in turn with the run as it is.
        steps: updates of each turn.
        pairs: turns of each side.
        reporter: hears of progress.

    Raises:
        ConfigError: not a run, or one without an update yet.
        CheckpointError: its folder holds a link.
    """
    folder = existing_folder(run)
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder} holds no {METRICS}, from which a run is judged. Name the folder of a run "
            "that has begun, such as runs/cookbook; `toque doctor` alone checks this machine."
        )
    if steps < 2 or pairs < 1:
        raise ConfigError(
            f"{argument('steps')} is {steps} and {argument('pairs')} is {pairs}: a trial takes at "
            "least 2 updates, of which the first is left out, and one pair of turns."
        )
    refuse_links(folder, CheckpointError)
    verdict = verdict_of(folder)
    if verdict is None:
        raise ConfigError(
            f"{folder}/{METRICS} tells of no update yet, so there is nothing to judge. Its first "
            "line comes with the first update, the next after observe.log_every."
        )
    trials: Sequence[Trial] = ()
    if try_levers:
        from toque.workflows.doctor.lever_trial import try_findings

        trials = try_findings(folder, verdict, steps=steps, pairs=pairs, reporter=reporter)
    facts = verdict.facts
    return Diagnosis(folder, verdict, ladders(folder, facts), signs(facts), trials)


def doctor(
    run: Model | None = None,
    *,
    try_levers: bool = False,
    steps: int = 12,
    pairs: int = 2,
    reporter: Reporter = SILENT,
) -> Checkup | Diagnosis:
    """Check this machine; or tell what limits a run, and try the lever.

    Args:
        run: a run's folder; None for the machine.
        try_levers: measure the lever on the run's data, in turn with the run as it is.
        steps: updates of each turn.
        pairs: turns of each side.
        reporter: hears of progress.

    Returns:
        `Checkup` of the machine, or `Diagnosis` of the run.

    Raises:
        ConfigError: not a run, one without an update yet, or a lever to try without a run.
        CheckpointError: the run's folder holds a link.
    """
    if run is not None:
        return diagnose(run, try_levers=try_levers, steps=steps, pairs=pairs, reporter=reporter)
    if try_levers:
        raise ConfigError(
            f"{argument('try_levers=True')} tries the lever of a run, and no run was named. Name "
            "its folder, such as runs/cookbook."
        )
    return checkup(reporter=reporter)


def checkup(*, reporter: Reporter = SILENT) -> Checkup:
    """Check this machine: what training needs, each thing ok, warning or failed."""
    from toque.workflows.doctor.machine_checks import check_machine

    return check_machine(reporter=reporter)
