"""Reports on folders: pages of stores and runs, runs held against one, and hashes compared."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from toque.runs.places import BucketPlace, FolderPlace, is_in_a_bucket, read_small_file
from toque.runs.run_record import CONFIG, EVALUATION, FinalScores, RunRecord
from toque.sources.memory_rows import verify_rows
from toque.storage.bucket import BucketError, BucketUse, RunBucketError, open_bucket
from toque.storage.json_files import decode_json
from toque.storage.no_follow import refuse_links
from toque.user_paths import named_path
from toque.workflows.results import Model, TrainedRun, existing_folder
from toque.workflows.saved_steps import run_of, split_address

_COMPARED: Final = BucketUse(
    "the address to compare", "list and read", "Nothing there was changed.", RunBucketError
)
_LOOKS: Final = 5  # at the checkpoints of a run that removes and saves some meanwhile
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
    target = folder / "report.html" if out is None else named_path(out)
    return WrittenPage(target, write_page(target, page))


def compare(
    *runs: Model,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Comparison:
    """Hold runs against the first of them: settings, curves, scores with intervals, and cost.

    Args:
        runs: two or more runs, unfinished, ended or killed, or checkpoints of runs: folders, or
            addresses at gs:// or s3://.
        out: the page to write; when None, comparison.html beside the first run, or here where that
            is in a bucket.
        reporter: hears of progress.

    Raises:
        ConfigError: fewer than two, no such folder, or `out` cannot be written or is no page.
        CheckpointError: a folder holds a link, or a bucket cannot be read.
    """
    records = _named(runs)
    read: dict[str, ComparedRun] = {}
    notes: list[str] = []
    for name, record in records.items():
        with reporter.working(f"reading {record.address}"):
            read[name] = _read(record, notes)
    first, *others = records
    with reporter.working("drawing resamples"):
        found = {other: _against(read, first, other, notes) for other in others}
    beside = records[first].place.folder or Path("comparison.html")
    page = beside.with_name("comparison.html") if out is None else named_path(out)
    comparison = Comparison(read, found, notes, page)
    write_page(page, comparison.html_page())
    return comparison


def _named(runs: Sequence[Model]) -> dict[str, RunRecord]:
    """The runs by the shortest names that tell them apart."""
    if len(runs) < 2:
        raise ConfigError(
            "A comparison needs two runs or more, each an argument of its own: `toque compare RUN "
            "RUN`, or compare(run, other) in Python."
        )
    records = [_record(run) for run in runs]
    for record in records:
        if record.place.look(METRICS) is None:
            raise ConfigError(
                f"{record.place.address} is no run that has begun: it has no {METRICS}. Name a run "
                "such as runs/mine."
            )
    short = [_short_name(record) for record in records]
    names = short if len(set(short)) == len(short) else [record.address for record in records]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice} is named twice. A run is equal to itself.")
    return dict(zip(names, records, strict=True))


def _short_name(record: RunRecord) -> str:
    place = record.place
    name = (place.folder or PurePosixPath(place.address)).name
    return f"{name}/{record.at}".rstrip("/")


def _record(run: Model) -> RunRecord:
    """A run, or a run up to a checkpoint; an error where there is none or it holds a link."""
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        address, at = split_address(str(run))
        return RunRecord(BucketPlace(open_bucket(address, _COMPARED)), at=at)
    folder = existing_folder(run)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. Name a run, such as runs/mine.")
    of_run = run_of(folder) or folder
    refuse_links(of_run, CheckpointError)
    at = "" if of_run == folder else folder.absolute().relative_to(of_run).as_posix()
    return RunRecord(FolderPlace(of_run.resolve()), at=at)


def _read(record: RunRecord, notes: list[str]) -> ComparedRun:
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
    place, run = record.place, record.address
    again = "a run writes them at its end, and copies them there."
    if record.at:
        again = "fetch the run and evaluate the checkpoint, whose scores stay in the run's folder."
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
        data = read_small_file(place, record.path_of(FILE))
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


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and number of a folder, another once it was replaced; None without one."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


def _run(path: Path) -> list[str]:
    """A line for each part of a run; all that is damaged is named by one error."""
    store = Path(load_config(path / "config.yaml").config.data.store)
    lines: list[str] = []
    faults: list[ToqueError] = []
    steps, gone = set[Path](), 0
    for _ in range(_LOOKS):
        new = {*path.glob("checkpoints/step-*"), *path.glob("best/step-*")} - steps
        before, steps = gone, steps | new
        for folder in sorted(new):
            identity = _identity(folder)
            try:
                lines.append(_checkpoint(folder))
            except CheckpointError as error:
                if identity is not None and _identity(folder) == identity:
                    faults.append(error)
                else:  # the run, which trains, has removed it or is saving it again
                    gone += 1
                    steps.discard(folder)
        if gone == before:
            break
    if store.exists():
        try:
            lines.append(_store(store))
        except DataError as error:
            faults.append(error)
    if faults:
        told = [*map(str, faults), f"{len(lines)} other parts are right."]
        kind = DataError if isinstance(faults[0], DataError) else CheckpointError
        raise kind(" ".join(told))
    if not steps and not gone:
        lines.append(f"{path}: no checkpoint yet")
    if gone:
        lines.append(
            f"{path}: {gone} checkpoint{'s' * (gone > 1)} that the run removed meanwhile, not "
            "compared"
        )
    if not store.exists():
        lines.append(f"{store}: the run's store is not here, so nothing of it was compared")
    return lines
