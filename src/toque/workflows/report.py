"""Report of a store or a run: one page that opens anywhere, offline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from toque.data.prepare.data_report import Report
from toque.data.store.store_manifest import read_manifest
from toque.errors import CheckpointError, ConfigError, DataError
from toque.reports.page import Page, write_page
from toque.reports.run_page import run_page
from toque.reports.store_page import store_page
from toque.reports.verdict import verdict_of
from toque.runs.history import METRICS
from toque.runs.places import FolderPlace
from toque.runs.run_record import RunRecord
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, existing_folder

_PAGE = "report.html"


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
        page = _of_store(folder)
    else:
        raise ConfigError(
            f"{folder} is neither a run ({METRICS}) nor a store (manifest.json). Name a folder "
            "such as runs/cookbook or stores/cookbook."
        )
    target = folder / _PAGE if out is None else Path(out)
    return WrittenPage(target, write_page(target, page))


def _of_store(folder: Path) -> Page:
    read_manifest(folder)
    found = Report.read_from(folder)
    if found is None:
        raise DataError(
            f"{folder}/report.json is missing, damaged, or of another version of toque. Run "
            "`toque prepare CONFIG` again, with the store's own: what is prepared is kept, and the "
            "report is written anew."
        )
    return store_page(folder, found)
