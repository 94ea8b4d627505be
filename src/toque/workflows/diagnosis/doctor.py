"""Doctor: this machine checked, or what limits a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.reports.verdict import Ladder, Sign, Verdict, advice, ladders, signs, verdict_of
from toque.runs.history import METRICS
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.workflows.diagnosis.machine_checks import Checkup


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on a run, with the advice and what was measured of it."""

    folder: Path
    verdict: Verdict
    ladders: Sequence[Ladder]
    signs: Sequence[Sign]

    def record(self) -> dict[str, Any]:
        """The diagnosis as a JSON value."""
        verdict = self.verdict
        first = verdict.findings[0] if verdict.findings else None
        return {
            "run": str(self.folder),
            "wall_seconds": verdict.facts.wall,
            "shares": [asdict(share) for share in verdict.shares],
            "sentence": verdict.sentence,
            "cause": first and first.cause,
            "lever": first and first.lever,
            "expected_gain": first and first.gain,
            "findings": [asdict(finding) for finding in verdict.findings],
            "signs": [asdict(sign) for sign in self.signs],
            "ladders": [asdict(ladder) for ladder in self.ladders],
        }

    def __str__(self) -> str:
        """A table and sentences for people."""
        verdict = self.verdict
        rows = [(s.name, f"{s.seconds:,.1f} s", f"{s.share:.1%}") for s in verdict.shares]
        rows.append(("all of it", f"{verdict.facts.wall:,.1f} s", "100.0%"))
        lines = [f"{name:<40}{seconds:>14}{share:>9}" for name, seconds, share in rows]
        lines += ["", verdict.sentence]
        lines += [f"{n}. {advice(f)}" for n, f in enumerate(verdict.findings[:3], start=1)]
        lines += [f"   besides: {f.sentence}." for f in verdict.findings[1:3]]
        words = {None: "-", True: "ok", False: "look"}
        lines += ["", *(f"{words[s.good]:<8}{s.name}: {s.value}" for s in self.signs)]
        for ladder in self.ladders:
            lines += ["", f"{ladder.title}: {ladder.because}. Try, in this order:"]
            lines += [f"  {n}. {step}" for n, step in enumerate(ladder.steps, start=1)]
        return "\n".join(lines)


def doctor(run: Model | None = None, *, reporter: Reporter = SILENT) -> Checkup | Diagnosis:
    """Check this machine; or say what limits a run that continues, has ended or was killed.

    Args:
        run: a run's folder; None for the machine.
        reporter: hears of progress.

    Returns:
        `Checkup` of the machine, or `Diagnosis` of the run.

    Raises:
        ConfigError: not a run, or one without an update yet.
        CheckpointError: the run's folder holds a link.
    """
    if run is None:
        from toque.workflows.diagnosis.machine_checks import check_machine  # loads torch

        return check_machine(reporter=reporter)
    folder = existing_folder(run)
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder} holds no {METRICS}, from which a run is judged. Name the folder of a run "
            "that has begun, such as runs/cookbook; `toque doctor` alone checks this machine."
        )
    refuse_links(folder, CheckpointError)
    verdict = verdict_of(folder)
    if verdict is None:
        raise ConfigError(
            f"{folder}/{METRICS} has no update yet, so there is nothing to judge. Its first line "
            "comes with the first update, the next after observe.log_every."
        )
    return Diagnosis(folder, verdict, ladders(folder, verdict.facts), signs(verdict.facts))
