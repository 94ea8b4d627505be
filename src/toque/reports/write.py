"""`toque report`: a store or a run as one page that opens anywhere, offline."""

from __future__ import annotations

from pathlib import Path

from toque.data.prepare.report import Report
from toque.data.store.manifest import read_manifest
from toque.errors import ConfigError, DataError
from toque.reports.html import RUN, STORE, render
from toque.storage.atomic import atomic_write
from toque.training.observers.metrics_reader import METRICS, read_metrics

PAGE = "report.html"


def run_report(path: Path, *, out: Path | None = None) -> str:
    """Write the page; a line that says where it is.

    Args:
        path: a store folder, or a run folder.
        out: the file; report.html in the folder when None.

    Raises:
        ConfigError: the folder is neither, the run has not begun, or `out` cannot be written.
        DataError: the store is unfinished, damaged, or has no report of this version.
    """
    if (path / METRICS).is_file():
        html = _run_page(path)
    elif (path / "config.yaml").is_file():
        raise ConfigError(
            f"The run {path} has no {METRICS} yet, so there is nothing to report. It appears when "
            "training begins."
        )
    elif (path / "manifest.json").is_file() or (path / "shards").is_dir():
        html = _store_page(path)
    else:
        raise ConfigError(
            f"{path} is neither a run ({METRICS}) nor a store (manifest.json). Name a folder such "
            "as runs/cookbook or stores/cookbook."
        )
    target = out or path / PAGE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, html.encode())
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with --out."
        ) from error
    return f"The report is {target} ({len(html.encode()) / 1024:,.0f} KiB, opens offline)."


def _store_page(folder: Path) -> str:
    from toque.reports.store_report import store_content

    read_manifest(folder)
    report = Report.read_from(folder)
    if report is None:
        raise DataError(
            f"{folder}/report.json is missing, damaged, or of another version of toque. Run "
            "`toque prepare` with the store's configuration again: what is prepared is kept, and "
            "the report is written anew."
        )
    return render(STORE, store_content(folder, report))


def _run_page(folder: Path) -> str:
    from toque.reports.run_report import run_content

    return render(RUN, run_content(folder, read_metrics(folder / METRICS)))
