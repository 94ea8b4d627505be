"""Comparison of runs: what their folders or buckets hold, read and held against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from toque.config.dump import flow
from toque.config.resolve import leaves
from toque.config.yaml_reader import dotted, read_yaml
from toque.errors import CheckpointError, ConfigError, ToqueError, in_shell
from toque.evaluation.bootstrap import FILE, ByText, from_json
from toque.reporter import SILENT, Reporter
from toque.reports.comparison import ComparedRun, Comparison, ScoreDifference, differences_of
from toque.reports.page import write_page
from toque.runs.history import METRICS
from toque.runs.places import BucketPlace, FolderPlace, Place, content, is_in_a_bucket
from toque.runs.run_record import CONFIG, EVALUATION, RunRecord
from toque.storage.bucket import open_bucket
from toque.storage.bucket_access import BucketError, BucketUse, RunBucketError
from toque.storage.json_files import decode_json
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, TrainedRun, existing_folder

_PAGE: Final = "comparison.html"
_COMPARED: Final = BucketUse(
    "the address to compare", "list and read", "Nothing there was changed.", RunBucketError
)


class _Evaluation(msgspec.Struct):
    step: int | None = None
    heldout: dict[str, float | None] = {}
    generated: dict[str, float | None] = {}


def compare(
    *runs: Model,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Comparison:
    """Hold runs against the first of them: settings, curves, scores with intervals, and cost.

    Args:
        runs: two or more runs, unfinished, ended or killed: folders, or addresses at gs:// or
            s3://.
        out: the page to write; when None, comparison.html beside the first run, or here where that
            is in a bucket.
        reporter: hears of progress.

    Raises:
        ConfigError: fewer than two, no such folder, or `out` cannot be written or is no page.
        CheckpointError: a folder holds a link, or a bucket cannot be read.
    """
    places = _named(runs)
    read: dict[str, ComparedRun] = {}
    notes: list[str] = []
    for name, place in places.items():
        with reporter.working(f"reading {place.address}"):
            read[name] = _read(place, notes)
    first, *others = places
    with reporter.working("drawing resamples"):
        found = {other: _against(read, first, other, notes) for other in others}
    beside = places[first].folder or Path(_PAGE)
    page = beside.with_name(_PAGE) if out is None else Path(out)
    comparison = Comparison(read, found, notes, page)
    write_page(page, comparison.html_page())
    return comparison


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
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice. A run is equal to itself.")
    return dict(zip(names, places, strict=True))


def _place(run: Model) -> Place:
    """The home of a run.

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


def _read(place: Place, notes: list[str]) -> ComparedRun:
    record = RunRecord(place)
    record.read_whole()
    scores, by_text, why_not = _scores(record)
    notes += [why_not] if why_not else []
    return ComparedRun(record, _settings(record), scores, by_text)


def _settings(record: RunRecord) -> Mapping[str, str]:
    """The values of config.yaml by their dotted names, read as text: nothing it names is run."""
    try:
        values: Any = read_yaml(record.text(CONFIG), f"{record.place.address}/{CONFIG}").value
    except ToqueError:
        return {}
    pairs = leaves(values) if isinstance(values, dict) else []
    return {dotted(path): flow(value) for path, value in pairs}


def _scores(record: RunRecord) -> tuple[dict[str, float], ByText | None, str]:
    """The final scores, those of each text, and the reason why some are missing; "" for none."""
    place, run = record.place, record.place.address
    again = "a run writes them at its end, and copies them there."
    if place.folder is not None:
        again = f"`toque evaluate {in_shell(run)}` writes them."
    if not (text := record.text(EVALUATION)):
        return {}, None, f"{run} has no final scores yet: {again}"
    try:
        found = decode_json(text, _Evaluation)
    except msgspec.DecodeError as error:
        return {}, None, f"{run}/{EVALUATION} cannot be read ({error}): {again}"
    pairs = {**found.heldout, **found.generated}
    values = {name: value for name, value in pairs.items() if value is not None}
    try:
        data = content(place, FILE)
        if data is None:
            return values, None, f"{run} has no scores by text: {again}"
        by_text = from_json(data)
    except (OSError, BucketError, ValueError) as error:
        return values, None, f"{run}/{FILE} cannot be read ({error}): {again}"
    if by_text.step != found.step:
        return values, None, f"{run}/{FILE} is of another step: {again}"
    return values, by_text, ""


def _against(
    runs: Mapping[str, ComparedRun], first: str, other: str, notes: list[str]
) -> list[ScoreDifference]:
    mine, its = runs[first].by_text, runs[other].by_text
    if mine is None or its is None:
        return []
    found, sentences = differences_of(mine, its)
    notes += [f"{first} and {other}: {sentence}" for sentence in sentences]
    return found
