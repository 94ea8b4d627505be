"""Server of `toque watch`: the page of `toque report`, renewed, and a table of several runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from toque.errors import ToqueError
from toque.reporter import clock_text
from toque.reports.figures import MAX_OVERLAID, STYLES
from toque.reports.page import STYLE, Page, PageHead, RunRow, RunTable, Section, Sentence
from toque.reports.run_page import SECTIONS, run_page
from toque.reports.verdict import Verdict, verdict_of
from toque.runs.places import RunFinder
from toque.runs.run_record import RunRecord
from toque.runs.run_state import RunStatus, state_of
from toque.serving.server import PAGE as SERVED_PAGE
from toque.serving.server import Gate, RequestError, answer_to, page_files

_LIVE: Final = STYLE.parent.parent / "live"
_SHARED: Final = (STYLE, SERVED_PAGE / "stream.js", SERVED_PAGE / "toque.svg")
"""Style sheet of the report, and what the page of `toque serve` sends its token with."""
_LIST_EVERY: Final = 5  # looks at the files between two listings of the runs
_MOST_READERS: Final = 64
_SHARE_OF_A_CORE: Final = 0.02  # most that one reader may take from the run beside it
_LONGEST_NAMES: Final = 20_000
_VERDICT_EVERY: Final = 30.0  # seconds between verdicts: each reads the whole run
_VERDICT_SHARE: Final = 0.01  # largest share of the time that verdicts may take
_ORDER: Final = ("running", "scoring", "waiting", "silent", "killed", "ended")
_HEADS: Final = ("step", "done", "loss", "held-out loss", "tokens/s", "left")
_NONE: Final = "-"


@dataclass(frozen=True)
class View:
    """The page at a moment."""

    parts: Mapping[str, str]  # HTML by the id of its element
    title: str
    said: str  # state of the shown run in a sentence, which screen readers announce when it changes


@final
class Watcher:
    """The runs that a finder knows, looked at `every` so many seconds; for several threads."""

    def __init__(
        self,
        finder: RunFinder,
        *,
        every: float,
        judge: Callable[[Path], Verdict | None] = verdict_of,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every = every
        self._finder, self._judge, self._clock = finder, judge, clock
        self._lock = threading.Lock()
        self._looked: float | None = None
        self._looks = 0
        self._runs: dict[str, RunRecord] = {}
        self._verdicts: dict[str, tuple[float, int, Verdict | None]] = {}
        self._trouble = ""

    def view(
        self, shown: str | None = None, over: Sequence[str] | None = None, before: str = ""
    ) -> tuple[View | None, str]:
        """The page, or None where it is as it was `before`; and the `before` of the next call.

        `shown` is the run shown in full, `over` those drawn over each other; None for the first.
        """
        self._refresh()
        with self._lock:
            states = {name: state_of(run) for name, run in self._runs.items()}
            versions = tuple((name, run.version, states[name]) for name, run in self._runs.items())
            version = str(hash((self._trouble, versions)))
            if version == before:  # far cheaper to compare than the page
                return None, version
            if states:
                return self._view(shown, over, states), version
            address = self._finder.address
            waits = f"No run is in {address} yet. One that begins there appears here."
            words = self._trouble or waits
            page = Page(PageHead(address, "Waiting for a run", words, state="waiting"), ())
            return View(dict.fromkeys(SECTIONS, "") | page.parts(), "Waiting", words), version

    def _refresh(self) -> None:
        """Look at the files, unless the last look was a moment ago."""
        with self._lock:
            now = self._clock()
            if self._looked is not None and now - self._looked < self.every:
                return
            if self._looks % _LIST_EVERY == 0 or not self._runs:
                self._list()
            for run in self._runs.values():
                run.refresh()
            self._looked, self._looks = self._clock(), self._looks + 1

    def _list(self) -> None:
        try:
            places = self._finder.places()
            self._trouble = ""
        except (OSError, ToqueError) as error:
            self._trouble = str(error)
            return
        self._runs = {
            name: self._runs.get(name) or RunRecord(place) for name, place in places.items()
        }

    def _view(
        self, shown: str | None, over: Sequence[str] | None, states: Mapping[str, RunStatus]
    ) -> View:
        runs = self._runs

        def rank(name: str) -> tuple[int, float, str]:
            # Runs that continue come first and keep their places; then the newest.
            kind = states[name].kind
            continues = kind in ("running", "scoring", "waiting")
            return _ORDER.index(kind), 0 if continues else -(runs[name].written_at or 0), name

        names = sorted(runs, key=rank)
        shown = shown if shown is not None and shown in runs else names[0]
        over = names[:MAX_OVERLAID] if over is None else over
        # By name, so that a run keeps its colour while others end.
        drawn = [name for name in sorted(runs) if name in over][:MAX_OVERLAID]
        run, several = runs[shown], len(names) > 1
        unread = f"{run.place.address} cannot be read: {run.trouble}" if run.trouble else ""
        page = run_page(
            run,
            shown,
            verdict=self._verdict(shown, run),
            label=run.place.address,
            trouble=self._trouble or unread,
            over={name: runs[name].history for name in drawn}
            if several and drawn and drawn != [shown]
            else None,
        )
        table = _table(names, runs, states, drawn, shown) if several else ()
        page = replace(page, sections=(Section("runs", "Runs", table), *page.sections))
        step, sentence = run.history.step, f"{shown}: {states[shown].sentence}"
        if step is None or step.loss is None:
            return View(page.parts(), shown, sentence)
        title = f"{step.loss:.4f} · step {step.step:,} · {shown}"
        return View(page.parts(), title, sentence)

    def _verdict(self, name: str, run: RunRecord) -> Verdict | None:
        folder, now = run.place.folder, self._clock()
        if folder is None or run.history.step is None:
            return None
        due, version, verdict = self._verdicts.get(name, (0.0, -1, None))
        if version == run.version or (version >= 0 and now < due):
            return verdict
        verdict = self._judge(folder)
        took = self._clock() - now
        due = now + max(_VERDICT_EVERY, took / _VERDICT_SHARE)
        self._verdicts[name] = (due, run.version, verdict)
        return verdict


def _table(
    names: Sequence[str],
    runs: Mapping[str, RunRecord],
    states: Mapping[str, RunStatus],
    drawn: Sequence[str],
    shown: str,
) -> list[RunTable | Sentence]:
    styles = dict(zip(drawn, STYLES, strict=False))
    rows = [
        RunRow(name, states[name].kind, styles.get(name, ""), _cells(runs[name], states[name]))
        for name in names
    ]
    table = RunTable(_HEADS, rows, shown)
    note = Sentence(f"At most {MAX_OVERLAID} are drawn over each other.", "soft")
    return [table, note] if len(names) > MAX_OVERLAID else [table]


def _cells(run: RunRecord, state: RunStatus) -> list[str]:
    history, step = run.history, run.history.step
    loss, rate = (step.loss, step.tokens_per_second) if step is not None else (None, None)
    left = history.seconds_left if state.kind == "running" else None
    return [
        f"{history.progress.step:,}",
        _NONE if history.done is None else f"{history.done:.0%}",
        _NONE if loss is None else f"{loss:.4f}",
        _NONE if history.best is None else f"{history.best[0]:.4f}",
        _NONE if rate is None else f"{rate:,.0f}",
        _NONE if left is None else clock_text(left),
    ]


def watching_app(watcher: Watcher, *, token: str | None, hosts: Collection[str] | None) -> Gate:
    """The ASGI application; metrics want the `token`, requests one of `hosts`, or None none."""

    def looked(query: QueryParams) -> dict[str, object]:
        began = time.monotonic()
        over = query.getlist("over") if "over" in query else None
        view, version = watcher.view(query.get("show"), over, query.get("since", ""))
        took = time.monotonic() - began
        pause = max(watcher.every, took / _SHARE_OF_A_CORE)
        page = {} if view is None else asdict(view)
        return {"version": version, "pause_seconds": round(pause, 3), **page}

    async def page(request: Request) -> Response:
        if len(str(request.query_params)) > _LONGEST_NAMES:
            raise RequestError(414, "The names of the runs are longer than this server reads.")
        headers = {"Cache-Control": "no-store"}
        return JSONResponse(await run_in_threadpool(looked, request.query_params), headers=headers)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    routes = [*page_files(_LIVE, _SHARED), Route("/api/page", page), Route("/health", health)]
    handlers = {RequestError: _refused, HTTPException: _refused}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return Gate(app, token=token, hosts=hosts, paths=(), count=lambda *_: None, most=_MOST_READERS)


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        words = f"There is nothing at {request.scope['path'][:100]}."
        return answer_to(RequestError(error.status_code, words, code="invalid_url"))
    assert isinstance(error, RequestError)
    return answer_to(error)
