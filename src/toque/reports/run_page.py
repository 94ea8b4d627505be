"""Page of a run for `toque report` and, section by section, for `toque watch`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from toque.cooking.recipe_scores import advice_on_score
from toque.data.prepare.data_report import Report
from toque.reporter import clock_text, millions
from toque.reports.figures import (
    figures_of,
    figures_over,
    loss_of,
    losses_over,
    machine_figures,
)
from toque.reports.page import (
    Figures,
    Folded,
    Grid,
    Page,
    PageHead,
    Passage,
    Section,
    Sentence,
    written,
)
from toque.reports.run_shares import mapping
from toque.reports.score_tables import score_grids
from toque.reports.verdict import Verdict, advice
from toque.runs.history import RunHistory, SystemRow, number
from toque.runs.run_record import CONFIG, RunRecord
from toque.runs.run_state import RunStatus, state_of

SECTIONS: Final = (
    "warnings",
    "loss",
    "texts",
    "course",
    "machine",
    "held-out",
    "scores",
    "data",
    "sessions",
    "environment",
    "configuration",
)
"""Names of the sections in their order. `live/index.html` has an element for each."""
_MAX_PROMPTS: Final = 12
_MAX_TEXTS: Final = 4
_MAX_ROWS: Final = 40
_MAX_GPUS: Final = 4
_MAX_DEPTH: Final = 8
"""Levels of a start event to show. An untrusted event may have any number."""
_SHOWN_ELSEWHERE: Final = (
    "event", "step", "epoch", "run_seconds", "stop_after", "train", "arithmetic"
)  # fmt: skip
"""Fields of a start event that other sections show."""
_MACHINE_NOTE: Final = "Measured while the run trained."


def run_page(
    run: RunRecord,
    name: str,
    *,
    verdict: Verdict | None = None,
    label: str = "Run report",
    trouble: str = "",
    over: Mapping[str, RunHistory] | None = None,
) -> Page:
    """Make the page of a run. Data without a file is left out.

    Args:
        run: A run that was just read.
        name: Title of the page.
        verdict: Bottlenecks of the run.
        label: Kind of the page.
        trouble: Reason why the run cannot be read at present.
        over: Runs to show in the plots, by default only this run.
    """
    history = run.history
    state = state_of(run)
    evaluation = run.evaluation()

    head = PageHead(
        label,
        name,
        state.sentence,
        _facts(history, state),
        state.kind,
        history.done if state.kind == "running" else None,
    )

    curves = figures_over(over) if over else figures_of(history)
    machine = machine_figures(history)
    sessions = [
        (f"{one.from_step:,}", "-", "-", "no end recorded")
        if one.to_step is None
        else (
            f"{one.from_step:,}",
            f"{one.to_step:,}",
            clock_text(one.seconds),
            one.reason,
        )
        for one in history.sessions
    ]

    fields = {k: v for k, v in history.start.items() if k not in _SHOWN_ELSEWHERE}
    environment = [
        (name.replace("_", " "), written(value)) for name, value in _flatten(fields)
    ]

    configuration: Sentence | Folded = Sentence("The run folder has no config.yaml.")
    if text := run.text(CONFIG):
        origins = "config.yaml, with the origin of each value that is not a default"
        configuration = Folded(origins, [Passage(text)], is_open=True)

    sections = (
        Section("warnings", "", _warnings(history, trouble)),
        Section(
            "loss",
            "Losses of all runs" if over else "Loss",
            [losses_over(over) if over else loss_of(history)],
        ),
        Section("texts", "What it wrote", _texts(run, evaluation)),
        Section("course", "How it ran", [*_limits(verdict), Figures(curves)]),
        Section(
            "machine",
            "The machine",
            [Sentence(_MACHINE_NOTE, "soft"), Figures(machine)] if machine else (),
        ),
        Section("held-out", "Held-out metrics", [_evaluations(history)]),
        Section("scores", "Scores", score_grids(evaluation)),
        Section("data", "Data", _data(run)),
        Section(
            "sessions",
            "Sessions",
            [Grid(("from step", "to step", "time", "ended"), sessions)],
        ),
        Section("environment", "Where it ran", [Grid(("what", "value"), environment)]),
        Section("configuration", "Configuration", [configuration]),
    )

    return Page(head, sections, f"the files in {run.place.address}")


def _facts(history: RunHistory, state: RunStatus) -> list[tuple[str, str]]:
    done, step = history.progress, history.step
    running = state.kind == "running"
    requested = mapping(history.start.get("train")).get("stop_after")

    # The length in a start event is the remaining length at the start of the session.
    pairs = [("until", str(requested or history.start.get("stop_after", "-")))]

    if done.step:
        pairs += [("step", f"{done.step:,}"), ("epochs", f"{done.epoch:.2f}")]
    if step is not None and step.loss is not None:
        pairs.append(("training loss", f"{step.loss:.4f}"))
    if history.best is not None:
        pairs.append(
            ("lowest held-out loss", "{:.4f} at step {:,}".format(*history.best))
        )
    if done.tokens and done.seconds:
        pairs.append(("tokens", f"{done.tokens:,}"))
        pairs.append(("tokens/s", f"{done.tokens / done.seconds:,.0f}"))

    if running and step is not None and step.tokens_per_second is not None:
        pairs.append(("tokens/s now", f"{step.tokens_per_second:,.0f}"))
    if running and (left := history.seconds_left) is not None:
        pairs.append(("training left, about", clock_text(left)))

    counts: Any = history.start.get("parameters") or {}
    total, trained = counts.get("total") or 0, counts.get("trainable") or 0
    if counts:
        pairs.append(("parameters", millions(total)))
    if 0 < trained < total:  # an adapter's
        pairs.append(("trainable", f"{trained:,} ({trained / total:.2%})"))

    pairs.append(("training time", clock_text(done.seconds)))
    if history.saved:
        pairs.append(("newest checkpoint", f"step {history.saved:,}"))
    return pairs + (
        _machine_facts(history.system) if running and history.system else []
    )


def _machine_facts(system: SystemRow) -> list[tuple[str, str]]:
    pairs = []
    if system.cpu_percent is not None:
        pairs.append(("processor in use", f"{system.cpu_percent:.0f} %"))
    used, total = system.memory_used_bytes, system.memory_total_bytes
    if used is not None and total:
        pairs.append(("memory in use", f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"))
    for gpu in system.gpus[:_MAX_GPUS]:
        if gpu.utilisation_percent is not None:
            power = "" if gpu.power_watts is None else f", {gpu.power_watts:.0f} W"
            pairs.append(
                (f"GPU {gpu.index}", f"{gpu.utilisation_percent:.0f} %{power}")
            )
    return pairs


def _warnings(history: RunHistory, trouble: str) -> list[Sentence]:
    warnings = [f"Step {step:,}: {message}" for step, message in history.warnings]
    for gpu in history.system.gpus if history.system else ():
        if gpu.throttled:
            reasons = ", ".join(gpu.throttled)
            warnings.append(f"The clock of GPU {gpu.index} is reduced: {reasons}.")
    if trouble:
        warnings.append(trouble)
    shown = [Sentence(text, "warn") for text in reversed(warnings)]
    if history.n_warnings > len(history.warnings):
        note = f"The last {len(history.warnings)} of {history.n_warnings:,} warnings."
        shown.append(Sentence(note, "soft"))
    return shown


def _texts(run: RunRecord, evaluation: Mapping[str, Any]) -> list[Sentence | Folded]:
    score = number(mapping(evaluation.get("generated")).get("recipe_score"))
    poor = "" if score is None else advice_on_score(score)
    parts: list[Sentence | Folded] = [Sentence(poor, "warn")] if poor else []
    prompts = list(run.texts.items())
    parts += [texts_of(prompt, samples) for prompt, samples in prompts[-_MAX_PROMPTS:]]
    if len(prompts) > _MAX_PROMPTS:
        note = f"The last {_MAX_PROMPTS} of {len(prompts):,} prompts in samples.jsonl."
        parts.append(Sentence(note, "soft"))
    return parts


def texts_of(prompt: str, samples: Sequence[Mapping[str, Any]]) -> Folded:
    """Show the texts for a prompt, the newest first, or some of many, evenly over the run."""
    gap = max(1, -(-len(samples) // _MAX_TEXTS))
    texts: list[Passage] = []
    for sample in samples[::-1][::gap]:
        metrics = mapping(sample.get("metrics"))
        scores = ", ".join(
            f"{name} {written(value)}" for name, value in metrics.items()
        )
        texts.append(
            Passage(str(sample.get("text", "")), f"step {sample.get('step')}", scores)
        )
    if samples[-1].get("reference"):
        texts.append(Passage(str(samples[-1]["reference"]), "reference"))
    steps = [sample.get("step") for sample in samples]
    tag = (
        f"steps {steps[0]} to {steps[-1]}" if len(samples) > 1 else f"step {steps[-1]}"
    )
    return Folded(" ".join(prompt.split()), texts, [tag])


def _limits(verdict: Verdict | None) -> list[Sentence | Grid]:
    if verdict is None:
        return []
    rows = [
        (one.name, clock_text(one.seconds), f"{one.share:.1%}")
        for one in verdict.shares
    ]
    return [
        Sentence(verdict.sentence),
        *(Sentence(advice(finding)) for finding in verdict.findings[:1]),
        Grid(("part", "time", "share"), rows, summary="Parts of the time"),
    ]


def _evaluations(history: RunHistory) -> Grid:
    rows = list(history.evaluations)[-_MAX_ROWS:]
    names = list(dict.fromkeys(name for row in rows for name in row.metrics))
    cells = [
        (f"{row.step:,}", *(written(row.metrics.get(name, "-")) for name in names))
        for row in rows
    ]
    count = history.n_evaluations
    note = f"The last {len(rows)} of {count:,}." if count > len(rows) else ""
    return Grid(("step", *names), cells, note)


def _data(run: RunRecord) -> list[Sentence]:
    """Show the losses in the report of the store, if the configured store exists."""
    if run.place.folder is None:
        return []
    for line in run.text(CONFIG).splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "store" and line.startswith("  store"):
            store = Path(value.split("  #")[0].strip("\"'"))
            with suppress(OSError, ValueError):  # a missing file or an invalid name
                changed = (store / "report.json").stat().st_mtime_ns
                return list(map(Sentence, _losses_of(store, changed)))
    return []


@lru_cache(maxsize=32)
def _losses_of(store: Path, _changed: int) -> tuple[str, ...]:
    """Format the counts and losses of a store. They are cached until its report changes."""
    report = Report.read_from(store)
    if report is None:
        return ()
    counts = f"{report.examples:,} examples from {report.read:,} records."
    return (" ".join([counts, *report.describe_losses()]),)


def _flatten(
    value: object, name: str = "", depth: int = _MAX_DEPTH
) -> list[tuple[str, object]]:
    """List the numbers and texts of nested dicts with their joined names."""
    if isinstance(value, dict) and depth:
        return [
            pair
            for key, inner in value.items()
            for pair in _flatten(inner, f"{name} {key}".strip(), depth - 1)
        ]
    return [(name, value)] if isinstance(value, int | float | str) else []
