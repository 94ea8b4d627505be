"""Reports on folders: pages of stores and runs, runs held against one, and hashes compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec

from toque.config import load_config
from toque.config.dump import flow
from toque.config.resolve import leaves
from toque.config.yaml_reader import dotted, read_yaml
from toque.data.prepare.data_report import Report
from toque.data.store.store_manifest import read_manifest
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError, ConfigError, DataError, ToqueError, in_shell
from toque.evaluation.bootstrap import FILE, ByText, from_json
from toque.reporter import SILENT, Reporter
from toque.reports.comparison import ComparedRun, Comparison, ScoreDifference, differences_of
from toque.reports.page import write_page
from toque.reports.run_page import run_page
from toque.reports.store_page import store_page
from toque.reports.verdict import verdict_of
from toque.runs.history import METRICS
from toque.runs.places import BucketPlace, FolderPlace, Place, content, is_in_a_bucket
from toque.runs.run_record import CONFIG, EVALUATION, FinalScores, RunRecord
from toque.sources.memory_rows import verify_rows
from toque.storage.bucket import BucketError, BucketUse, RunBucketError, open_bucket
from toque.storage.json_files import decode_json
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, TrainedRun, existing_folder

_COMPARED: Final = BucketUse(
    "the address to compare", "list and read", "Nothing there was changed.", RunBucketError
)
_MOST_BYTES: Final = 1 << 24  # of a checkpoint's manifest; a store's shards are beside a larger one


@dataclass(frozen=True)
class WrittenPage:
    """A page in a file."""

    file: Path
    bytes: int

    def __str__(self) -> str:
        """A sentence for people."""
        return f"The report is {self.file} ({self.bytes / 1024:,.0f} KiB, opens offline)."


def report(path: Model, *, out: str | Path | None = None) -> WrittenPage:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run.
        out: the file to write; report.html in the folder when None.

    Raises:
        ConfigError: neither a store nor a run, or `out` cannot be written or is no page.
        DataError: the store is unfinished or damaged, or holds a link.
        CheckpointError: the run's folder holds a link, or its metrics cannot be read.
    """
    folder = existing_folder(path)
    is_run = any(os.path.lexists(folder / name) for name in (METRICS, "config.yaml"))
    refuse_links(folder, CheckpointError if is_run else DataError)
    if (folder / METRICS).is_file():
        run = RunRecord(FolderPlace(folder))
        run.read_whole()
        page = run_page(run, folder.resolve().name, verdict=verdict_of(folder))
    elif (folder / "config.yaml").is_file():
        raise ConfigError(
            f"The run {folder} has no {METRICS} yet, so there is nothing to report. It appears "
            "when training begins."
        )
    elif (folder / "manifest.json").is_file() or (folder / "shards").is_dir():
        read_manifest(folder)
        found = Report.read_from(folder)
        if found is None:
            raise DataError(
                f"{folder}/report.json is missing, damaged, or of another version of toque. Run "
                "`toque prepare CONFIG` again, with the store's own: what is prepared is kept, and "
                "the report is written anew."
            )
        page = store_page(folder, found)
    else:
        raise ConfigError(
            f"{folder} is neither a run ({METRICS}) nor a store (manifest.json). Name a folder "
            "such as runs/cookbook or stores/cookbook."
        )
    target = folder / "report.html" if out is None else Path(out)
    return WrittenPage(target, write_page(target, page))


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
    beside = places[first].folder or Path("comparison.html")
    page = beside.with_name("comparison.html") if out is None else Path(out)
    comparison = Comparison(read, found, notes, page)
    write_page(page, comparison.html_page())
    return comparison


def _named(runs: Sequence[Model]) -> dict[str, Place]:
    """The runs by the shortest names that tell them apart."""
    if len(runs) < 2:
        raise ConfigError(
            "A comparison needs two runs or more, each an argument of its own: `toque compare RUN "
            "RUN`, or compare(run, other) in Python."
        )
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
    """The home of a run, or an error where there is none or it holds a link."""
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
        found = decode_json(text, FinalScores)
    except msgspec.DecodeError as error:
        return {}, None, f"{run}/{EVALUATION} cannot be read ({error}): {again}"
    values = found.metrics
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


@dataclass(frozen=True)
class Verified:
    """Parts that were found whole."""

    parts: tuple[str, ...]  # a line for each store and checkpoint

    def __str__(self) -> str:
        """All lines."""
        return "\n".join(self.parts)


def verify(path: Model) -> Verified:
    """Compare every file of a store, a checkpoint or a run with its SHA-256.

    Raises:
        ConfigError: the folder is not one of the three.
        DataError: a store's file is missing or changed; file and cause are named.
        CheckpointError: a checkpoint's is.
    """
    folder = existing_folder(path)
    if (folder / "config.yaml").exists():
        refuse_links(folder, CheckpointError)
        return Verified(tuple(_run(folder)))
    if not (folder / "manifest.json").exists():
        raise ConfigError(
            f"{folder} is no store or checkpoint (manifest.json) and no run (config.yaml). Name "
            "one."
        )
    manifest, is_store = folder / "manifest.json", (folder / "shards").is_dir()
    if not is_store and manifest.stat().st_size <= _MOST_BYTES:
        with suppress(ValueError, RecursionError):
            found = json.loads(manifest.read_bytes())
            is_store = isinstance(found, dict) and "shards" in found
    return Verified((_store(folder) if is_store else _checkpoint(folder),))


def _store(path: Path) -> str:
    manifest = TokenStore.open(path, verify=True).manifest
    files = len(manifest.shards) + len(manifest.files) + verify_rows(path)
    return f"{path}: store of {manifest.examples:,} examples, {files} files, every hash right"


def _checkpoint(path: Path) -> str:
    from toque.training.checkpoint.saved import verify_checkpoint  # with torch

    checkpoint = verify_checkpoint(path)
    size = sum(entry.bytes for entry in checkpoint.manifest.files)
    layout = checkpoint.layout()
    how = "" if layout is None else f" in {len(layout.files)} shards"
    return (
        f"{path}: checkpoint of step {checkpoint.step}, {size / 2**20:,.1f} MiB{how}, every hash "
        "right"
    )


def _run(path: Path) -> list[str]:
    """A line for each part of a run; all that is damaged is named by one error."""
    steps = [*(path / "checkpoints").glob("step-*"), *(path / "best").glob("step-*")]
    store = Path(load_config(path / "config.yaml").config.data.store)
    checks = [partial(_checkpoint, folder) for folder in sorted(steps)]
    if store.exists():
        checks.append(partial(_store, store))
    lines: list[str] = []
    faults: list[ToqueError] = []
    for check in checks:
        try:
            lines.append(check())
        except (CheckpointError, DataError) as error:
            faults.append(error)
    if faults:
        told = [*map(str, faults), f"{len(lines)} other parts are right."]
        kind = DataError if isinstance(faults[0], DataError) else CheckpointError
        raise kind(" ".join(told))
    if not steps:
        lines.append(f"{path}: no checkpoint yet")
    if not store.exists():
        lines.append(f"{store}: the run's store is not here, so nothing of it was compared")
    return lines
