"""A limit on examples ends reading early, and the store does not depend on who read how far."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fixtures.stores import recipe_text
from store_checks import READER, content, interrupted_after
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.data.prepare.shards import NOT_READ
from toque.data.prepare.store_plan import PrepareSettings
from toque.sources.records import Source

Make = Callable[..., PrepareSettings]
pytestmark = pytest.mark.usefixtures("small_groups")


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Four files of sixty recipes; every tenth repeats the one before."""
    folder = tmp_path / "dump"
    folder.mkdir()
    rng = random.Random(6)
    for name in "abcd":
        lines: list[str] = []
        for i in range(60):
            record = {"id": ord(name) * 1000 + i, "prompt": f"{name}{i}"}
            again = lines[-1] if i % 10 == 9 else None
            lines.append(again or json.dumps(record | {"target": recipe_text(rng)}))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def prepared(dump: Path, store: Path, settings: PrepareSettings, **more: object) -> PrepareResult:
    return prepare([Source(str(dump), READER)], store=store, settings=settings, **more)


def test_reading_stops_and_files_take_turns(dump: Path, tmp_path: Path, settings_for: Make) -> None:
    result = prepared(dump, tmp_path / "s", settings_for(max_examples=40))
    report = result.report
    assert report.examples == 40
    assert report.read < 120
    assert report.notes[NOT_READ] > 0
    assert report.read == report.kept + sum(report.dropped.values())
    used = np.asarray(result.store.column("id"))[result.store.split != 255].astype(int)
    per_file = np.bincount(used // 1000 - ord("a"), minlength=4)
    assert per_file.min() >= 8


def test_it_does_not_depend_on_workers_or_interruptions(
    dump: Path, tmp_path: Path, settings_for: Make
) -> None:
    settings = settings_for(max_examples=60)
    prepared(dump, tmp_path / "calm", settings, workers=1)
    prepared(dump, tmp_path / "two", settings, workers=2)
    assert content(tmp_path / "two") == content(tmp_path / "calm")
    interrupted_after(2, dump, tmp_path / "broken", settings)
    prepared(dump, tmp_path / "broken", settings, workers=2)
    assert content(tmp_path / "broken") == content(tmp_path / "calm")


def test_a_limit_beyond_the_data_reads_everything(
    dump: Path, tmp_path: Path, settings_for: Make
) -> None:
    report = prepared(dump, tmp_path / "s", settings_for(max_examples=1000)).report
    assert (report.read, report.examples) == (240, 216)
    assert NOT_READ not in report.notes
    exact = prepared(dump, tmp_path / "t", settings_for(max_examples=216)).report
    assert exact.examples == 216
