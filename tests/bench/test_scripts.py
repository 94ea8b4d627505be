"""Scripts of bench/: each answers --help, and `make bench` can start each of bench/speed."""

import argparse
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPTS = sorted(
    path
    for name in ("speed", "robustness", "quality")
    for path in (BENCH / name).glob("*.py")
)
IDS = [f"{path.parent.name}/{path.stem}" for path in SCRIPTS]


def test_scripts_exist():
    assert {"speed/train", "robustness/kills", "quality/plan_beside_sweeps"} <= set(IDS)


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith("usage: ")
    assert f"python bench/{script.parent.name}/{script.name}" in output


@pytest.mark.parametrize(
    "script", [path for path in SCRIPTS if path.parent.name == "speed"]
)
def test_make_bench_can_start_every_script_without_arguments(script, monkeypatch):
    """Every argument has a default."""
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import harness

    options = []
    monkeypatch.setattr(
        harness,
        "main",
        lambda _file, _doc, add_options, _measure: options.append(add_options),
    )
    runpy.run_path(str(script), run_name="__main__")
    parser = argparse.ArgumentParser()
    options[0](parser)
    assert vars(parser.parse_args([]))
