"""Doctor: checks of this machine, or the bottleneck of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.errors import CheckpointError, ConfigError
from toque.reporter import SILENT, Reporter
from toque.reports.run_shares import Share
from toque.reports.verdict import (
    Ladder,
    Sign,
    Verdict,
    describe_remedy,
    judge_run,
    list_ladders,
    list_signs,
)
from toque.runs.history import METRICS
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, resolve_model

if TYPE_CHECKING:
    from toque.workflows.diagnosis.machine_checks import Checkup

_SHOWN_FINDINGS = 3
"""Number of findings with their remedies in the text. The JSON has all findings."""


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
        findings = [asdict(finding) for finding in verdict.findings]
        first = findings[0] if findings else {}
        return {
            "run": str(self.folder),
            "wall_seconds": verdict.facts.wall,
            "shares": [asdict(share) for share in verdict.shares],
            "sentence": verdict.sentence,
            "cause": first.get("cause"),
            "lever": first.get("lever"),
            "expected_gain": first.get("gain"),
            "findings": findings,
            "signs": [asdict(sign) for sign in self.signs],
            "ladders": [asdict(ladder) for ladder in self.ladders],
        }

    def __str__(self) -> str:
        """Return a table of the shares of time, and advice."""
        lines = [*self._share_lines(), "", *self._advice_lines(), ""]
        marks = {None: "-", True: "ok", False: "look"}
        lines += [
            f"{marks[sign.good]:<8}{sign.name}: {sign.value}" for sign in self.signs
        ]
        for ladder in self.ladders:
            lines += ["", f"{ladder.title}: {ladder.because}. Try in this order:"]
            lines += [f"  {n}. {step}" for n, step in enumerate(ladder.steps, start=1)]
        return "\n".join(lines)

    def _share_lines(self) -> Iterator[str]:
        """Yield the rows of the table of shares, with the total in the last row."""
        shares = self.verdict.shares
        for share in (*shares, Share("total", self.verdict.facts.wall, 1.0)):
            seconds = f"{share.seconds:,.1f} s"
            yield f"{share.name:<40}{seconds:>14}{share.share:>9.1%}"

    def _advice_lines(self) -> Iterator[str]:
        """Yield the verdict, and remedies for the most important findings."""
        findings = self.verdict.findings[:_SHOWN_FINDINGS]
        yield self.verdict.sentence
        for n, finding in enumerate(findings, start=1):
            yield f"{n}. {describe_remedy(finding)}"
        for finding in findings[1:]:  # the verdict is about the first finding
            yield f"   also: {finding.sentence}."


def doctor(
    run: Model | None = None, *, reporter: Reporter = SILENT
) -> Checkup | Diagnosis:
    """Check this machine, or find the bottleneck of a finished or training run.

    Args:
        run: The folder of a run, or None to check this machine.
        reporter: Receives the progress.

    Returns:
        `Checkup` of the machine, or `Diagnosis` of the run.

    Raises:
        ConfigError: The folder is not a run, or the run has no update yet.
        CheckpointError: The folder contains a link.
    """
    if run is None:
        # Loads torch.
        from toque.workflows.diagnosis.machine_checks import check_machine

        return check_machine(reporter=reporter)

    folder = resolve_model(run)
    if not (folder / METRICS).is_file():
        raise ConfigError(
            f"{folder} has no {METRICS}, which the diagnosis needs. Name a run that has begun, "
            "e.g. runs/cookbook. To check this machine, use `toque doctor` without a folder."
        )
    refuse_links(folder, CheckpointError)
    verdict = judge_run(folder)
    if verdict is None:
        raise ConfigError(
            f"{folder}/{METRICS} has no update yet, so there is nothing to diagnose. Wait for the "
            "first update of the training run."
        )
    facts = verdict.facts
    return Diagnosis(folder, verdict, list_ladders(folder, facts), list_signs(facts))
