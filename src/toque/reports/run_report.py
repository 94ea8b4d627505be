"""Report of a run: its events as facts, curves and tables; running, killed or done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from toque.cooking.scoring.recipe_scores import hint
from toque.data.prepare.data_report import Report
from toque.reports.curves import Points, points, rates, smoothed, thinned
from toque.reports.parts import Figure, Grid
from toque.reports.run_states import ended_in_words
from toque.reports.score_tables import score_grids, written
from toque.reports.svg_charts import Frame, Series, lines
from toque.reports.verdict import Verdict, advice
from toque.reports.written_texts import by_prompt, shown_texts
from toque.storage.json_files import decode_json
from toque.version import __version__

Event = Mapping[str, Any]
_WIDE: Final = Frame(1000.0, 330.0)
_MOST_SAMPLES: Final = 12
_MOST_ROWS: Final = 40
_NOT_SHOWN: Final = ("event", "step", "epoch", "stop_after", "train", "arithmetic")
"""Of a start event: shown elsewhere, or by the configuration."""


def run_content(
    folder: Path, events: Sequence[Event], verdict: Verdict | None = None
) -> dict[str, Any]:
    """The variables of the run's page.

    Args:
        folder: of the run; what is missing in it is left out of the page.
        events: of its metrics.jsonl, undone ones left out.
        verdict: what limits the run, once that is known.
    """
    steps = [e for e in events if e["event"] == "step"]
    scored = [e for e in events if e["event"] == "evaluation"]
    samples = list(filter(None, map(_json, _text(folder / "samples.jsonl").splitlines())))
    written = by_prompt(samples)
    evaluation = _json(_text(folder / "evaluation.json"))
    return {
        "title": folder.resolve().name,
        "sentence": _state(events),
        "facts": _facts(events, steps, scored),
        "warnings": [str(e.get("message")) for e in events if e["event"] == "warning"],
        "hint": _hint(evaluation),
        "loss": _loss(steps, scored),
        "plots": _plots(steps, scored),
        "limits": _limits(verdict) if verdict is not None else (),
        "time": _time(verdict) if verdict is not None else None,
        "evaluations": _evaluations(scored),
        "final": score_grids(evaluation),
        "samples": [shown_texts(prompt, own) for prompt, own in written[-_MOST_SAMPLES:]],
        "samples_note": f"The last {_MOST_SAMPLES} of {len(written):,} prompts in samples.jsonl."
        if len(written) > _MOST_SAMPLES
        else "",
        "data": _data(folder),
        "sessions": _sessions(events),
        "environment": _environment(events),
        "config": _text(folder / "config.yaml"),
        "made_by": f"Written by toque {__version__} from the files in {folder}.",
    }


def _hint(evaluation: Mapping[str, Any]) -> str:
    """A sentence when the texts of the final evaluation are still poor."""
    generated = evaluation.get("generated")
    score = generated.get("recipe_score") if isinstance(generated, dict) else None
    return hint(score) if isinstance(score, int | float) else ""


def _state(events: Sequence[Event]) -> str:
    at = max((e["step"] for e in events if e["event"] == "step"), default=0)
    last = next((e for e in reversed(events) if e["event"] in ("start", "end")), None)
    if last is None:
        return "No session has begun."
    if last["event"] == "start":
        return f"Running, or killed without a word: the last figures are of step {at:,}."
    return ended_in_words(last)


def _facts(
    events: Sequence[Event], steps: Sequence[Event], scored: Sequence[Event]
) -> list[tuple[str, str]]:
    start = next((e for e in reversed(events) if e["event"] == "start"), {})
    losses = [(loss, e["step"]) for e in scored if (loss := _metric(e, "loss")) is not None]
    tokens = sum(int(e.get("tokens") or 0) for e in steps)
    seconds = sum(float(e.get("seconds") or 0) for e in steps)
    asked = (start.get("train") or {}).get("stop_after")  # the other is what is left of it
    pairs = [("until", str(asked or start.get("stop_after", "-")))]
    if steps:
        pairs += [
            ("steps", f"{steps[-1]['step']:,}"),
            ("epochs", f"{steps[-1].get('epoch', 0):.2f}"),
        ]
    if losses:
        best, step = min(losses)
        pairs.append(("lowest held-out loss", f"{best:.4f} at step {step:,}"))
    if tokens and seconds:
        pairs += [("tokens", f"{tokens:,}"), ("tokens/s", f"{tokens / seconds:,.0f}")]
    if parameters := start.get("parameters"):
        total, trained = parameters.get("total", 0), parameters.get("trainable", 0)
        pairs.append(("parameters", f"{total / 1e6:,.1f} M"))
        if 0 < trained < total:  # an adapter's
            pairs.append(("trainable", f"{trained:,} ({trained / total:.2%})"))
    pairs.append(("training time", _clock(seconds)))
    return pairs


def _loss(steps: Sequence[Event], scored: Sequence[Event]) -> Figure:
    raw = points(steps, "loss")
    losses = [(float(e["step"]), _metric(e, "loss")) for e in scored]
    held_out = [x for x, _ in losses], [y for _, y in losses]
    series = [
        Series("training, each update logged", *thinned(raw), style="faint"),
        Series("training, smoothed", *thinned(smoothed(raw)), style="one"),
        Series("held out", *held_out, style="two", dots=len(losses) < 60),
    ]
    title, y_name = "Loss", "nats per target token"
    broad, narrow = (
        lines(title, series, x_name="step", y_name=y_name, frame=frame)
        for frame in (_WIDE, Frame())
    )
    return Figure("Training and held-out loss", broad, _verdict(held_out), narrow)


def _verdict(held_out: Points) -> str:
    """What the held-out losses say in a sentence: still falling, or worse since when."""
    known = [(y, x) for x, y in zip(*held_out, strict=True) if y is not None]
    if len(known) < 2:
        return ""
    best, at = min(known)
    since = [x for _, x in known if x > at]
    if not since:
        return f"Held-out loss was lowest at the last evaluation, step {at:,.0f}."
    return (
        f"Held-out loss was lowest at step {at:,.0f} ({best:.4f}); the {len(since)} "
        f"evaluation{'s' if len(since) > 1 else ''} since were higher."
    )


def _limits(verdict: Verdict) -> list[str]:
    """What limits the run and what to do about it, as sentences."""
    return [verdict.sentence, *(advice(found) for found in verdict.found[:1])]


def _time(verdict: Verdict) -> Grid:
    rows = [[share.name, f"{share.share:.1%}"] for share in verdict.shares]
    return Grid(("part", "share"), rows, frozenset({1}))


def _plots(steps: Sequence[Event], scored: Sequence[Event]) -> list[Figure]:
    def plot(title: str, y_name: str, curve: Points, *, from_zero: bool = True) -> Figure:
        one = Series(title, *thinned(curve))
        return Figure(title, lines(title, [one], x_name="step", y_name=y_name, from_zero=from_zero))

    figures = [
        plot("Learning rate", "learning rate", points(steps, "lr")),
        plot("Gradient norm", "norm before clipping", points(steps, "grad_norm")),
        plot("Speed", "tokens per second", points(steps, "tokens_per_second")),
        plot("Padding", "share of computed tokens", points(steps, "pad_fraction")),
        plot("Waiting for data", "share of the time", rates(steps, "data_wait_seconds", "seconds")),
    ]
    if any(e.get("mfu") is not None for e in steps):
        figures.append(plot("Utilisation", "share of peak arithmetic", points(steps, "mfu")))
    names = {name for e in scored for name in e.get("metrics", {})} - {"loss", "perplexity"}
    for name in sorted(names):
        curve = [float(e["step"]) for e in scored], [_metric(e, name) for e in scored]
        values = {y for y in curve[1] if y is not None}
        if len(values) > 1:  # a count of tokens is the same each time
            figures.append(plot(name.replace("_", " "), name, curve, from_zero=False))
    return figures


def _evaluations(scored: Sequence[Event]) -> Grid:
    names = list(dict.fromkeys(name for e in scored for name in e.get("metrics", {})))
    rows = [
        (f"{e['step']:,}", *(written(e.get("metrics", {}).get(name)) for name in names))
        for e in scored[-_MOST_ROWS:]
    ]
    note = f"The last {len(rows)} of {len(scored)}." if len(scored) > len(rows) else ""
    return Grid(("step", *names), rows, frozenset(range(len(names) + 1)), note)


def _data(folder: Path) -> str:
    """What the store's report says of losses, when the store is where the run's config says."""
    for line in _text(folder / "config.yaml").splitlines():
        name, _, value = line.strip().partition(": ")
        if name == "store" and line.startswith("  store"):
            report = Report.read_from(Path(value.split("  #")[0].strip("\"'")))
            return "" if report is None else " ".join(
                [f"{report.examples:,} examples from {report.read:,} records.", *report.losses()]
            )  # fmt: skip
    return ""


def _sessions(events: Sequence[Event]) -> Grid:
    rows: list[tuple[str, ...]] = []
    for event in events:
        if event["event"] == "start":
            rows.append((f"{event.get('step', 0):,}", "-", "-", "no end written"))
        elif event["event"] == "end" and rows:
            reason, seconds = str(event.get("reason")), float(event.get("seconds") or 0)
            rows[-1] = (rows[-1][0], f"{event['step']:,}", _clock(seconds), reason)
    heads = ("from step", "to step", "time", "ended")
    return Grid(heads, rows, frozenset({0, 1, 2}))


def _flat(value: object, name: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [p for key, held in value.items() for p in _flat(held, f"{name} {key}".strip())]
    return [(name, value)] if isinstance(value, int | float | str) else []


def _environment(events: Sequence[Event]) -> Grid:
    start = next((e for e in reversed(events) if e["event"] == "start"), {})
    told = {k: v for k, v in start.items() if k not in _NOT_SHOWN}
    rows = [(name.replace("_", " "), written(value)) for name, value in _flat(told)]
    return Grid(("what", "value"), rows)


def _metric(event: Event, name: str) -> float | None:
    value = event.get("metrics", {}).get(name)
    return float(value) if isinstance(value, int | float) else None


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _json(text: str) -> dict[str, Any]:
    """The object; empty where a file is missing, or a line is being written right now."""
    try:
        return decode_json(text, dict[str, Any])
    except msgspec.DecodeError:
        return {}
