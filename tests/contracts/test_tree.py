"""The tree: every test is collected, nothing unpickles, no file names a machine."""

import ast
from fnmatch import fnmatch
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def python_files(*folders: str) -> list[Path]:
    return sorted(
        file for folder in folders for file in (REPOSITORY / folder).rglob("*.py")
    )


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def name_of(file: Path) -> str:
    return str(file.relative_to(REPOSITORY))


def test_every_test_file_is_collected(pytestconfig: pytest.Config):
    """pytest passes over folders named `build` and the like without a word."""
    passed_over = pytestconfig.getini("norecursedirs")
    missed = [
        name_of(file)
        for file in sorted((REPOSITORY / "tests").rglob("test_*.py"))
        if any(
            fnmatch(part, p)
            for part in file.relative_to(REPOSITORY).parts
            for p in passed_over
        )
    ]
    assert missed == []
    assert "test_*.py" in pytestconfig.getini("python_files")
    assert pytestconfig.getini("testpaths") == ["tests"]
    ignoring = [name_of(f) for f in (REPOSITORY / "tests").rglob("conftest.py")
                if "collect_ignore" in f.read_text(encoding="utf-8")]  # fmt: skip
    assert ignoring == []


def test_no_pickle_and_no_unsafe_loading():
    wrong = [
        f"{name_of(file)}: line {node.lineno}"
        for file in python_files("src")
        for node in ast.walk(parsed(file))
        if (
            isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and node.module == "pickle")
        or (
            isinstance(node, ast.Attribute)
            and ast.unparse(node) in ("torch.load", "torch.save")
        )
        or (isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True")
    ]
    assert wrong == []


@pytest.mark.parametrize("folder", ["src", "tests", "docs", "lab", "bench"])
def test_no_file_names_this_machine(folder):
    """No committed file may depend on where someone happens to work."""
    machine = str(REPOSITORY.parent) + "/"
    if machine in ("/", "/home/") or len(machine) < 5:
        pytest.skip(f"{machine} is too common a path to search for")
    files = [
        f
        for f in (REPOSITORY / folder).rglob("*")
        if f.suffix in (".py", ".md", ".yaml")
    ]
    assert [str(f) for f in files if machine in f.read_text(encoding="utf-8")] == []
