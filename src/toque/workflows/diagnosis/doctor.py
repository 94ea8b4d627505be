"""Doctor: checks of this machine, or the bottleneck of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.reports.verdict import (
    Ladder,
    Sign,
    Verdict,
    advice,
    ladders,
    signs,
    verdict_of,
)
from toque.runs.history import METRICS
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, existing_folder

if TYPE_CHECKING:
    from toque.workflows.diagnosis.machine_checks import Checkup


@dataclass(frozen=True)
class Diagnosis:
    """Verdict on a run, with measurements and advice."""

    folder: Path
    verdict: Verdict
    ladders: Sequence[Ladder]
    signs: Sequence[Sign]

    def record(self) -> dict[str, Any]:
        """Return the diagnosis as JSON."""
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
        """Return a table of shares, and advice."""
        verdict = self.verdict
        rows = [
            (s.name, f"{s.seconds:,.1f} s", f"{s.share:.1%}") for s in verdict.shares
        ]
        rows.append(("total", f"{verdict.facts.wall:,.1f} s", "100.0%"))
        lines = [f"{name:<40}{seconds:>14}{share:>9}" for name, seconds, share in rows]

        findings = verdict.findings[:3]
        lines += ["", verdict.sentence]
        lines += [
            f"{n}. {advice(finding)}" for n, finding in enumerate(findings, start=1)
        ]
        lines += [f"   also: {finding.sentence}." for finding in findings[1:]]

        marks = {None: "-", True: "ok", False: "look"}
        lines += [
            "",
            *(f"{marks[sign.good]:<8}{sign.name}: {sign.value}" for sign in self.signs),
        ]
        for ladder in self.ladders:
            lines += ["", f"{ladder.title}: {ladder.because}. Try in this order:"]
            lines += [f"  {n}. {step}" for n, step in enumerate(ladder.steps, start=1)]
        return "\n".join(lines)


def doctor(
    run: Model | None = None, *, reporter: Reporter = SILENT
) -> Checkup | Diagnosis:
    """Check this machine, or find the bottleneck of a run, which may be training.

    Args:
        run: The folder of a run. None: this machine.
        reporter: Receives the progress.

    Returns:
        `Checkup` of the machine, or `Diagnosis` of the run.

    Raises:
        ConfigError: The folder is not a run, or the run has no update yet.
        CheckpointError: The folder contains a link.
    """
    if run is None:
        # Loads torch.
        from toque.workflows.diagnosis.machine_checks import (
            check_machine,
        )

        return check_machine(reporter=reporter)
    folder = existing_folder(run)
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder} has no {METRICS}, which the diagnosis needs. Name a run that has begun, "
            "e.g. runs/cookbook. To check this machine, use `toque doctor` without a run."
        )
    refuse_links(folder, CheckpointError)
    verdict = verdict_of(folder)
    if verdict is None:
        raise ConfigError(
            f"{folder}/{METRICS} has no update yet, so there is nothing to diagnose. Training logs "
            "the first update, and then one per observe.log_every."
        )
    return Diagnosis(
        folder, verdict, ladders(folder, verdict.facts), signs(verdict.facts)
    )
