"""Rows of a program, prepared and trained on like a file of the same rows."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import toque
from fixtures.kitchens import tiny_config
from fixtures.processes import python
from toque.data.store.store_manifest import TokenCounts
from toque.data.store.token_store import TokenStore, store_to_write
from toque.errors import ConfigError, DataError, ToqueError
from toque.reporter import Reporter
from toque.sources.documents import HALF_CHARACTERS
from toque.sources.memory_rows import verify_rows, write_rows
from toque.workflows.prepared_store import open_store

ROWS = [
    {"prompt": f"Dish {n}?", "target": f"Soup number {n}.", "score": n / 2}
    for n in range(24)
]
HELD = [{"prompt": f"Held {n}?", "target": f"Bread number {n}."} for n in range(4)]


class Heard(Reporter):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def generated() -> Iterator[dict[str, Any]]:
    yield from ROWS


FORMS: dict[str, Callable[[], Any]] = {
    "list": lambda: ROWS,
    "generator": generated,
    "dataset": lambda: datasets.Dataset.from_list(ROWS),
    "streamed": lambda: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "frame": lambda: pd.DataFrame(ROWS),
    "table": lambda: pa.Table.from_pylist(ROWS),
    "polars": lambda: pytest.importorskip("polars").DataFrame(ROWS),
}


@pytest.fixture
def config(tmp_path: Path) -> toque.RunConfig:
    store = {"sources": [], "store": str(tmp_path / "store")}
    return tiny_config(run_dir=str(tmp_path / "run"), data=store)


@pytest.fixture(scope="module")
def of_a_file(tmp_path_factory: pytest.TempPathFactory) -> TokenCounts:
    folder = tmp_path_factory.mktemp("file")
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = {"path": str(folder / "a.jsonl")}
    config = tiny_config(data={"sources": [source], "store": str(folder / "store")})
    return toque.prepare(config).store.manifest.tokens


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form_are_the_store_of_a_file(form, config, of_a_file):
    rows = [r | {"score": float(r["score"])} for r in ROWS]
    first = toque.prepare(config, data=FORMS[form]())
    assert first.store.manifest.records.kept == len(rows)
    assert first.report.sources[0].unused == {"score": len(rows)}  # named, as of a file
    (entry,) = first.store.manifest.sources
    kept = [json.loads(line) for line in Path(entry.path).read_text().splitlines()]
    assert kept == rows
    again = toque.prepare(config, data=ROWS)  # the same rows, whatever they come in
    assert again.reused
    assert [p.name for p in Path(entry.path).parent.iterdir()] == [
        Path(entry.path).name
    ]
    assert (
        open_store(config).fingerprint == first.store.fingerprint
    )  # it goes on without them
    assert first.store.manifest.tokens == of_a_file


def test_training_takes_rows_and_finds_them_again(config):
    run = toque.train(config, data=generated(), validation=pd.DataFrame(HELD))
    store = TokenStore.open(config.data.store)
    texts = [
        store.codec().decode(store.target(row)) for row in store.rows("validation")
    ]
    assert texts == [row["target"] for row in HELD]
    longer = toque.configure(config, train={"stop_after": "4 steps"})
    again = toque.train(longer, data=ROWS, validation=HELD)
    assert (run.step, again.step) == (3, 4)  # continued: the store is the same
    assert toque.evaluate(again).metrics["loss"] > 0
    assert toque.train(run.folder / "config.yaml").step == 4
    others = toque.configure(config, run_dir=f"{run.folder}-2")
    before = kept_in(config)
    with pytest.raises(DataError, match="is new or has changed since"):
        toque.train(others, data=ROWS[:9], validation=HELD)
    assert kept_in(config) == before
    replaced = toque.prepare(others, data=ROWS[:9], validation=HELD, replace=True)
    assert replaced.store.manifest.splits.train == 9
    assert len(kept_in(config)) == 2
    assert len(kept_in(config) & before) == 1  # what is held out is the same
    kept = next((Path(config.data.store) / "rows").iterdir())
    assert "files, all hashes correct" in str(toque.verify(config.data.store))
    kept.write_bytes(kept.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(DataError, match=rf"{kept.name} is damaged"):
        toque.verify(config.data.store)


def test_columns_name_the_fields_of_rows_and_stay_with_the_run(config):
    asked = [
        {"q": row["prompt"], "a": row["target"], "score": row["score"]} for row in ROWS
    ]
    held = [{"q": row["prompt"], "a": row["target"]} for row in HELD]
    named = {"prompt": "Asked: {q}", "target": "a"}
    run = toque.train(config, data=asked, validation=held, columns=named)
    store = TokenStore.open(config.data.store)
    decode = store.codec().decode
    for split, rows in (("train", asked), ("validation", held)):
        texts = {
            (decode(store.prompt(row)).rstrip(), decode(store.target(row)))
            for row in store.rows(split)
        }
        assert texts == {(f"Asked: {row['q']}", row["a"]) for row in rows}
    own = toque.configure(run.folder / "config.yaml", train={"stop_after": "4 steps"})
    assert toque.train(own).step == 4  # without the program
    assert toque.prepare(
        own, data=asked, validation=held
    ).reused  # whose own columns they have
    assert toque.prepare(config, data=asked, validation=held, columns=named).reused
    others = named | {"prompt": "q"}
    with pytest.raises(DataError, match=r"in another way \(format, encoding, columns"):
        toque.prepare(config, data=asked, validation=held, columns=others)


def test_columns_that_rows_do_not_have_are_said_to_be_the_argument(config):
    rows = [{"q": row["prompt"], "a": row["target"]} for row in ROWS]
    with pytest.raises(ConfigError, match=r"columns names 'promt', .* Nearest: prompt"):
        toque.prepare(config, data=rows, columns={"promt": "q", "target": "a"})
    with pytest.raises(DataError, match=r"has no column for prompt: x") as refused:
        toque.prepare(config, data=rows, columns={"prompt": "x", "target": "a"})
    assert "argument columns" in " ".join(refused.value.__notes__)


def kept_in(config: toque.RunConfig) -> set[str]:
    return {path.name for path in (Path(config.data.store) / "rows").iterdir()}


def test_texts_are_documents_and_an_index_is_said_to_be_left(config):
    heard = Heard()
    frame = pd.DataFrame({"text": [f"Whisk {n} eggs." for n in range(30)]})
    frame.index = [f"id{n}" for n in range(30)]
    found = toque.prepare(config, data=frame, reporter=heard)
    (said,) = [text for text in heard.notices if "index" in text]
    assert "reset_index()" in said
    assert toque.prepare(config, data=(f"Whisk {n} eggs." for n in range(30))).reused
    assert found.store.manifest.sources[0].kept == 30


def test_values_are_those_that_json_holds(config):
    row = {
        "prompt": np.str_("Soup?"), "target": "Hot.", "n": np.int64(3),
        "t": pd.Timestamp("2026-01-02"), "na": pd.NA, "nat": pd.NaT, "nan": float("nan"),
        "list": np.array([1, 2]),
    }  # fmt: skip
    found = toque.prepare(config, data=[row, *ROWS])
    line = Path(found.store.manifest.sources[0].path).read_text().splitlines()[0]
    assert json.loads(line) == {
        "prompt": "Soup?", "target": "Hot.", "n": 3, "t": "2026-01-02T00:00:00",
        "na": None, "nat": None, "nan": None, "list": [1, 2],
    }  # fmt: skip


def test_half_a_character_of_a_row_is_replaced_and_counted_as_in_a_file(config):
    rows = [
        *ROWS,
        {"prompt": "beans \ud83c and", "target": "Hot.", "score": float("nan")},
    ]
    found = toque.prepare(config, data=rows)
    assert found.report.notes[HALF_CHARACTERS] == 1
    assert found.report.kept == len(rows)


def failing() -> Iterator[dict[str, Any]]:
    yield from ROWS[:5]
    raise OSError("the line broke")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator that fails": (
        failing,
        r"data raised OSError after 5 rows: the line broke",
    ),
    "nothing": (list, "data has no rows"),
    "path": (lambda: "rows.jsonl", r"\{'sources': \[\{'path': 'rows.jsonl'\}\]\}"),
    "splits": (lambda: {"train": ROWS, "test": ROWS}, "a dict of train, test"),
    "number": (lambda: 7, "data is a int, which has no readable rows"),
    "lazy": (
        lambda: SimpleNamespace(collect=list),
        "SimpleNamespace, which has no readable rows",
    ),
    "tuples": (lambda: [ROWS[0], ("a", "b")], r"Row 2 of data is a tuple"),
    "none": (lambda: [ROWS[0], None], r"Row 2 of data is a NoneType"),
    "object": (
        lambda: [{"prompt": object()}],
        "Row 1 of data cannot be saved as JSON: object",
    ),
    "bytes": (lambda: [{"prompt": b"x"}], "Row 1 of data contains bytes in 'prompt'"),
    "bytearray": (
        lambda: [{"prompt": bytearray(b"x")}],
        "Row 1 of data contains bytes in 'prompt'",
    ),
    "memoryview": (
        lambda: [{"prompt": memoryview(b"x")}],
        "contains bytes in 'prompt'",
    ),
    "nested bytes": (
        lambda: [{"messages": [{"role": "user", "content": b"x"}]}],
        "Row 1 of data contains bytes in 'messages', 0, 'content'. Decode",
    ),
    "array of bytes": (
        lambda: [{"prompt": np.array([b"x"])}],
        "contains bytes in 'prompt', 0",
    ),
    "scalar of bytes": (
        lambda: [{"prompt": np.bytes_(b"x")}],
        "contains bytes in 'prompt'",
    ),
    "name of bytes": (lambda: [{"more": {b"x": 1}}], "contains bytes in 'more', b'x'"),
    "columns": (lambda: pd.DataFrame([[1, 2]]), "column 0\\. Column names must"),
    "twice": (
        lambda: pd.DataFrame([[1, 2]], columns=["a", "a"]),
        "column 'a'\\. Column names",
    ),
    "no text": (
        lambda: [{"prompt": "a", "target": ""}] * 3,
        "contains a usable example",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_leaves_nothing(name, config, tmp_path):
    rows, words = REFUSED[name]
    with pytest.raises(DataError, match=words) as caught:
        toque.train(config, data=rows())
    assert "\n" not in str(caught.value)
    left = list(tmp_path.rglob("*.jsonl")) + list(tmp_path.glob("run"))
    assert left == []
    assert name == "no text" or not (tmp_path / "store").exists()
    assert toque.prepare(config, data=ROWS).store.manifest.records.kept == len(ROWS)


def test_one_way_is_named(config, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("mine")
    listed = toque.configure(config, data={"sources": [{"path": "a.jsonl"}]})
    elsewhere = toque.configure(config, data={"store": str(tmp_path / "mine")})
    for settings, more, words in (
        (listed, {}, r"data\.sources, which lists a\.jsonl"),
        (config, {"prepare": False}, "prepare=False does not store rows"),
        (config, {"data": None, "columns": {"text": "a"}}, "columns needs rows"),
        (elsewhere, {}, "has files but no token store"),
    ):
        with pytest.raises(ToqueError, match=words):
            toque.train(settings, **{"data": ROWS} | more)
    assert not (tmp_path / "store").exists()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note.txt"]


KEEP = (
    "from pathlib import Path; from toque.sources.memory_rows import write_rows; "
    "print(write_rows([dict(text='b')], Path({store!r}), name='data'))"
)


def test_another_rank_keeps_its_rows_meanwhile(tmp_path):
    """Each rank writes the rows, and what one finds unfinished may be another's."""
    store = tmp_path / "store"

    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        other = python("-c", KEEP.format(store=str(store)))
        assert Path(other.stdout.strip()).is_file(), other.stderr
        yield {"text": "c"}

    path = write_rows(rows(), store, name="data")
    assert path.read_text() == '{"text":"a"}\n{"text":"c"}\n'
    assert len(list(path.parent.iterdir())) == 2
    gone = int(python("-c", "import os; print(os.getpid())").stdout)
    left = [f".new-{socket.gethostname()}-{gone}.jsonl.{'0' * 16}.partial",
            f"new-{socket.gethostname()}-{gone}.jsonl",
            f"new-{socket.gethostname()}-{gone}.{'0' * 8}.jsonl"]  # fmt: skip
    others = f".new-elsewhere-{gone}.jsonl.{'0' * 16}.partial"
    for name in (*left, others):
        (path.parent / name).write_text("{}")
    write_rows(rows(), store, name="data")
    assert len(list(path.parent.iterdir())) == 3
    assert (path.parent / others).exists()


def test_two_threads_keep_each_its_own_rows(tmp_path, monkeypatch):
    """Both have written before either gives its file its name."""
    both, replace = threading.Barrier(2, timeout=20), Path.replace

    def waiting(path: Path, target: Path) -> Path:
        both.wait()
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", waiting)

    def keep(text: str) -> str:
        return write_rows([text], tmp_path, name="data").read_text()

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(keep, "ab")] == ['{"text":"a"}\n', '{"text":"b"}\n']
    assert verify_rows(tmp_path) == len([*(tmp_path / "rows").iterdir()]) == 2


def test_who_cannot_prepare_takes_no_rows_away(config, monkeypatch):
    store = Path(config.data.store)
    path = write_rows(ROWS, store, name="data")
    with (
        store_to_write(store),
        pytest.raises(DataError, match="Another process is preparing"),
    ):
        toque.prepare(config, data=ROWS)
    assert path.is_file()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="columns names 'promt'"):
        toque.prepare(
            config, data=ROWS, columns={"promt": "prompt", "target": "target"}
        )
    assert path.is_file()
