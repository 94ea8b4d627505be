"""Modules, files and names of the code that pages speak of are there."""

import importlib
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    *sorted((REPOSITORY / "docs").rglob("*.md")),
]
"""The laboratory names what was there on its day."""
WALK = REPOSITORY / "docs" / "explanation" / "walk.md"
MOST_FILES = 15


def inline(page: Path) -> list[str]:
    prose = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`]+)`", prose)


def is_there(dotted: str) -> bool:
    """Whether `toque.models.lora.adapter_files.load` is a module or something in one."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            found = getattr(found, name, None)
        return found is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_modules_are_there(page: Path) -> None:
    named = {
        match[0]
        for code in inline(page)
        for match in re.finditer(r"(?<![\w./-])toque(?:\.[A-Za-z_]\w*)+", code)
    }
    assert sorted(name for name in named if not is_there(name)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_are_there(page: Path) -> None:
    roots = (REPOSITORY, REPOSITORY / "src" / "toque")
    files = {
        match[0]
        for code in inline(page)
        for match in re.finditer(
            r"(?<![\w./-])(?:[\w-]+/)+[\w-]+\.(?:py|sh|toml)\b", code
        )
    }
    lost = [
        name for name in files if not any((root / name).is_file() for root in roots)
    ]
    assert sorted(lost) == []


def test_the_walk_is_short() -> None:
    """Each of the two paths lists at most fifteen files."""
    tables = WALK.read_text(encoding="utf-8").split("\n## ")[1:]
    assert len(tables) == 2
    for table in tables:
        files = re.findall(r"(?m)^\| +\d+ \| `([^`]+)` \|", table)
        assert 5 < len(set(files)) == len(files) <= MOST_FILES
