"""Reports on folders: pages of stores and runs, comparisons of runs, and checks of hashes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

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
from toque.reports.page import Page, write_page
from toque.reports.run_page import build_run_page
from toque.reports.store_page import build_store_page
from toque.reports.verdict import judge_run
from toque.runs.history import METRICS
from toque.runs.places import (
    BucketPlace,
    FolderPlace,
    Place,
    is_in_a_bucket,
    read_small_file,
)
from toque.runs.run_record import CONFIG, EVALUATION, FinalScores, RunRecord
from toque.sources.memory_rows import verify_rows
from toque.storage.bucket import BucketError, BucketUse, RunBucketError, open_bucket
from toque.storage.json_files import decode_json
from toque.storage.no_follow import refuse_links
from toque.user_paths import named_path
from toque.workflows.results import Model, TrainedRun, resolve_model
from toque.workflows.saved_steps import run_of, split_address

_COMPARED = BucketUse(
    "the address to compare",
    "list and read",
    "Nothing there was changed.",
    RunBucketError,
)
_MODEL_FILES = ("config.json", "adapter_config.json")
_LISTINGS = 5
"""Maximum number of listings of a run's checkpoints, which change during training."""
_MAX_MANIFEST_BYTES = 1 << 24
"""Maximum size in bytes of a manifest that decides whether a folder is a store."""


@dataclass(frozen=True)
class WrittenPage:
    """A page in a file."""

    file: Path
    bytes: int

    def __str__(self) -> str:
        """Return the path and the size of the page."""
        kibibytes = self.bytes / 1024
        return f"The report is {self.file} ({kibibytes:,.0f} KiB, opens offline)."


def report(path: Model, *, out: str | Path | None = None) -> WrittenPage:
    """Write an offline HTML page about a store or a run, which may be training.

    Args:
        path: A store or a run.
        out: The file for the page. None means report.html in the folder.

    Raises:
        ConfigError: The folder is not a store or run, or `out` is another file or is not writable.
        DataError: The store is unfinished or damaged, or contains a link.
        CheckpointError: The run's folder contains a link, or its metrics cannot be read.
    """
    folder = resolve_model(path)
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
        page = _store_page(folder)
    else:
        raise ConfigError(
            f"{folder} is not a run ({METRICS}) or a store (manifest.json). Name a folder such as "
            "runs/cookbook or stores/cookbook."
        )

    target = folder / "report.html" if out is None else named_path(out)
    return WrittenPage(target, write_page(target, page))


def _store_page(folder: Path) -> Page:
    """Return the page about a store.

    Raises:
        DataError: The store is unfinished, or its data report cannot be read.
    """
    read_manifest(folder)
    data_report = Report.read_from(folder)
    if data_report is None:
        raise DataError(
            f"{folder}/report.json is missing, damaged, or of another version of Toque. Run "
            "`toque prepare CONFIG` again with the configuration of the store. It keeps the "
            "store and writes the report again."
        )
    return build_store_page(folder, data_report)


def compare(
    *runs: Model,
    out: str | Path | None = None,
    reporter: Reporter = SILENT,
) -> Comparison:
    """Compare runs with the first one: settings, curves, scores with intervals, and cost.

    Args:
        runs: Two or more runs or checkpoints, as folders or addresses at gs:// or s3://. A run may
            be training.
        out: The file for the page. None means comparison.html in the first run's parent folder, or
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
    with reporter.working("computing bootstrap intervals"):
        differences = {
            other: _compare_scores(compared, first, other, notes) for other in others
        }
    page = _choose_page(records[first]) if out is None else named_path(out)
    comparison = Comparison(compared, differences, notes, page)
    write_page(page, comparison.html_page())
    return comparison


def _choose_page(first: RunRecord) -> Path:
    """Return the page next to the first run, or in the working directory for a bucket."""
    folder = first.place.folder
    name = "comparison.html"
    return Path(name) if folder is None else folder.with_name(name)


def _find_runs(runs: Sequence[Model]) -> dict[str, RunRecord]:
    """Return the records of two or more runs by their shortest unique names."""
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
                f"{_advise_on_model(record.place)}"
            )
    names = [_short_name(record) for record in records]
    if len(set(names)) < len(names):
        names = [record.address for record in records]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(f"{duplicate} is named twice. Name different runs.")
    return dict(zip(names, records, strict=True))


def _advise_on_model(place: Place) -> str:
    """Explain how to score a model that is not a run, e.g. an average in a run's folder."""
    if all(place.look(name) is None for name in _MODEL_FILES):
        return "Name a run such as runs/my."
    config = "my.yaml"
    if place.folder is not None and (place.folder.parent / CONFIG).is_file():
        config = in_shell(place.folder.parent / CONFIG)
    return (
        "It is a model, which has no stored scores to compare. To score it on the same held-out "
        f"examples, use `toque evaluate {in_shell(place.address)} {config}`."
    )


def _short_name(record: RunRecord) -> str:
    """Return the name of a run's folder, with the path of a checkpoint in it."""
    place = record.place
    name = (place.folder or PurePosixPath(place.address)).name
    return f"{name}/{record.at}" if record.at else name


def _find_run(run: Model) -> RunRecord:
    """Return the record of a run, or of a run up to a checkpoint."""
    if not isinstance(run, TrainedRun) and is_in_a_bucket(str(run)):
        address, step_path = split_address(str(run))
        return RunRecord(BucketPlace(open_bucket(address, _COMPARED)), at=step_path)
    folder = resolve_model(run)
    if not folder.is_dir():
        raise ConfigError(
            f"The folder {folder} does not exist. Name a run such as runs/my."
        )
    run_folder = run_of(folder) or folder
    refuse_links(run_folder, CheckpointError)
    step_path = ""
    if run_folder != folder:
        step_path = folder.absolute().relative_to(run_folder).as_posix()
    return RunRecord(FolderPlace(run_folder.resolve()), at=step_path)


def _read_run(record: RunRecord, notes: list[str]) -> ComparedRun:
    """Read a run. Add a note to `notes` if scores are missing."""
    record.read_whole()
    scores, by_text, problem = _read_scores(record)
    if problem:
        notes.append(f"{problem} {_advise_on_scores(record)}")
    return ComparedRun(record, _read_settings(record), scores, by_text)


def _read_settings(record: RunRecord) -> Mapping[str, str]:
    """Read the values of config.yaml by their dotted names, without importing code."""
    name = f"{record.place.address}/{CONFIG}"
    try:
        values: Any = read_yaml(record.text(CONFIG), name).value
    except ToqueError:
        return {}
    pairs = leaves(values) if isinstance(values, dict) else []
    return {dotted(path): flow(value) for path, value in pairs}


def _read_scores(record: RunRecord) -> tuple[dict[str, float], ByText | None, str]:
    """Read the final scores, and the scores of each text, with a message if some are missing."""
    run = record.address
    text = record.text(EVALUATION)
    if not text:
        return {}, None, f"{run} has no final scores yet."
    try:
        final = decode_json(text, FinalScores)
    except msgspec.DecodeError as error:
        return {}, None, f"{run}/{EVALUATION} cannot be read ({error})."

    try:
        data = read_small_file(record.place, record.path_of(FILE))
        by_text = None if data is None else from_json(data)
    except (OSError, BucketError, ValueError) as error:
        return final.metrics, None, f"{run}/{FILE} cannot be read ({error})."
    if by_text is None:
        return final.metrics, None, f"{run} has no scores per text."
    if by_text.step != final.step:
        return final.metrics, None, f"{run}/{FILE} has the scores of another step."
    return final.metrics, by_text, ""


def _advise_on_scores(record: RunRecord) -> str:
    """Explain how to get the missing scores of a run."""
    if record.place.folder is not None:
        return f"`toque evaluate {in_shell(record.address)}` writes them."
    if record.at:
        return "Download the run and evaluate the checkpoint."
    return "A run writes them at its end and copies them to its bucket."


def _compare_scores(
    runs: Mapping[str, ComparedRun], first: str, other: str, notes: list[str]
) -> list[ScoreDifference]:
    """Compare the scores per text of two runs, if both have them. Add messages to `notes`."""
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
    """One line per store and checkpoint."""

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
    folder = resolve_model(path)
    if (folder / "config.yaml").exists():
        refuse_links(folder, CheckpointError)
        return Verified(tuple(_verify_run(folder)))
    if not (folder / "manifest.json").exists():
        raise ConfigError(
            f"{folder} is not a store, checkpoint (both have manifest.json) or run (config.yaml). "
            "Name one of these."
        )
    verify_part = _verify_store if _is_store(folder) else _verify_checkpoint
    return Verified((verify_part(folder),))


def _is_store(folder: Path) -> bool:
    """Return whether a folder with a manifest is a store, even if its shards are missing."""
    if (folder / "shards").is_dir():
        return True
    manifest = folder / "manifest.json"
    if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
        return False
    with suppress(ValueError, RecursionError):
        value = json.loads(manifest.read_bytes())
        return isinstance(value, dict) and "shards" in value
    return False


def _verify_store(path: Path) -> str:
    """Verify the hashes of a store and of rows saved with it. Return a line about it."""
    manifest = TokenStore.open(path, verify=True).manifest
    n_files = len(manifest.shards) + len(manifest.files) + verify_rows(path)
    return f"{path}: store of {manifest.examples:,} examples, {n_files} files, all hashes correct"


def _verify_checkpoint(path: Path) -> str:
    """Verify the hashes of a checkpoint. Return a line about it."""
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
    checkpoints = _verify_checkpoints(path)
    lines, errors = checkpoints.lines, checkpoints.errors
    store = Path(load_config(path / "config.yaml").config.data.store)
    if store.exists():
        try:
            lines.append(_verify_store(store))
        except DataError as error:
            errors.append(error)
    if errors:
        kind = DataError if isinstance(errors[0], DataError) else CheckpointError
        message = " ".join(map(str, errors))
        raise kind(f"{message} {len(lines)} other parts are correct.")

    n_removed = checkpoints.n_removed
    if not checkpoints.verified and not n_removed:
        lines.append(f"{path}: no checkpoint yet")
    if n_removed:
        noun = "checkpoint" if n_removed == 1 else "checkpoints"
        lines.append(
            f"{path}: not verified: {n_removed} {noun} that the run removed in between"
        )
    if not store.exists():
        lines.append(f"{store}: not verified: the store of the run does not exist")
    return lines


@dataclass
class _VerifiedCheckpoints:
    """Outcome for the checkpoints and best models of a run."""

    lines: list[str] = field(default_factory=list)
    """One line per correct checkpoint."""
    errors: list[ToqueError] = field(default_factory=list)
    """One error per damaged checkpoint."""
    verified: set[Path] = field(default_factory=set)
    """Folders of correct and damaged checkpoints."""
    n_removed: int = 0
    """Number of checkpoints that the run removed or replaced during the check."""


def _verify_checkpoints(run: Path) -> _VerifiedCheckpoints:
    """Verify the checkpoints and best models of a run, which may be training.

    If the run removes one in between, it has also saved a new one, so they are listed again.
    """
    result = _VerifiedCheckpoints()
    for _ in range(_LISTINGS):
        n_removed_before = result.n_removed
        folders = {*run.glob("checkpoints/step-*"), *run.glob("best/step-*")}
        for folder in sorted(folders - result.verified):
            identity = _identity(folder)
            try:
                result.lines.append(_verify_checkpoint(folder))
            except CheckpointError as error:
                if identity is None or _identity(folder) != identity:
                    result.n_removed += 1
                    continue
                result.errors.append(error)
            result.verified.add(folder)
        if result.n_removed == n_removed_before:
            break
    return result
