"""Scripts of bench/: each answers --help, and its record is the harness's."""

import argparse
import ast
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
SCRIPTS = sorted(
    path for name in ("speed", "robustness", "quality") for path in (BENCH / name).glob("*.py")
)
IDS = [f"{path.parent.name}/{path.stem}" for path in SCRIPTS]
LAST = "if __name__ == '__main__':\n    harness.main(__file__, __doc__, options, measure)"
OWNED = {
    "ArgumentParser": "parses its own command line",
    "parse_args": "parses its own command line",
    "dump": "prints a record of its own",
    "version": "looks up versions",
    "processor": "describes the machine",
    "getloadavg": "describes the machine",
}
"""What only bench/*.py may do, by the function that does it."""


def faults_of(text: str) -> set[str]:
    """What a script does past the harness."""
    tree = ast.parse(text)
    found = set()
    if "harness" not in {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}:
        found.add("does not import harness")
    measure = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "measure"]
    if not measure or "harness.Result" not in ast.unparse(measure[0].returns or ast.Constant(0)):
        found.add("has no measure() -> harness.Result")
    if ast.unparse(tree.body[-1]) != LAST:
        found.add("does not end with harness.main")
    for call in (ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Call)):
        called = call.partition("(")[0].rpartition(".")[2]
        found |= {why for name, why in OWNED.items() if name == called}
        if called == "get" and "TOQUE_SHARED" in call:
            found.add("looks for the shared data")
    return found


def test_there_are_scripts():
    assert {"speed/train", "robustness/kills", "quality/nutrition"} <= set(IDS)
    assert len(SCRIPTS) >= 19


@pytest.mark.parametrize("script", SCRIPTS, ids=IDS)
def test_the_record_goes_through_the_harness(script):
    assert faults_of(script.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("import harness", "does not import harness"),
        ("harness.main(__file__, __doc__, options, measure)", "does not end with harness.main"),
        ("-> harness.Result", "has no measure() -> harness.Result"),
    ],
)
def test_a_script_without_the_harness_is_found(planted, fault):
    text = (BENCH / "robustness" / "flips.py").read_text(encoding="utf-8")
    assert fault in faults_of(text.replace(planted, planted.replace("harness", "about")))


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("SHARED = os.environ.get('TOQUE_SHARED') or '../shared'", "looks for the shared data"),
        ("ABOUT = importlib.metadata.version('torch')", "looks up versions"),
        (
            "A = argparse.ArgumentParser(description='x').parse_args()",
            "parses its own command line",
        ),
    ],
)
def test_what_the_harness_owns_is_found_elsewhere(line, fault):
    text = (BENCH / "robustness" / "flips.py").read_text(encoding="utf-8")
    assert faults_of(text.replace("\n\n\n", f"\n{line}\n\n\n", 1)) == {fault}


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
