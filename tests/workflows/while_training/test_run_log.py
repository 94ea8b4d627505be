"""The log of a run: what was told, with times; never worth a run."""

import re
from pathlib import Path

import pytest

from toque.reporter import SILENT, LogReporter
from toque.workflows.run_folder.run_log import LOG, LoggedReporter

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}  (.*)")


def test_what_stays_is_kept_with_its_time_and_passed_on(tmp_path: Path) -> None:
    logged = LoggedReporter(LogReporter(tmp_path / "shown"))
    assert logged.heard
    assert not LoggedReporter(SILENT).heard  # a log alone watches nobody
    logged.notice("told before the folder was there")
    for _session in range(2):
        with logged.writing(tmp_path / "run"):
            logged.line("a line")
            logged.detail("summary:\n  speed")
            logged.progress("step 1", keep=True)
            logged.progress("gone in a moment")
    logged.notice("told afterwards")
    kept = (tmp_path / "run" / LOG).read_text().splitlines()
    told = [LINE.fullmatch(line)[1] for line in kept]
    each = ["a line", "summary:", "  speed", "step 1"]  # every line has its time
    assert told == ["told before the folder was there", *each, *each]
    shown = (tmp_path / "shown").read_text().splitlines()
    assert shown == [told[0], *each, *each, "told afterwards"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_log_that_cannot_be_written_is_said_and_costs_nothing(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    (tmp_path / LOG).symlink_to(tmp_path / "elsewhere")
    logged = LoggedReporter(LogReporter(shown))
    with logged.writing(tmp_path):
        logged.notice("goes on")
    assert "training.log cannot be written (it is a symbolic link" in shown.read_text()
    assert shown.read_text().endswith("goes on\n")
    assert not (tmp_path / "elsewhere").exists()
