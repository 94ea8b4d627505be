"""The tree: every test is collected, nothing unpickles, no file names a machine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def test_every_test_file_is_collected(pytestconfig: pytest.Config):
    """pytest passes over folders named `build` and the like without a word."""
    listed = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-qq",
            "-m",
            "",
            "-p",
            "no:cacheprovider",
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.returncode == 0, listed.stdout[-2000:]
    collected = {line.partition(":")[0] for line in listed.stdout.splitlines() if ":" in line}
    missed = [name_of(file) for file in sorted((REPOSITORY / "tests").rglob("test_*.py"))
              if name_of(file) not in collected]  # fmt: skip
    assert missed == []
    assert (REPOSITORY / "tests").as_posix() in [
        (REPOSITORY / path).as_posix() for path in pytestconfig.getini("testpaths")
    ]


def test_no_pickle_and_no_unsafe_loading():
    wrong = [
        f"{name_of(file)}: line {node.lineno}"
        for file in python_files("src")
        for node in ast.walk(parsed(file))
        if (isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "pickle")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"))
        or (isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True")
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["src", "tests", "docs", "lab", "bench"])
def test_no_file_names_this_machine(folder):
    """No committed file may depend on where someone happens to work."""
    machine = str(REPOSITORY.parent) + "/"
    if machine in ("/", "/home/") or len(machine) < 5:
        pytest.skip(f"{machine} is too common a path to search for")
    files = [f for f in (REPOSITORY / folder).rglob("*") if f.suffix in (".py", ".md", ".yaml")]
    assert [str(f) for f in files if machine in f.read_text(encoding="utf-8")] == []
