"""Scripts of bench/: each answers --help through the harness; the fit is what the product has."""

import argparse
import contextlib
import json
import math
import runpy
import sys
from pathlib import Path

import pytest

from toque.workflows.first_config.dial import FIT

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPTS = sorted(
    path for name in ("speed", "robustness", "quality") for path in (BENCH / name).glob("*.py")
)
IDS = [f"{path.parent.name}/{path.stem}" for path in SCRIPTS]


def test_there_are_scripts():
    assert {"speed/train", "robustness/kills", "quality/nutrition"} <= set(IDS)
    assert len(SCRIPTS) >= 19


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: ")
    assert f"python bench/{script.parent.name}/{script.name}" in shown


@pytest.mark.parametrize("script", [path for path in SCRIPTS if path.parent.name == "speed"])
def test_make_bench_can_start_every_script_without_arguments(script, monkeypatch):
    """Only `measure` is left out: whatever it needs has a default."""
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import harness

    seen = []
    monkeypatch.setattr(
        harness, "main", lambda _file, _doc, options, _measure: seen.append(options)
    )
    runpy.run_path(str(script), run_name="__main__")
    parser = argparse.ArgumentParser()
    seen[0](parser)
    assert vars(parser.parse_args([]))


def test_the_dial_has_the_fit_of_the_runs(monkeypatch, capsys):
    runs = BENCH.parent / "lab" / "tonight" / "runs.jsonl"
    script = BENCH / "quality" / "fit_runs.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--runs", str(runs)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with contextlib.suppress(SystemExit):  # its own check may fail: the runs are few
        runpy.run_path(str(script), run_name="__main__")
    found = json.loads(capsys.readouterr().out)["ours"]["fit"]
    assert FIT._replace(repeats=math.inf) == pytest.approx(tuple(found.values()), rel=1e-3)
