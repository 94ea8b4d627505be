"""Comparison of runs: settings that differ, curves, scores with intervals, cost, and a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from toque.config.dump import flow
from toque.config.resolve import leaves
from toque.config.yaml_reader import dotted, read_yaml
from toque.errors import CheckpointError, ConfigError, ToqueError
from toque.evaluation.differences import FEWEST_TEXTS
from toque.reporter import SILENT, Reporter
from toque.reports.html import COMPARISON, render, write_page
from toque.runs.history import METRICS
from toque.storage.bucket import open_bucket
from toque.storage.bucket_errors import BucketUse, RunBucketError
from toque.storage.no_follow import refuse_links
from toque.version import __version__
from toque.watching.figures import MOST_OVER, figures_over
from toque.watching.places import BucketPlace, FolderPlace, Place, content, is_in_a_bucket
from toque.watching.run_state import state_of
from toque.watching.watched_run import WatchedRun
from toque.workflows.compare.scores import Difference, Scored, differences_of, scores_of
from toque.workflows.compare.tables import Tables, sentence_of
from toque.workflows.results import Model, TrainedRun, existing_folder

_NOT_THE_RUN: Final = ("run_dir",)
"""Settings that always differ and change nothing."""
PAGE: Final = "comparison.html"
_COMPARED: Final = BucketUse(
    "the address to compare", "list and read", "Nothing there was changed.", RunBucketError
)
METHOD: Final = (
    "Differences are the other run's score minus the first's over the same held-out texts, with "
    f"the 95 % interval of a paired bootstrap ({FEWEST_TEXTS} texts or more); * where it leaves "
    "zero out. They tell these two models apart on texts like these. Another seed gives other "
    "models: `toque ablate` measures a setting over several."
)


@dataclass(frozen=True)
class Comparison:
    """What a comparison found."""

    record: Mapping[str, Any]
    """Every number, for programs."""
    sentence: str
    """Which run is better, by how much, or that they are not told apart."""
    page: Path
    """The same as an HTML page, with curves."""
    tables: Tables

    def __str__(self) -> str:
        """For a terminal."""
        where = f"{self.page} is a page of it, with the curves over each other."
        return "\n".join([*self.tables.lines(), METHOD, "", self.sentence, where])


def compare(
    *runs: Model,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Comparison:
    """Hold runs against the first of them: settings, curves, scores with intervals, and cost.

    Args:
        runs: two or more runs, going on, ended or killed: folders, or addresses at gs:// or s3://.
        out: the page to write; when None, comparison.html beside the first run, or here where that
            is in a bucket.
        reporter: hears of progress.

    Raises:
        ConfigError: fewer than two, no such folder, or `out` cannot be written or is no page.
        CheckpointError: a folder holds a link, or a bucket cannot be read.
    """
    places = _named(runs)
    read: dict[str, WatchedRun] = {}
    scored: dict[str, Scored] = {}
    settings: dict[str, dict[str, Any]] = {}
    for name, place in places.items():
        with reporter.working(f"reading {place.address}"):
            read[name] = _read(place)
            scored[name], settings[name] = scores_of(place), _settings(place)
    first, *others = places
    with reporter.working("drawing resamples"):
        found, notes = _against(first, others, scored)
    tables = Tables(
        settings=_differing(settings), runs=read, scored=scored, found=found, notes=notes
    )
    sentence = sentence_of(first, found, read, scored)
    record = tables.record() | {"toque": __version__, "sentence": sentence, "method": METHOD}
    beside = places[first].folder or Path(PAGE)
    page = beside.with_name(PAGE) if out is None else Path(out)
    write_page(page, _page(tables, read, sentence))
    return Comparison(record, sentence, page, tables)


def _named(runs: Sequence[Model]) -> dict[str, Place]:
    """The runs by the shortest names that tell them apart."""
    if len(runs) < 2:
        raise ConfigError("A comparison needs two runs or more: toque compare RUN RUN.")
    places = [_place(run) for run in runs]
    for place in places:
        if place.look(METRICS) is None:
            raise ConfigError(
                f"{place.address} is no run that has begun: it has no {METRICS}. Name a run such "
                "as runs/mine."
            )
    short = [(place.folder or PurePosixPath(place.address)).name for place in places]
    names = short if len(set(short)) == len(short) else [place.address for place in places]
    if len(set(names)) < len(names):
        raise ConfigError(f"{_twice(names)} is named twice. A run is equal to itself.")
    return dict(zip(names, places, strict=True))


def _place(run: Model) -> Place:
    """Where a run is.

    Raises:
        ConfigError: no such folder.
        CheckpointError: the folder holds a link.
    """
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        return BucketPlace(open_bucket(str(run).rstrip("/"), _COMPARED))
    folder = existing_folder(run)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Name a run, such as runs/mine.")
    refuse_links(folder, CheckpointError)
    return FolderPlace(folder.resolve())


def _twice(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _read(place: Place) -> WatchedRun:
    run = WatchedRun(place)
    try:
        run.read_whole()
    except OSError as error:
        raise CheckpointError(
            f"{place.address}/{METRICS} cannot be read: {error.strerror}. Give yourself the "
            "right to read it, or name another run."
        ) from error
    return run


def _settings(place: Place) -> dict[str, Any]:
    """The values of config.yaml by their dotted names, read as text: nothing it names is run."""
    try:
        text = (content(place, "config.yaml") or b"").decode(errors="replace")
        values = read_yaml(text, f"{place.address}/config.yaml").value
    except (OSError, ToqueError):
        return {}
    pairs = leaves(values) if isinstance(values, dict) else []
    return {dotted(path): value for path, value in pairs}


def _differing(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """Settings that are not the same in all, as written; "-" where one does not have it."""
    names = dict.fromkeys(name for own in settings.values() for name in own)
    found = {}
    for name in names:
        values = {run: flow(own[name]) if name in own else "-" for run, own in settings.items()}
        if name not in _NOT_THE_RUN and len(set(values.values())) > 1:
            found[name] = values
    return found


def _against(
    first: str, others: Sequence[str], scored: Mapping[str, Scored]
) -> tuple[dict[str, list[Difference]], list[str]]:
    """The differences of each other run from the first, and what could not be compared."""
    notes = [found.why_not for found in scored.values() if found.why_not]
    found: dict[str, list[Difference]] = {}
    ours = scored[first].by_text
    for name in others:
        theirs = scored[name].by_text
        if ours is None or theirs is None:
            found[name] = []
            continue
        found[name], said = differences_of(ours, theirs)
        notes += [f"{first} and {name}: {sentence}" for sentence in said]
    return found, notes


def _page(tables: Tables, runs: Mapping[str, WatchedRun], sentence: str) -> str:
    loss, figures = figures_over(runs)
    more = f"The first {MOST_OVER} runs are drawn." if len(runs) > MOST_OVER else ""
    content = {
        "title": " and ".join(runs) if len(runs) == 2 else f"{len(runs)} runs",
        "sentence": sentence,
        "states": [f"{name}: {state_of(run).said}" for name, run in runs.items()],
        "notes": tables.notes,
        "grids": [(title, grid) for title, grid in tables.grids() if grid.rows],
        "method": METHOD,
        "loss": loss,
        "figures": figures,
        "more": more,
        "made_by": f"Written by toque {__version__}.",
    }
    return render(COMPARISON, content)


def in_json(found: Comparison) -> str:
    """The record as JSON."""
    return json.dumps(found.record, indent=1)
