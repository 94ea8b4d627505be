"""Part of the application that shows runs: a live version of the report, and a table of runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, final

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.errors import ToqueError
from toque.reporter import clock_text
from toque.reports.figures import MAX_OVERLAID, STYLES
from toque.reports.page import (
    Page,
    PageHead,
    RunRow,
    RunTable,
    Section,
    Sentence,
)
from toque.reports.run_page import SECTIONS, build_run_page
from toque.reports.verdict import Verdict, judge_run
from toque.runs.history import StepRow
from toque.runs.metric_names import metric_named
from toque.runs.places import RunFinder
from toque.runs.run_record import RunRecord
from toque.runs.run_state import RunStatus, state_of
from toque.serving.application import Part, build_app
from toque.serving.gate import Gate
from toque.serving.request_errors import RequestError

_REFRESHES_PER_LISTING: Final = 5
"""Number of refreshes of the known runs per search for new runs, which takes longer."""
_MAX_READERS: Final = 64
"""Maximum number of concurrent requests."""
_CORE_SHARE: Final = 0.02
"""Maximum fraction of a core per browser, because a run may train on the same machine."""
_MAX_QUERY_CHARS: Final = 20_000
_VERDICT_SECONDS: Final = 30.0
"""Minimum time between verdicts, because each verdict reads the entire run."""
_VERDICT_SHARE: Final = 0.01
"""Maximum fraction of the time to spend on verdicts."""
_STATE_ORDER: Final = ("running", "scoring", "waiting", "silent", "killed", "ended")
_COLUMN_HEADS: Final = ("step", "done", "loss", "held-out loss", "tokens/s", "left")
_NO_VALUE: Final = "-"


@dataclass(frozen=True)
class View:
    """Contents of the page at a point in time."""

    parts: Mapping[str, str]
    """HTML of each element, by the element's id."""
    title: str
    state: str
    """State of the shown run as text. Screen readers announce its changes."""
    name: str = ""
    """Name of the shown run."""


class _StoredVerdict(NamedTuple):
    """Last verdict on a run."""

    verdict: Verdict | None
    version: int
    """Version of the run at the verdict."""
    next_time: float
    """Time from which the run may be judged again."""


@final
class Watcher:
    """Current state of the runs of a finder, for several threads.

    Args:
        finder: Finder of the runs.
        every: Minimum seconds between refreshes.
        judge: Function that computes the verdict on a run.
        clock: Function that returns the time in seconds.
    """

    def __init__(
        self,
        finder: RunFinder,
        *,
        every: float,
        judge: Callable[[Path], Verdict | None] = judge_run,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = every
        self._finder = finder
        self._judge = judge
        self._clock = clock
        self._lock = threading.Lock()
        self._refresh_time: float | None = None
        self._n_refreshes = 0
        self._runs: dict[str, RunRecord] = {}
        self._verdicts: dict[str, _StoredVerdict] = {}
        self._error = ""

    def view(
        self,
        shown: str | None = None,
        plotted: Sequence[str] | None = None,
        known_version: str = "",
    ) -> tuple[View | None, str]:
        """Return the contents of the page and their version.

        Args:
            shown: Name of the run with all details. Default: the first run of the table.
            plotted: Names of the runs in one plot. Default: the first runs of the table.
            known_version: Version that the client has. If it is current, the contents are None.
        """
        self._refresh()
        with self._lock:
            states = {name: state_of(run) for name, run in self._runs.items()}
            versions = tuple(
                (name, run.version, states[name]) for name, run in self._runs.items()
            )
            version = str(hash((self._error, versions)))
            if version == known_version:
                return None, version
            if states:
                return self._view_runs(shown, plotted, states), version
            return self._view_without_runs(), version

    def records(self) -> Mapping[str, RunRecord]:
        """Return the current records of the runs by name. Another thread may refresh them."""
        self._refresh()
        with self._lock:
            return dict(self._runs)

    def _view_without_runs(self) -> View:
        address = self._finder.address
        text = self._error
        if not text:
            text = f"{address} does not contain a run yet. New runs appear here."
        head = PageHead(address, "Waiting for a run", text, state="waiting")
        parts = dict.fromkeys(SECTIONS, "") | Page(head, ()).parts()
        return View(parts, "Waiting", text)

    def _refresh(self) -> None:
        """Read the files of the runs if the last refresh is old enough."""
        with self._lock:
            now = self._clock()
            if self._refresh_time is not None and now - self._refresh_time < self.every:
                return
            if self._n_refreshes % _REFRESHES_PER_LISTING == 0 or not self._runs:
                self._find_runs()
            for run in self._runs.values():
                run.refresh()
            self._refresh_time = self._clock()
            self._n_refreshes += 1

    def _find_runs(self) -> None:
        """Update the list of runs, or the error for the page."""
        try:
            places = self._finder.places()
            self._error = ""
        except (OSError, ToqueError) as error:
            self._error = str(error)
            return
        self._runs = {
            name: self._runs.get(name) or RunRecord(place)
            for name, place in places.items()
        }

    def _view_runs(
        self,
        shown: str | None,
        plotted: Sequence[str] | None,
        states: Mapping[str, RunStatus],
    ) -> View:
        """Return the view of a run with details, and of all runs as a table and a plot."""
        runs = self._runs
        names = self._sort_runs(states)
        name = names[0] if shown is None or shown not in runs else shown
        in_plot = names[:MAX_OVERLAID] if plotted is None else plotted
        # Sorted by name, so that a run keeps its colour when another run ends.
        curves = [other for other in sorted(runs) if other in in_plot][:MAX_OVERLAID]

        histories = None
        table: list[RunTable | Sentence] = []
        if len(names) > 1:
            table = _create_table(names, runs, states, curves, name)
            if curves != [name]:
                histories = {other: runs[other].history for other in curves}
        run = runs[name]
        error = self._error
        if run.trouble and not error:
            error = f"{run.place.address} cannot be read: {run.trouble}"
        page = build_run_page(
            run,
            name,
            verdict=self._current_verdict(name, run),
            label=run.place.address,
            problem=error,
            overlaid_runs=histories,
        )
        with_table = (Section("runs", "Runs", table), *page.sections)
        page = replace(page, sections=with_table)
        state = f"{name}: {states[name].sentence}"
        return View(page.parts(), _title(name, run), state, name)

    def _sort_runs(self, states: Mapping[str, RunStatus]) -> list[str]:
        """Sort runs by state. Sort active runs by name, so that they do not move in the table.

        Sort other runs by the time of their last change, the newest first.
        """

        def sort_key(name: str) -> tuple[int, float, str]:
            kind = states[name].kind
            age_rank = 0.0
            if kind not in ("running", "scoring", "waiting"):
                age_rank = -(self._runs[name].written_at or 0)
            return _STATE_ORDER.index(kind), age_rank, name

        return sorted(self._runs, key=sort_key)

    def _current_verdict(self, name: str, run: RunRecord) -> Verdict | None:
        """Return the last verdict on a run, or judge the run again if the verdict is old."""
        if run.place.folder is None or run.history.step is None:
            return None
        start = self._clock()
        last = self._verdicts.get(name)
        if last is not None and (last.version == run.version or start < last.next_time):
            return last.verdict
        verdict = self._judge(run.place.folder)
        seconds = self._clock() - start
        next_time = start + max(_VERDICT_SECONDS, seconds / _VERDICT_SHARE)
        self._verdicts[name] = _StoredVerdict(verdict, run.version, next_time)
        return verdict


def _title(name: str, run: RunRecord) -> str:
    """Return the title of the browser's tab: the loss first, because tabs are narrow."""
    step = run.history.step
    if step is None or step.value is None:
        return name
    return f"{step.value:.4f} · step {step.step:,} · {name}"


def _create_table(
    names: Sequence[str],
    runs: Mapping[str, RunRecord],
    states: Mapping[str, RunStatus],
    plotted: Sequence[str],
    shown: str,
) -> list[RunTable | Sentence]:
    """Create the table of runs, with a note if the plot does not show all of them."""
    styles = dict(zip(plotted, STYLES, strict=False))
    rows = [
        RunRow(
            name,
            states[name].kind,
            styles.get(name, ""),
            _format_cells(runs[name], states[name]),
        )
        for name in names
    ]
    table = RunTable(_COLUMN_HEADS, rows, shown)
    note = Sentence(f"The plot shows at most {MAX_OVERLAID} runs.", "soft")
    return [table, note] if len(names) > MAX_OVERLAID else [table]


def _format_cells(run: RunRecord, state: RunStatus) -> list[str]:
    """Format the cells of a run in the order of `_COLUMN_HEADS`."""
    history = run.history
    step = history.step
    rate = None if step is None else step.tokens_per_second
    best_loss = None if history.best is None else history.best[0]
    seconds_left = history.seconds_left if state.kind == "running" else None
    return [
        f"{history.progress.step:,}",
        _format_number(history.done, ".0%"),
        _format_learning(step),
        _format_number(best_loss, ".4f"),
        _format_number(rate, ",.0f"),
        _NO_VALUE if seconds_left is None else clock_text(seconds_left),
    ]


def _format_learning(step: StepRow | None) -> str:
    """Format the loss of an update, or another measure with its name."""
    if step is None or step.value is None:
        return _NO_VALUE
    value = f"{step.value:.4f}"
    if step.measure == "loss":
        return value
    return f"{metric_named(step.measure).title} {value}"


def _format_number(value: float | None, spec: str) -> str:
    return _NO_VALUE if value is None else format(value, spec)


def build_watch_app(
    watcher: Watcher, *, token: str | None, hosts: Collection[str] | None
) -> Gate:
    """Build the ASGI application of `toque watch`. For `token` and `hosts` see `Gate`."""
    return build_app(
        [watch_part(watcher)], token=token, hosts=hosts, max_requests=_MAX_READERS
    )


def watch_part(watcher: Watcher) -> Part:
    """Build the part of the application that shows runs."""

    def read_page(query: QueryParams) -> dict[str, object]:
        """Return the page's contents, their version, and the pause before the next request."""
        start = time.monotonic()
        plotted = query.getlist("over") if "over" in query else None
        view, version = watcher.view(query.get("show"), plotted, query.get("since", ""))
        seconds = time.monotonic() - start
        pause = max(watcher.every, seconds / _CORE_SHARE)
        contents = {} if view is None else asdict(view)
        return {"version": version, "pause_seconds": round(pause, 3), **contents}

    async def page(request: Request) -> Response:
        if len(str(request.query_params)) > _MAX_QUERY_CHARS:
            raise RequestError(
                414, "The names of the runs are too long for this server."
            )
        record = await run_in_threadpool(read_page, request.query_params)
        return JSONResponse(record, headers={"Cache-Control": "no-store"})

    return Part(views=["runs"], routes=[Route("/api/page", page)])
