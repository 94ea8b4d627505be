"""What the tests of prepare share: a store prepared, and its bytes."""

import json
import random
from pathlib import Path

import pytest

from line_reader import LineReader
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.sources.records import RecordReader, Source

READER = LineReader()


def content(store: Path) -> dict[str, bytes | str]:
    """Every file of a store; of its report all but the seconds."""
    files = (p for p in store.rglob("*") if p.is_file() and p.name != ".lock")
    held = {str(p.relative_to(store)): p.read_bytes() for p in files}
    report = json.loads(held.pop("report.json", b"{}"))
    return {
        **held,
        "report": json.dumps({k: v for k, v in report.items() if k != "seconds"}),
    }


def prepared(
    path: Path,
    store: Path,
    settings: PrepareSettings,
    *,
    reader: RecordReader = READER,
    **more: object,
) -> PrepareResult:
    return prepare([Source(str(path), reader)], store=store, settings=settings, **more)


def continues(path: Path, store: Path, settings: PrepareSettings) -> None:
    """Preparing again ends with the bytes of a store that was prepared at once."""
    prepared(path, store, settings)
    prepared(path, store.with_name("calm"), settings)
    assert content(store) == content(store.with_name("calm"))


def whole_shards(store: Path) -> list[Path]:
    return [p for p in store.glob("shards/*/shard.json") if p.parent.name.isdecimal()]


def interrupted_after(
    shards: int, path: Path, store: Path, settings: PrepareSettings
) -> None:
    """As Ctrl-C after a number of shards."""

    def stop(done: int, _: int, __: str) -> None:
        if done and len(whole_shards(store)) >= shards:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(path, store, settings, progress=stop, workers=1)


def many_lines(tmp_path: Path, n: int) -> Path:
    """A file of `n` dishes of sixty words each."""
    rng = random.Random(2)
    words = ["salt", "stir", "bake", "egg", "soup", "flour", "warm"]
    path = tmp_path / "many.jsonl"
    records = [
        {"prompt": f"Dish {i}", "target": " ".join(rng.choices(words, k=60))}
        for i in range(n)
    ]
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return path
