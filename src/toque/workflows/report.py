"""Reports on folders: pages of stores and runs, comparisons of runs, and checks of hashes."""

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
from toque.reports.comparison import (
    ComparedRun,
    Comparison,
    ScoreDifference,
    compare_scores,
)
from toque.reports.page import write_page
from toque.reports.run_page import build_run_page
from toque.reports.store_page import build_store_page
from toque.reports.verdict import judge_run
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
    "the address to compare",
    "list and read",
    "Nothing there was changed.",
    RunBucketError,
)
_LISTINGS: Final = 5
"""Most listings of a run's checkpoints, which change while it trains."""
_MAX_MANIFEST_BYTES: Final = 1 << 24
"""Largest manifest that is read to distinguish a checkpoint from a store without shards."""


@dataclass(frozen=True)
class WrittenPage:
    """A page in a file."""

    file: Path
    bytes: int

    def __str__(self) -> str:
        """Return the path and the size of the page."""
        return (
            f"The report is {self.file} ({self.bytes / 1024:,.0f} KiB, opens offline)."
        )


def report(path: Model, *, out: str | Path | None = None) -> WrittenPage:
    """Write an offline HTML page about a store or a run, which may be training.

    Args:
        path: A store or a run.
        out: The file of the page. None: report.html in the folder.

    Raises:
        ConfigError: The folder is not a store or run, or `out` is another file or is not writable.
        DataError: The store is unfinished or damaged, or contains a link.
        CheckpointError: The run's folder contains a link, or its metrics cannot be read.
    """
    folder = existing_folder(path)
    is_run = any(os.path.lexists(folder / name) for name in (METRICS, "config.yaml"))
    refuse_links(folder, CheckpointError if is_run else DataError)

    if (folder / METRICS).is_file():
        run = RunRecord(FolderPlace(folder))
        run.read_whole()
        page = build_run_page(run, folder.resolve().name, verdict=judge_run(folder))
    elif (folder / "config.yaml").is_file():
        raise ConfigError(
            f"The run {folder} has no {METRICS} yet, so there is nothing to report. Training "
            "writes this file."
        )
    elif (folder / "manifest.json").is_file() or (folder / "shards").is_dir():
        read_manifest(folder)
        data_report = Report.read_from(folder)
        if data_report is None:
            raise DataError(
                f"{folder}/report.json is missing, damaged, or of another version of Toque. Run "
                "`toque prepare CONFIG` again with the configuration of the store. It keeps the "
                "store and writes the report again."
            )
        page = build_store_page(folder, data_report)
    else:
        raise ConfigError(
            f"{folder} is not a run ({METRICS}) or a store (manifest.json). Name a folder such as "
            "runs/cookbook or stores/cookbook."
        )

    target = folder / "report.html" if out is None else named_path(out)
    return WrittenPage(target, write_page(target, page))


def compare(
    *runs: Model,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Comparison:
    """Compare runs with the first one: settings, curves, scores with intervals, and cost.

    Args:
        runs: Two or more runs or checkpoints, as folders or addresses at gs:// or s3://. A run may
            be training.
        out: The file of the page. None: comparison.html in the parent folder of the first run, or
            in the working directory if that run is in a bucket.
        reporter: Receives the progress.

    Raises:
        ConfigError: There are fewer than two runs, a folder does not exist, or `out` is another
            file or is not writable.
        CheckpointError: A folder contains a link, or a bucket cannot be read.
    """
    records = _find_runs(runs)
    compared: dict[str, ComparedRun] = {}
    notes: list[str] = []
    for name, record in records.items():
        with reporter.working(f"reading {record.address}"):
            compared[name] = _read_run(record, notes)
    first, *others = records
    with reporter.working("drawing resamples"):
        differences = {
            other: _compare_scores(compared, first, other, notes) for other in others
        }
    page = Path("comparison.html")
    if out is not None:
        page = named_path(out)
    elif (folder := records[first].place.folder) is not None:
        page = folder.with_name("comparison.html")
    comparison = Comparison(compared, differences, notes, page)
    write_page(page, comparison.html_page())
    return comparison


def _find_runs(runs: Sequence[Model]) -> dict[str, RunRecord]:
    """Return the runs by their shortest unique names."""
    if len(runs) < 2:
        raise ConfigError(
            "A comparison needs at least two runs: `toque compare RUN RUN`, or compare(run, other) "
            "in Python."
        )
    records = [_find_run(run) for run in runs]
    for record in records:
        if record.place.look(METRICS) is None:
            raise ConfigError(
                f"{record.place.address} is not a run that has begun, because it has no {METRICS}. "
                "Name a run such as runs/my."
            )
    names = [_short_name(record) for record in records]
    if len(set(names)) < len(names):
        names = [record.address for record in records]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(f"{duplicate} is named twice. Name different runs.")
    return dict(zip(names, records, strict=True))


def _short_name(record: RunRecord) -> str:
    place = record.place
    name = (place.folder or PurePosixPath(place.address)).name
    return f"{name}/{record.at}".rstrip("/")


def _find_run(run: Model) -> RunRecord:
    """Return the record of a run, or of a run up to a checkpoint."""
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        address, at = split_address(str(run))
        return RunRecord(BucketPlace(open_bucket(address, _COMPARED)), at=at)
    folder = existing_folder(run)
    if not folder.is_dir():
        raise ConfigError(
            f"The folder {folder} does not exist. Name a run such as runs/my."
        )
    run_folder = run_of(folder) or folder
    refuse_links(run_folder, CheckpointError)
    at = (
        ""
        if run_folder == folder
        else folder.absolute().relative_to(run_folder).as_posix()
    )
    return RunRecord(FolderPlace(run_folder.resolve()), at=at)


def _read_run(record: RunRecord, notes: list[str]) -> ComparedRun:
    """Read a run, and add a note if scores are missing."""
    record.read_whole()
    scores, by_text, problem = _read_scores(record)
    if problem:
        notes.append(problem)
    return ComparedRun(record, _read_settings(record), scores, by_text)


def _read_settings(record: RunRecord) -> Mapping[str, str]:
    """Read the values of config.yaml by their dotted names, without importing code."""
    try:
        values: Any = read_yaml(
            record.text(CONFIG), f"{record.place.address}/{CONFIG}"
        ).value
    except ToqueError:
        return {}
    pairs = leaves(values) if isinstance(values, dict) else []
    return {dotted(path): flow(value) for path, value in pairs}


def _read_scores(record: RunRecord) -> tuple[dict[str, float], ByText | None, str]:
    """Read the final scores, and the scores of each text, with a message if some are missing."""
    run = record.address
    advice = "A run writes them at its end and copies them to its bucket."
    if record.at:
        advice = "Download the run and evaluate the checkpoint."
    if record.place.folder is not None:
        advice = f"`toque evaluate {in_shell(run)}` writes them."
    if not (text := record.text(EVALUATION)):
        return {}, None, f"{run} has no final scores yet. {advice}"
    try:
        final = decode_json(text, FinalScores)
    except msgspec.DecodeError as error:
        return {}, None, f"{run}/{EVALUATION} cannot be read ({error}). {advice}"

    try:
        data = read_small_file(record.place, record.path_of(FILE))
        if data is None:
            return final.metrics, None, f"{run} has no scores per text. {advice}"
        by_text = from_json(data)
    except (OSError, BucketError, ValueError) as error:
        return final.metrics, None, f"{run}/{FILE} cannot be read ({error}). {advice}"
    if by_text.step != final.step:
        return (
            final.metrics,
            None,
            f"{run}/{FILE} has the scores of another step. {advice}",
        )
    return final.metrics, by_text, ""


def _compare_scores(
    runs: Mapping[str, ComparedRun], first: str, other: str, notes: list[str]
) -> list[ScoreDifference]:
    """Compare the scores per text of two runs, if both have them."""
    first_scores, other_scores = runs[first].by_text, runs[other].by_text
    if first_scores is None or other_scores is None:
        return []
    differences, messages = compare_scores(first_scores, other_scores)
    notes += [f"{first} and {other}: {message}" for message in messages]
    return differences


@dataclass(frozen=True)
class Verified:
    """Stores and checkpoints with correct hashes."""

    parts: tuple[str, ...]
    """A line per store and checkpoint."""

    def __str__(self) -> str:
        """Return all lines."""
        return "\n".join(self.parts)


def verify(path: Model) -> Verified:
    """Compare every file of a store, a checkpoint or a run with its SHA-256.

    Raises:
        ConfigError: The folder is not a store, checkpoint or run.
        DataError: A file of a store is missing or changed.
        CheckpointError: A file of a checkpoint is missing or changed.
    """
    folder = existing_folder(path)
    if (folder / "config.yaml").exists():
        refuse_links(folder, CheckpointError)
        return Verified(tuple(_verify_run(folder)))
    if not (folder / "manifest.json").exists():
        raise ConfigError(
            f"{folder} is not a store, checkpoint (both have manifest.json) or run (config.yaml). "
            "Name one of these."
        )
    manifest = folder / "manifest.json"
    is_store = (folder / "shards").is_dir()
    if not is_store and manifest.stat().st_size <= _MAX_MANIFEST_BYTES:
        with suppress(ValueError, RecursionError):
            value = json.loads(manifest.read_bytes())
            is_store = isinstance(value, dict) and "shards" in value
    return Verified(
        (_verify_store(folder) if is_store else _verify_checkpoint(folder),)
    )


def _verify_store(path: Path) -> str:
    manifest = TokenStore.open(path, verify=True).manifest
    n_files = len(manifest.shards) + len(manifest.files) + verify_rows(path)
    return f"{path}: store of {manifest.examples:,} examples, {n_files} files, all hashes correct"


def _verify_checkpoint(path: Path) -> str:
    from toque.training.checkpoint.saved import verify_checkpoint  # loads torch

    checkpoint = verify_checkpoint(path)
    mebibytes = sum(entry.bytes for entry in checkpoint.manifest.files) / 2**20
    layout = checkpoint.layout()
    shards = "" if layout is None else f" in {len(layout.files)} shards"
    return (
        f"{path}: checkpoint of step {checkpoint.step}, {mebibytes:,.1f} MiB{shards}, all hashes "
        "correct"
    )


def _identity(folder: Path) -> tuple[int, int] | None:
    """Return the device and inode of a folder, which change when it is replaced."""
    with suppress(OSError):
        status = folder.stat()
        return status.st_dev, status.st_ino
    return None


def _verify_run(path: Path) -> list[str]:
    """Verify all parts of a run, and return a line per part.

    Raises:
        CheckpointError: A checkpoint is damaged. The message names all damaged parts.
        DataError: Only the store is damaged.
    """
    lines: list[str] = []
    errors: list[ToqueError] = []
    verified: set[Path] = set()
    n_removed = 0
    for _ in range(_LISTINGS):
        n_removed_before = n_removed
        folders = {
            *path.glob("checkpoints/step-*"),
            *path.glob("best/step-*"),
        } - verified
        for folder in sorted(folders):
            identity = _identity(folder)
            try:
                lines.append(_verify_checkpoint(folder))
            except CheckpointError as error:
                if identity is None or _identity(folder) != identity:
                    # The run is training. It removed the checkpoint or is saving it again.
                    n_removed += 1
                    continue
                errors.append(error)
            verified.add(folder)
        if n_removed == n_removed_before:
            break

    store = Path(load_config(path / "config.yaml").config.data.store)
    if store.exists():
        try:
            lines.append(_verify_store(store))
        except DataError as error:
            errors.append(error)
    if errors:
        kind = DataError if isinstance(errors[0], DataError) else CheckpointError
        raise kind(
            " ".join([*map(str, errors), f"{len(lines)} other parts are correct."])
        )
    if not verified and not n_removed:
        lines.append(f"{path}: no checkpoint yet")
    if n_removed:
        noun = "checkpoint" if n_removed == 1 else "checkpoints"
        lines.append(
            f"{path}: not verified: {n_removed} {noun} that the run removed in between"
        )
    if not store.exists():
        lines.append(f"{store}: not verified: the store of the run does not exist")
    return lines
