"""Shape of the tree: short files and functions, small folders, names that say something."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_FILES = 20
SAYS_NOTHING = ("utils", "common", "helpers", "manager", "misc")
NO_NOUN = re.compile(r"(What|Where|How|Which|Whether)\b")
"""A module docstring begins with the noun one would search for."""


def python_files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (REPOSITORY / folder).rglob("*.py"))


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def long_files(files: list[Path]) -> list[str]:
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    return [f"{name_of(file)}: {n} lines" for file, n in lines.items() if n > MOST_LINES]


def test_files_are_short():
    assert long_files(python_files("src", "tests", "bench", "tools")) == []


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: saying more must not cost anything."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    said = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - said


def test_functions_are_short():
    long = [
        f"{name_of(file)}: {node.name} has {code_lines(node)} lines"
        for file in python_files("src")
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and code_lines(node) > MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []


def crowded(files: list[Path]) -> list[str]:
    """Folders with more modules than one thing needs; `__init__.py` is none of them."""
    counts = Counter(file.parent for file in files if file.name != "__init__.py")
    return [f"{folder}: {n} files" for folder, n in counts.items() if n > MOST_FILES]


def test_folders_are_small():
    assert crowded(python_files("src", "tests", "bench", "tools")) == []


def test_names_say_something():
    wrong = [
        name_of(file)
        for file in python_files("src", "tests", "bench", "tools")
        if any(word in file.stem.split("_") for word in SAYS_NOTHING)
    ]
    assert wrong == []


def test_module_docstrings_begin_with_a_noun():
    wrong = [
        f"{name_of(file)}: {doc.splitlines()[0]}"
        for file in python_files("src")
        if NO_NOUN.match(doc := ast.get_docstring(parsed(file)) or "")
    ]
    assert wrong == []


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


def test_the_guards_see_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    for n in range(MOST_FILES + 1):
        (tmp_path / f"m{n}.py").write_text("x = 1\n" * (MOST_LINES + (n == 3)))
    files = sorted(tmp_path.glob("*.py"))
    assert crowded(files) == [f"{tmp_path}: {MOST_FILES + 1} files"]
    assert long_files(files) == [f"m3.py: {MOST_LINES + 1} lines"]
