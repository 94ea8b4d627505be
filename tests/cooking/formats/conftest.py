"""Reading a file with the format reader, its counts checked on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from toque.cooking.formats import FormatReader
from toque.cooking.recipe import Recipe


@dataclass
class Reading:
    """What a file gave."""

    recipes: list[Recipe] = field(default_factory=list)
    read: int = 0
    kept: int = 0
    dropped: dict[str, list[int]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    largest_block: int = 0

    @property
    def counts(self) -> dict[str, int]:
        return {reason: len(numbers) for reason, numbers in self.dropped.items()}

    @property
    def one(self) -> Recipe:
        assert len(self.recipes) == 1, (self.recipes, self.dropped)
        return self.recipes[0]


def _read(path: Path, columns: dict[str, str] | None = None) -> Reading:
    reader = FormatReader(columns or {})
    reading = Reading()
    for block in reader.blocks(path):
        given = reader.examples(block)
        assert given.read == given.kept + sum(map(len, given.dropped.values()))
        assert given.kept == len(given.examples)
        recipes = [r for _, r in reader.recipes(block, Counter()) if isinstance(r, Recipe)]
        assert len(recipes) == given.kept
        reading.recipes += recipes
        reading.read += given.read
        reading.kept += given.kept
        reading.notes.update(given.notes)
        for reason, numbers in given.dropped.items():
            reading.dropped.setdefault(reason, []).extend(numbers)
        reading.largest_block = max(reading.largest_block, len(block.payload))
    return reading


@pytest.fixture(scope="session")
def read_file() -> Callable[..., Reading]:
    """`read_file(path, columns)`: the file's recipes and counts."""
    return _read


@pytest.fixture
def read_text(tmp_path: Path) -> Callable[..., Reading]:
    """`read_text(text, columns)`: as `read_file`, of a file without a telling name."""

    def read(text: str | bytes, columns: dict[str, str] | None = None) -> Reading:
        path = tmp_path / "file"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return _read(path, columns)

    return read
