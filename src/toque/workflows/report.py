"""Report of a store or a run: one page that opens anywhere, offline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from toque.data.prepare.data_report import Report
from toque.data.store.manifest import read_manifest
from toque.errors import CheckpointError, ConfigError, DataError
from toque.reports.html import RUN, STORE, render, write_page
from toque.reports.run_report import run_content
from toque.reports.store_report import store_content
from toque.reports.verdict import verdict_of
from toque.runs.history import METRICS, read_metrics
from toque.storage.no_follow import refuse_links
from toque.workflows.results import Model, existing_folder

_PAGE = "report.html"


@dataclass(frozen=True)
class Page:
    """A written page."""

    file: Path
    bytes: int

    def __str__(self) -> str:
        """A sentence for people."""
        return f"The report is {self.file} ({self.bytes / 1024:,.0f} KiB, opens offline)."


def report(path: Model, *, out: str | Path | None = None) -> Page:
    """Write one offline HTML page about a store or a run, finished or not.

    Args:
        path: a store folder, or a run.
        out: the file to write; report.html in the folder when None.

    Raises:
        ConfigError: neither a store nor a run, or `out` cannot be written or is no page.
        DataError: the store is unfinished or damaged, or holds a link.
        CheckpointError: the run's folder holds a link.
    """
    folder = existing_folder(path)
    is_run = any(os.path.lexists(folder / name) for name in (METRICS, "config.yaml"))
    refuse_links(folder, CheckpointError if is_run else DataError)
    if (folder / METRICS).is_file():
        events = read_metrics(folder / METRICS)
        html = render(RUN, run_content(folder, events, verdict_of(folder)))
    elif (folder / "config.yaml").is_file():
        raise ConfigError(
            f"The run {folder} has no {METRICS} yet, so there is nothing to report. It appears "
            "when training begins."
        )
    elif (folder / "manifest.json").is_file() or (folder / "shards").is_dir():
        html = _store_page(folder)
    else:
        raise ConfigError(
            f"{folder} is neither a run ({METRICS}) nor a store (manifest.json). Name a folder "
            "such as runs/cookbook or stores/cookbook."
        )
    target = folder / _PAGE if out is None else Path(out)
    return Page(target, write_page(target, html))


def _store_page(folder: Path) -> str:
    read_manifest(folder)
    found = Report.read_from(folder)
    if found is None:
        raise DataError(
            f"{folder}/report.json is missing, damaged, or of another version of toque. Run "
            "`toque prepare CONFIG` again, with the store's own: what is prepared is kept, and the "
            "report is written anew."
        )
    return render(STORE, store_content(folder, found))
