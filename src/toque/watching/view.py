"""View of watched runs: the parts of the page as HTML, for one run and those drawn beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from toque.reporter import clock_text
from toque.reports.html import LIVE, render
from toque.reports.parts import Grid
from toque.reports.verdict import Verdict
from toque.reports.written_texts import shown_texts
from toque.watching.figures import (
    MOST_OVER,
    STYLES,
    figures_of,
    figures_over,
    machine_figures,
)
from toque.watching.run_numbers import gpus_of, number
from toque.watching.run_state import RunState, state_of
from toque.watching.verdicts import Verdicts
from toque.watching.watched_run import WatchedRun

_NONE: Final = "-"
_MOST_PROMPTS: Final = 12
_ORDER: Final = ("running", "scoring", "waiting", "silent", "killed", "ended")
_MACHINE_NOTE: Final = "Over the minutes that were measured while the run trained."


@dataclass(frozen=True)
class Chosen:
    """What a page asks for."""

    shown: str | None = None
    """The run told in full; None: the first."""
    over: tuple[str, ...] | None = None
    """Runs drawn over each other; None: the first few."""


@dataclass(frozen=True)
class View:
    """The page as it is now."""

    parts: Mapping[str, str]
    """HTML by the id of its place."""
    title: str
    said: str
    """The state in a sentence; said aloud where it changes."""
    loss: float | None = None
    """The newest training loss."""


@dataclass
class Viewer:
    """Makes views.

    Args:
        address: what is watched, as the user wrote it.
        verdicts: on runs.
    """

    address: str
    verdicts: Verdicts = field(default_factory=Verdicts)

    @staticmethod
    def key(runs: Mapping[str, WatchedRun], trouble: str = "") -> object:
        """What changes when the page does; far cheaper than the page."""
        return trouble, [(name, run.version, state_of(run)) for name, run in runs.items()]

    def view(self, runs: Mapping[str, WatchedRun], chosen: Chosen, trouble: str = "") -> View:
        """The page about `runs`; `trouble` says why they could not be listed."""
        states = {name: state_of(run) for name, run in runs.items()}
        names = sorted(runs, key=lambda name: (*_rank(runs[name], states[name]), name))
        if not names:
            return self._empty(trouble)
        shown = chosen.shown if chosen.shown is not None and chosen.shown in runs else names[0]
        over = names[:MOST_OVER] if chosen.over is None else chosen.over
        # By name, so that a run keeps its colour while others end.
        drawn = [name for name in sorted(runs) if name in over][:MOST_OVER]
        run, state = runs[shown], states[shown]
        parts = {
            "head": self._head(shown, run, state, trouble),
            "runs": _table(names, runs, states, drawn, shown) if len(names) > 1 else "",
            "warnings": render(LIVE.format("warnings"), {"warnings": _warnings(run)}),
            "verdict": self._verdict(run),
            **_plots(shown, run, {name: runs[name] for name in drawn}, several=len(names) > 1),
            "texts": _texts(run),
        }
        loss = number(run.facts.step.get("loss"))
        title = (
            shown if loss is None else f"{loss:.4f} · step {run.facts.progress.step:,} · {shown}"
        )
        return View(parts, title, f"{shown}: {state.said}", loss)

    def _empty(self, trouble: str) -> View:
        said = trouble or f"No run is in {self.address} yet. One that begins there appears here."
        content: dict[str, Any] = {
            "address": self.address, "title": "Waiting for a run", "kind": "waiting",
            "sentence": said, "trouble": "", "done": None, "facts": [],
        }  # fmt: skip
        emptied = dict.fromkeys(("runs", "warnings", "verdict", "curves", "machine", "texts"), "")
        return View({"head": render(LIVE.format("head"), content), **emptied}, "Waiting", said)

    def _head(self, name: str, run: WatchedRun, state: RunState, trouble: str) -> str:
        unread = f"{run.place.address} cannot be read: {run.trouble}" if run.trouble else ""
        content = {
            "address": run.place.address,
            "title": name,
            "kind": state.kind,
            "sentence": state.said,
            "trouble": trouble or unread,
            "done": run.facts.done,
            "facts": _facts(run, state),
        }
        return render(LIVE.format("head"), content)

    def _verdict(self, run: WatchedRun) -> str:
        folder = run.place.folder
        found = self.verdicts.of(folder, run.version) if folder and run.facts.step else None
        return render(LIVE.format("verdict"), _verdict_content(found))


def _rank(run: WatchedRun, state: RunState) -> tuple[int, float]:
    """Runs that go on come first, then the newest; those that go on do not change places."""
    goes_on = state.kind in ("running", "scoring", "waiting")
    return _ORDER.index(state.kind), 0.0 if goes_on else -(run.written_at or 0.0)


def _facts(run: WatchedRun, state: RunState) -> list[tuple[str, str]]:
    facts = run.facts
    pairs = [("until", str(facts.start.get("stop_after", _NONE)))]
    if facts.step:
        pairs.append(("step", f"{facts.progress.step:,}"))
        pairs.append(("epochs", f"{facts.progress.epoch:.2f}"))
    if (loss := number(facts.step.get("loss"))) is not None:
        pairs.append(("training loss", f"{loss:.4f}"))
    if facts.best is not None:
        pairs.append(("lowest held-out loss", f"{facts.best[0]:.4f} at step {facts.best[1]:,}"))
    if (rate := number(facts.step.get("tokens_per_second"))) is not None:
        pairs.append(("tokens/s", f"{rate:,.0f}"))
    if state.kind == "running" and facts.seconds_left is not None:
        pairs.append(("training left, about", clock_text(facts.seconds_left)))
    if facts.totals.seconds:
        pairs.append(("trained for", clock_text(facts.totals.seconds)))
    if facts.saved:
        pairs.append(("newest checkpoint", f"step {facts.saved:,}"))
    return [*pairs, *_machine_facts(facts.system)] if state.kind == "running" else pairs


def _machine_facts(system: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = []
    if (used := number(system.get("cpu_percent"))) is not None:
        pairs.append(("processor in use", f"{used:.0f} %"))
    used, total = (number(system.get(f"memory_{which}_bytes")) for which in ("used", "total"))
    if used is not None and total:
        pairs.append(("memory in use", f"{used / 1e9:.1f} of {total / 1e9:.1f} GB"))
    for gpu in gpus_of(system)[:4]:
        share, watts = number(gpu.get("utilisation_percent")), number(gpu.get("power_watts"))
        if share is not None:
            said = f"{share:.0f} %" + (f", {watts:.0f} W" if watts is not None else "")
            pairs.append((f"GPU {gpu.get('index')}", said))
    return pairs


def _warnings(run: WatchedRun) -> list[str]:
    found = list(run.facts.warnings)
    for gpu in gpus_of(run.facts.system):
        reasons = gpu.get("throttled")
        if isinstance(reasons, list) and reasons:
            named = ", ".join(map(str, reasons))
            found.append(f"GPU {gpu.get('index')} runs slower than it can: {named}.")
    return found[::-1]


def _table(
    names: Sequence[str],
    runs: Mapping[str, WatchedRun],
    states: Mapping[str, RunState],
    drawn: Sequence[str],
    shown: str,
) -> str:
    styles = dict(zip(drawn, STYLES, strict=False))
    rows = [
        {
            "name": name,
            "kind": states[name].kind,
            "style": styles.get(name, ""),
            "cells": _cells(runs[name], states[name]),
        }
        for name in names
    ]
    note = f"At most {MOST_OVER} are drawn over each other." if len(names) > MOST_OVER else ""
    return render(LIVE.format("runs"), {"runs": rows, "shown": shown, "note": note})


def _cells(run: WatchedRun, state: RunState) -> list[str]:
    facts = run.facts
    loss, rate = number(facts.step.get("loss")), number(facts.step.get("tokens_per_second"))
    left = facts.seconds_left if state.kind == "running" else None
    return [
        f"{facts.progress.step:,}",
        _NONE if facts.done is None else f"{facts.done:.0%}",
        _NONE if loss is None else f"{loss:.4f}",
        _NONE if facts.best is None else f"{facts.best[0]:.4f}",
        _NONE if rate is None else f"{rate:,.0f}",
        _NONE if left is None else clock_text(left),
    ]


def _plots(
    shown: str, run: WatchedRun, drawn: Mapping[str, WatchedRun], *, several: bool
) -> dict[str, str]:
    is_over = several and set(drawn) != {shown} and bool(drawn)
    loss, others = figures_over(drawn) if is_over else figures_of(run)
    note = "" if not is_over or run.facts.step else f"{shown} has no update yet."
    heading = "Curves over each other" if is_over else "Curves"
    template = LIVE.format("plots")
    machine = machine_figures(run)
    of_machine = f"The machine, during {shown}" if several else "The machine"
    return {
        "curves": render(
            template, {"heading": heading, "wide": loss, "note": note, "figures": others}
        ),
        "machine": render(
            template,
            {"heading": of_machine, "wide": None, "note": _MACHINE_NOTE, "figures": machine},
        )
        if machine
        else "",
    }


def _texts(run: WatchedRun) -> str:
    found = list(run.texts.items())
    content = {
        "texts": [shown_texts(prompt, own) for prompt, own in found[-_MOST_PROMPTS:]],
        "note": f"The last {_MOST_PROMPTS} prompts." if len(found) > _MOST_PROMPTS else "",
    }
    return render(LIVE.format("texts"), content)


def _verdict_content(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {"sentence": ""}
    rows = [
        (share.name.replace("_", " "), clock_text(share.seconds), f"{share.share:.1%}")
        for share in verdict.shares
    ]
    gain = verdict.expected_gain
    return {
        "sentence": verdict.sentence,
        "lever": verdict.lever or "",
        "gain": "" if gain is None else f"about {gain:.0%} faster expected",
        "shares": Grid(("part", "time", "share"), rows, frozenset({1, 2})),
    }
