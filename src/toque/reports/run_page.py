"""Page of a run for `toque report` and, section by section, for `toque watch`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from toque.cooking.recipe_scores import advice_on_score
from toque.data.prepare.data_report import Report
from toque.reporter import clock_text, millions
from toque.reports.figures import (
    plot_all_learning,
    plot_curves,
    plot_learning,
    plot_machine,
    plot_run,
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
    format_value,
)
from toque.reports.run_shares import dict_or_empty, nested_number
from toque.reports.score_tables import make_score_grids, make_source_grids
from toque.reports.verdict import Verdict, describe_remedy
from toque.runs.history import RunHistory, SystemRow
from toque.runs.metric_names import ACCURACY, REWARD, metric_named
from toque.runs.run_record import CONFIG, RunRecord
from toque.runs.run_state import RunStatus, state_of

SECTIONS: Final = (
    "warnings",
    "texts",
    "loss",
    "course",
    "machine",
    "held-out",
    "scores",
    "data",
    "sessions",
    "environment",
    "configuration",
)
"""Names of the sections, in order. `runs.html` has an element for each section."""
_MAX_PROMPTS: Final = 12
_MAX_TEXTS: Final = 4
_MAX_ROWS: Final = 40
_MAX_GPUS: Final = 4
_MAX_DEPTH: Final = 8
"""Maximum nesting of a displayed start event. An untrusted event may have any nesting."""
_SHOWN_ELSEWHERE: Final = (
    "event", "step", "epoch", "run_seconds", "stop_after", "train", "arithmetic"
)  # fmt: skip
"""Fields of a start event that appear in other sections."""
_MACHINE_NOTE: Final = "Measured while the run trained."


def build_run_page(
    run: RunRecord,
    name: str,
    *,
    verdict: Verdict | None = None,
    label: str = "Run report",
    problem: str = "",
    overlaid_runs: Mapping[str, RunHistory] | None = None,
) -> Page:
    """Build the page of a run. Data without a file is left out.

    Args:
        run: A run that was just read.
        name: Title of the page.
        verdict: Bottlenecks of the run.
        label: Kind of the page.
        problem: Reason why the run cannot be read at the moment.
        overlaid_runs: Runs to show in the plots, by default only this run.
    """
    history = run.history
    state = state_of(run)
    evaluation = run.evaluation()
    head = PageHead(
        label,
        name,
        f"{state.sentence} {_describe_reading(history)}".strip(),
        _list_facts(history, state),
        state.kind,
        history.done if state.kind == "running" else None,
    )

    if overlaid_runs:
        measures = {run.measure for run in overlaid_runs.values()}
        loss_heading = "Losses of all runs"
        if REWARD in measures:
            loss_heading = "Rewards and losses of all runs"
        losses = plot_all_learning(overlaid_runs)
        curves = plot_curves(overlaid_runs)
    else:
        loss_heading = "Reward" if history.measure == REWARD else "Loss"
        losses = [plot_learning(history)]
        curves = plot_run(history)
    sections = (
        Section("warnings", "", _list_warnings(history, problem)),
        Section("texts", "Generated texts", _show_texts(run, evaluation)),
        Section("loss", loss_heading, [*losses, *make_source_grids(evaluation)]),
        Section("course", "How it ran", [*_show_bottlenecks(verdict), Figures(curves)]),
        Section("machine", "The machine", _show_machine(history)),
        Section("held-out", "Held-out metrics", [_list_evaluations(history)]),
        Section("scores", "Scores", make_score_grids(evaluation)),
        Section("data", "Data", _show_data_losses(run)),
        Section("sessions", "Sessions", [_list_sessions(history)]),
        Section("environment", "Where it ran", [_list_environment(history)]),
        Section("configuration", "Configuration", [_show_configuration(run)]),
    )
    return Page(head, sections, f"the files in {run.place.address}")


def _show_machine(history: RunHistory) -> list[Sentence | Figures]:
    figures = plot_machine(history)
    if not figures:
        return []
    return [Sentence(_MACHINE_NOTE, "soft"), Figures(figures)]


def _list_sessions(history: RunHistory) -> Grid:
    rows = []
    for session in history.sessions:
        start = f"{session.from_step:,}"
        if session.to_step is None:
            rows.append((start, "-", "-", "no end recorded"))
        else:
            end = f"{session.to_step:,}"
            rows.append((start, end, clock_text(session.seconds), session.reason))
    return Grid(("from step", "to step", "time", "ended"), rows)


def _list_environment(history: RunHistory) -> Grid:
    fields = {
        name: value
        for name, value in history.start.items()
        if name not in _SHOWN_ELSEWHERE
    }
    rows = [
        (name.replace("_", " "), format_value(value))
        for name, value in _flatten(fields)
    ]
    return Grid(("what", "value"), rows, summary="Machine, versions and process")


def _show_configuration(run: RunRecord) -> Sentence | Folded:
    text = run.text(CONFIG)
    if not text:
        return Sentence("There is no config.yaml yet.")
    heading = "config.yaml, with the origin of each value that is not a default"
    return Folded(heading, [Passage(text)])


def _describe_reading(history: RunHistory) -> str:
    """Describe how much a run has read so far, in one sentence."""
    done = history.progress
    if not done.step or not done.seconds:
        return ""
    amount = f"{done.epoch:.1f} times"
    if done.epoch < 1.0:
        amount = f"{done.epoch:.0%} of"
    return f"It has read {amount} its texts in {clock_text(done.seconds)}."


def _list_facts(history: RunHistory, state: RunStatus) -> list[tuple[str, str]]:
    """List the facts below the title: length, progress, losses and speed."""
    done = history.progress
    step = history.step
    requested = dict_or_empty(history.start.get("train")).get("stop_after")
    # The length in a start event is the remaining length at the start of the session.
    facts = [("until", str(requested or history.start.get("stop_after", "-")))]
    is_running = state.kind == "running"
    if is_running and (left := history.seconds_left) is not None:
        facts.insert(0, ("training left, about", clock_text(left)))

    if done.step:
        facts += [("step", f"{done.step:,}"), ("epochs", f"{done.epoch:.2f}")]
    facts += _list_learning(history)
    if done.tokens and done.seconds:
        facts.append(("tokens", f"{done.tokens:,}"))
        facts.append(("tokens/s", f"{done.tokens / done.seconds:,.0f}"))

    if is_running and step is not None and step.tokens_per_second is not None:
        facts.append(("tokens/s now", f"{step.tokens_per_second:,.0f}"))
    facts += _list_parameters(history)
    facts.append(("training time", clock_text(done.seconds)))
    if history.saved:
        facts.append(("newest checkpoint", f"step {history.saved:,}"))
    if is_running and history.system:
        facts += _list_machine_use(history.system)
    return facts


def _list_learning(history: RunHistory) -> list[tuple[str, str]]:
    """List the reward, or the losses and the accuracy of held-out pairs."""
    facts = []
    step = history.step
    title = metric_named(history.measure).title
    if step is not None and step.value is not None:
        name = title if history.measure == REWARD else f"training {title}"
        facts.append((name, f"{step.value:.4f}"))
    # A run that learns from rewards moves away from the reference texts.
    if history.best is not None and history.measure != REWARD:
        best = "{:.4f} at step {:,}".format(*history.best)
        facts.append((f"lowest held-out {title}", best))
    if history.evaluations:
        accuracy = history.evaluations[-1].metrics.get(ACCURACY)
        if accuracy is not None:
            facts.append(
                (f"held-out {metric_named(ACCURACY).title}", f"{accuracy:.1%}")
            )
    return facts


def _list_parameters(history: RunHistory) -> list[tuple[str, str]]:
    counts: Any = history.start.get("parameters") or {}
    if not counts:
        return []
    total = counts.get("total") or 0
    trainable = counts.get("trainable") or 0
    facts = [("parameters", millions(total))]
    if 0 < trainable < total:  # only an adapter is trained
        facts.append(("trainable", f"{trainable:,} ({trainable / total:.2%})"))
    return facts


def _list_machine_use(system: SystemRow) -> list[tuple[str, str]]:
    facts = []
    if system.cpu_percent is not None:
        facts.append(("processor in use", f"{system.cpu_percent:.0f} %"))
    used, total = system.memory_used_bytes, system.memory_total_bytes
    if used is not None and total:
        facts.append(("memory in use", f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"))
    for gpu in system.gpus[:_MAX_GPUS]:
        if gpu.utilisation_percent is not None:
            power = "" if gpu.power_watts is None else f", {gpu.power_watts:.0f} W"
            use = f"{gpu.utilisation_percent:.0f} %{power}"
            facts.append((f"GPU {gpu.index}", use))
    return facts


def _list_warnings(history: RunHistory, problem: str) -> list[Sentence]:
    """List the warnings, the newest first."""
    warnings = [f"Step {step:,}: {message}" for step, message in history.warnings]
    for gpu in history.system.gpus if history.system else ():
        if gpu.throttled:
            reasons = ", ".join(gpu.throttled)
            warnings.append(f"The clock of GPU {gpu.index} is reduced: {reasons}.")
    if problem:
        warnings.append(problem)
    shown = [Sentence(text, "warn") for text in reversed(warnings)]
    if history.n_warnings > len(history.warnings):
        note = f"The last {len(history.warnings)} of {history.n_warnings:,} warnings."
        shown.append(Sentence(note, "soft"))
    return shown


def _show_texts(
    run: RunRecord, evaluation: Mapping[str, Any]
) -> list[Sentence | Folded]:
    """Show the newest prompts with their texts, below advice if the texts are poor."""
    parts: list[Sentence | Folded] = []
    score = nested_number(evaluation, "generated", "recipe_score")
    advice = "" if score is None else advice_on_score(score)
    if advice:
        parts.append(Sentence(advice, "warn"))
    prompts = list(run.texts.items())
    parts += [
        _fold_texts(prompt, samples, is_open=number == 0)
        for number, (prompt, samples) in enumerate(prompts[-_MAX_PROMPTS:])
    ]
    if len(prompts) > _MAX_PROMPTS:
        note = f"The last {_MAX_PROMPTS} of {len(prompts):,} prompts in samples.jsonl."
        parts.append(Sentence(note, "soft"))
    return parts


def _fold_texts(
    prompt: str, samples: Sequence[Mapping[str, Any]], *, is_open: bool
) -> Folded:
    """Show the texts for a prompt, the newest first. Select from many texts at even intervals."""
    distance = max(1, math.ceil(len(samples) / _MAX_TEXTS))
    texts = []
    for sample in samples[::-1][::distance]:
        metrics = dict_or_empty(sample.get("metrics"))
        scores = ", ".join(
            f"{name} {format_value(value)}" for name, value in metrics.items()
        )
        text = str(sample.get("text", ""))
        texts.append(Passage(text, f"step {sample.get('step')}", scores))

    newest = samples[-1]
    if newest.get("reference"):
        texts.append(Passage(str(newest["reference"]), "reference"))
    first_step = samples[0].get("step")
    last_step = newest.get("step")
    tag = f"step {last_step}"
    if first_step != last_step:
        tag = f"steps {first_step} to {last_step}"
    return Folded(" ".join(prompt.split()), texts, [tag], is_open=is_open)


def _show_bottlenecks(verdict: Verdict | None) -> list[Sentence | Grid]:
    if verdict is None:
        return []
    rows = [
        (share.name, clock_text(share.seconds), f"{share.share:.1%}")
        for share in verdict.shares
    ]
    return [
        Sentence(verdict.sentence),
        *(Sentence(describe_remedy(finding)) for finding in verdict.findings[:1]),
        Grid(("part", "time", "share"), rows, summary="Parts of the time"),
    ]


def _list_evaluations(history: RunHistory) -> Grid:
    evaluations = list(history.evaluations)[-_MAX_ROWS:]
    names = list(dict.fromkeys(name for row in evaluations for name in row.metrics))
    rows = []
    for evaluation in evaluations:
        values = [evaluation.metrics.get(name, "-") for name in names]
        rows.append((f"{evaluation.step:,}", *map(format_value, values)))
    count = history.n_evaluations
    note = f"The last {len(rows)} of {count:,}." if count > len(rows) else ""
    return Grid(("step", *names), rows, note)


def _show_data_losses(run: RunRecord) -> list[Sentence]:
    """Show the losses in the report of the store, if the configured store exists."""
    if run.place.folder is None:
        return []  # a run in a bucket
    store = _configured_store(run.text(CONFIG))
    if store is None:
        return []
    with suppress(OSError, ValueError):  # a missing file or an invalid name
        changed = (store / "report.json").stat().st_mtime_ns
        return list(map(Sentence, _describe_losses(store, changed)))
    return []


def _configured_store(config: str) -> Path | None:
    """Find data.store in a dumped configuration, without parsing an untrusted YAML file."""
    for line in config.splitlines():
        # A dumped section is indented by two spaces.
        if line.startswith("  store: "):
            value, _, _ = line.removeprefix("  store: ").partition("  #")
            return Path(value.strip().strip("\"'"))
    return None


@lru_cache(maxsize=32)
def _describe_losses(store: Path, _changed: int) -> tuple[str, ...]:
    """Format the counts and losses of a store. They are cached until its report changes."""
    report = Report.read_from(store)
    if report is None:
        return ()
    counts = f"{report.examples:,} examples from {report.read:,} records."
    return (" ".join([counts, *report.describe_losses()]),)


def _flatten(
    value: object, name: str = "", depth: int = _MAX_DEPTH
) -> list[tuple[str, object]]:
    """List the numbers and texts in nested dicts with their joined names."""
    if isinstance(value, dict) and depth:
        pairs = []
        for key, inner in value.items():
            pairs += _flatten(inner, f"{name} {key}".strip(), depth - 1)
        return pairs
    return [(name, value)] if isinstance(value, int | float | str) else []
