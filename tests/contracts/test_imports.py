"""The shape of the code: what may import what, how long things may be, what must start fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
LEVEL = {
    "errors": -1,  # even units and batch may say what is wrong
    "units": 0,
    "batch": 0,
    "config": 1,
    "data": 1,
    "models": 1,
    "pages": 1,
    "train": 2,
    "evaluation": 2,
    "cooking": 3,
    "build": 4,
    "cli": 5,
    "api": 6,
    "__main__": 6,
}
"""First part of a module's name below `toque` -> its level. Imports go to lower levels only."""
FREE = {"", "__init__"}
"""The package itself: its version, and the public names, imported when they are used."""

LIGHT = [
    "toque.errors",
    "toque.api",
    "toque.units",
    "toque.config",
    "toque.cli",
    "toque.cli.app",
    "toque.data.*",
    "toque.cooking.*",
    "toque.reports.*",
]
"""What must not load torch: commands answer at once, and worker processes stay small."""
HEAVY_DATA = {"toque.data.loader.batch_stream", "toque.data.loader.collate"}
HEAVY = ("torch", "transformers", "peft")


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = ast.parse(file.read_text(encoding="utf-8"), str(file))
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Every toque module a module imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("toque"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "toque":
                yield from (f"toque.{alias.name}" for alias in node.names)
            elif node.module is not None and node.module.startswith("toque."):
                yield node.module


def part(module: str) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


def test_every_module_has_a_level():
    unknown = {part(name) for name in modules()} - LEVEL.keys() - FREE
    assert unknown == set(), "say at which level they are: tests/contracts/test_imports.py"


def test_imports_point_down():
    wrong = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if part(name) not in FREE
        for other in imported(tree)
        if part(other) in LEVEL
        and part(other) != part(name)
        and LEVEL[part(other)] >= LEVEL[part(name)]
    ]
    assert wrong == []


def test_only_the_composer_and_the_command_line_read_the_configuration():
    wrong = [
        f"{name} imports {other}"
        for name, tree in modules().items()
        if part(name) not in ("config", "build", "cli", "api", "__main__", *FREE)
        for other in imported(tree)
        if part(other) == "config"
    ]
    assert wrong == []


def test_files_are_short():
    long = {
        str(file.relative_to(REPOSITORY)): lines
        for folder in (PACKAGE, REPOSITORY / "tests")
        for file in folder.rglob("*.py")
        if (lines := len(file.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert long == {}


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring: saying more must not cost anything."""
    assert function.end_lineno is not None
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    said = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - said


def test_functions_are_short():
    long = [
        f"{name}.{node.name}: {code_lines(node)} lines"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and code_lines(node) > 60
    ]
    assert long == []


def test_no_name_says_nothing():
    banned = ("utils", "common", "helpers", "manager", "misc")
    wrong = [name for name in modules() if any(word in name.split(".")[-1] for word in banned)]
    assert wrong == []


def test_no_pickle_and_no_unsafe_loading():
    wrong = [
        f"{name}: line {node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(a.name == "pickle" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "pickle")
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"))
        or (isinstance(node, ast.keyword) and ast.unparse(node) == "allow_pickle=True")
    ]
    assert wrong == []


def light_modules() -> list[str]:
    exact = {name for name in LIGHT if not name.endswith("*")}
    prefixes = tuple(name[:-1] for name in LIGHT if name.endswith("*"))
    names = (name for name in modules() if name in exact or name.startswith(prefixes))
    return sorted(set(names) - HEAVY_DATA)


def test_light_modules_do_not_load_torch():
    """One fresh process imports them one by one and says which first brought a heavy library."""
    code = (
        "import importlib, sys\n"
        f"for name in {light_modules()!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = [h for h in {HEAVY!r} if h in sys.modules]\n"
        "    if heavy: sys.exit(f'{name} loads {heavy}')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("folder", ["src", "tests", "docs", "bench"])
def test_no_file_names_this_machine(folder):
    """No committed file may depend on where someone happens to work."""
    machine = str(REPOSITORY.parent) + "/"
    if machine in ("/", "/home/") or len(machine) < 5:
        pytest.skip(f"{machine} is too common a path to search for")
    files = [f for f in (REPOSITORY / folder).rglob("*") if f.suffix in (".py", ".md", ".yaml")]
    assert [str(f) for f in files if machine in f.read_text(encoding="utf-8")] == []
