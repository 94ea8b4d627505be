"""Stores with hashes that fit and arrays, columns or a report that cannot be: named."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from line_reader import LineReader
from toque.cli import main
from toque.data.prepare.pipeline import prepare
from toque.data.store.token_column import mapped_array
from toque.data.store.token_store import TokenStore
from toque.errors import DataError
from toque.sources.records import Source
from toque.storage.json_files import sealed


@pytest.fixture
def store(tmp_path: Path, lines_file: Path, settings_for: Callable[..., Any]) -> Path:
    source = Source(str(lines_file), LineReader())
    return prepare([source], store=tmp_path / "store", settings=settings_for()).store.path


def reseal(store: Path, change: Callable[[dict[str, Any]], object] = lambda _: None) -> None:
    path = store / "manifest.json"
    held = json.loads(path.read_bytes())
    for entry in [*held["shards"], *held["files"]]:
        entry["bytes"] = (store / entry["file"]).stat().st_size
    change(held)
    held["self_sha256"] = ""
    path.write_bytes(sealed(json.dumps(held, indent=1).encode()))


HEADERS = {
    "unclosed": "{'descr': '<u2', 'shape': (3,",
    "names of two types": "{'descr': '<u2', b'fortran_order': False, 'shape': (3,), }",
    "a thousand brackets": "(" * 1000,
    "no dictionary": "3",
    "a type that is none": "{'descr': {}, 'fortran_order': False, 'shape': (3,), }",
    "a negative size": "{'descr': '<u2', 'fortran_order': False, 'shape': (-3,), }",
    "two dimensions": "{'descr': '<u2', 'fortran_order': False, 'shape': (1, 3), }",
    "dates": "{'descr': '<M8[s]', 'fortran_order': False, 'shape': (1,), }",
    "texts of no length": "{'descr': '|S0', 'fortran_order': False, 'shape': (9,), }",
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("version", [1, 2])
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: str, version: int) -> None:
    text = header.encode() + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + text + bytes(6))
    with pytest.raises(DataError, match=r"a\.npy is no array of a store"):
        mapped_array(path)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("quality", np.zeros(4, np.float32)),
        ("quality", np.zeros(31, np.uint16)),
        ("quality", np.zeros((31, 1), np.float32)),
        ("key", np.zeros(31, np.float32)),
    ],
)
def test_a_column_that_is_not_the_stores_is_named(
    store: Path, name: str, array: np.ndarray[Any, Any]
) -> None:
    np.save(store / "shards" / "00000" / f"{name}.npy", array)
    reseal(store)
    with pytest.raises(DataError, match=rf"{name}\.npy (holds|is no array)"):
        TokenStore.open(store).column(name)


def test_a_split_of_other_rows_is_named(store: Path) -> None:
    np.save(store / "split.npy", np.zeros(7, np.uint8))
    reseal(store)
    with pytest.raises(DataError, match=r"split\.npy holds 7 numbers of uint8"):
        TokenStore.open(store).rows("train")


def test_rows_that_no_file_has_room_for_are_refused(store: Path) -> None:
    def claim(held: dict[str, Any]) -> None:
        held["rows"] = 10**12
        for entry in held["shards"]:
            entry["examples"] = 10**12

    reseal(store, claim)
    with pytest.raises(DataError, match=r"speaks of 1,000,000,000,000 rows"):
        TokenStore.open(store).prompt_lengths  # noqa: B018


def test_a_column_of_no_numbers_is_refused(store: Path) -> None:
    reseal(store, lambda held: held["columns"].update(quality="object"))
    with pytest.raises(DataError, match=r"columns of other types than float32"):
        TokenStore.open(store)


@pytest.mark.parametrize("edges", [[0.0], [3.0, 2.0], [0.0] * 33])
def test_a_report_whose_bins_are_none_is_no_report(
    store: Path, edges: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = store / "report.json"
    held = json.loads(path.read_bytes())
    held["target_histogram"]["edges"] = edges
    path.write_text(json.dumps(held))
    assert main(["report", str(store)]) == 3
    assert "report.json is missing, damaged" in capsys.readouterr().err
