"""Below the command line nothing prints, and no text names a flag."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent.parent / "src" / "toque"
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]*")
OTHER_PROGRAMS = {
    "models/loading/card_usage.py": {
        "--temp",
        "--jinja",
        "--to",
    },  # llama.cpp's; to paste
    # Of whole commands, to paste.
    "workflows/final_model.py": {"--to"},
    "workflows/inference/pairs.py": {"--to", "--step"},
    "studio/exports.py": {"--to", "--format"},  # of a command that the studio starts
    # nvidia-smi's, Docker's and pip's; and what the doctor calls this program with.
    "workflows/diagnosis/machine_checks.py": {
        "--query-gpu",
        "--format",
        "--shm-size",
    },
    "training/distributed/process_group.py": {"--cpu", "--num_processes"},
    "training/distributed/collectives.py": {
        "--max-restarts"
    },  # torchrun's, as those above
}
"""Flags of other programs, which a text may name."""
TERMINAL = {"rich", "argparse", "cyclopts", "click"}
STREAMS = {f"sys.{name}" for name in ("stdout", "stderr", "__stdout__", "__stderr__")}


def flags(tree: ast.Module) -> Iterator[str]:
    """Every flag in a text, those in docstrings and f-strings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from FLAG.findall(node.value)


def terminals(tree: ast.Module) -> Iterator[str]:
    """Every way to the terminal that does not lead through a reporter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in TERMINAL)
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in TERMINAL:
                yield node.module or ""
            if node.module == "sys":
                yield from (a.name for a in node.names if f"sys.{a.name}" in STREAMS)
        elif isinstance(node, ast.Name) and node.id == "print":
            yield "print"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in STREAMS:
            yield ast.unparse(node)


def below_the_command_line() -> Iterator[tuple[str, ast.Module]]:
    for file in sorted(PACKAGE.rglob("*.py")):
        name = str(file.relative_to(PACKAGE))
        if not name.startswith("cli/"):
            yield name, ast.parse(file.read_text(encoding="utf-8"))


def test_no_text_names_a_flag():
    found = {
        name: wrong
        for name, tree in below_the_command_line()
        if (wrong := set(flags(tree)) - OTHER_PROGRAMS.get(name, set()))
    }
    assert found == {}, "name the argument: toque.errors.argument"


def test_nothing_prints():
    found = {
        name: wrong
        for name, tree in below_the_command_line()
        if (wrong := set(terminals(tree)))
    }
    assert found == {}, "take a toque.reporter.Reporter and tell it"


@pytest.mark.parametrize(
    ("planted", "seen"),
    [
        ('raise ConfigError(f"{n} is wrong: give --n from 1")', "--n"),
        ('"""`toque train --from`: a docstring."""', "--from"),
        ("from functools import partial\nsay = partial(print, 1)", "print"),
        ("import sys\nsys.stderr.write('x')", "sys.stderr"),
        ("from sys import stdout", "stdout"),
        ("from rich.console import Console", "rich.console"),
        ("import argparse", "argparse"),
    ],
)
def test_a_planted_violation_is_seen(planted: str, seen: str) -> None:
    tree = ast.parse(planted)
    assert seen in {*flags(tree), *terminals(tree)}
