"""The tables of faults.md and fault-tests.md name every fault, and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent.parent
LIST = TESTS.parent / "docs" / "reference" / "faults.md"
HELD = TESTS.parent / "lab" / "fault-tests.md"
NUMBERS = list(range(1, 92))
_NODE = re.compile(r"`([a-z_0-9/]+\.py)::(\w+)`")


def rows(page: Path, heading: str) -> dict[int, list[str]]:
    """Cells of the table below `heading`, by the number they begin with."""
    text = (
        page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    )
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| *\d+ *\|", line)
    ]
    assert len({int(row[0]) for row in cells}) == len(cells)
    return {int(row[0]): row[1:] for row in cells}


@cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_fault_says_what_you_get_and_what_others_do() -> None:
    told = rows(LIST, "The list")
    assert sorted(told) == NUMBERS
    assert [n for n in NUMBERS if len(told[n]) != 3 or not all(told[n])] == []


def test_every_fault_has_tests_that_exist() -> None:
    held = rows(HELD, "Tests")
    assert sorted(held) == NUMBERS
    named = {number: _NODE.findall(held[number][0]) for number in NUMBERS}
    assert [number for number in NUMBERS if not named[number]] == []
    missing = [
        f"{number}: {file}::{name}"
        for number in NUMBERS
        for file, name in named[number]
        if not (TESTS / file).is_file() or name not in functions(TESTS / file)
    ]
    assert missing == []


def test_every_test_with_a_number_stands_in_its_row() -> None:
    held = rows(HELD, "Tests")
    anywhere = re.compile(r"test_faults?_(\d+)_(?:and_(\d+)_)?")
    in_faults = re.compile(r"test_(?:faults?_)?(\d+)_(?:and_(\d+)_)?")
    lost = [
        f"{number}: {place}::{name}"
        for path in sorted(TESTS.rglob("test_*.py"))
        for place in [path.relative_to(TESTS).as_posix()]
        for name in sorted(functions(path))
        if (
            found := (in_faults if place.startswith("faults/") else anywhere).match(
                name
            )
        )
        for number in filter(None, found.groups())
        if f"`{place}::{name}`" not in held[int(number)][0]
    ]
    assert lost == []
