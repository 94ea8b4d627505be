import json
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.stores import Made
from toque.cli import main
from toque.data.store.token_column import map_array
from toque.data.store.token_store import TokenStore
from toque.errors import DataError
from toque.storage.json_files import add_seal


@pytest.fixture
def store(made: Made) -> TokenStore:
    return made("store").store


@pytest.fixture
def folder(store: TokenStore) -> Path:
    return store.path


def records(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line.startswith('{"')]
    return {r["prompt"]: r["target"] for r in map(json.loads, lines)}


def test_plain_numpy_reads_it(store: TokenStore) -> None:
    folder = store.path / "shards" / "00000"
    arrays = {p.stem: np.load(p, allow_pickle=False) for p in folder.glob("*.npy")}
    assert arrays["target_tokens"].dtype == np.uint16
    row = arrays["target_tokens"][arrays["target_ends"][4] : arrays["target_ends"][5]]
    assert row.tolist() == store.target(5).tolist()


def test_every_row_reads_back(store: TokenStore, lines_file: Path) -> None:
    codec, written = store.codec(), records(lines_file)
    rows = np.concatenate([store.rows("train"), store.rows("validation")])
    assert len(rows) == len(written) == store.manifest.examples
    for row in rows:
        prompt, target = store.prompt(row), store.target(row)
        assert (prompt[0], target[-1]) == (codec.bos_id, codec.eos_id)
        assert codec.decode(target) == written[codec.decode(prompt).removesuffix("\n")]
        assert store.prompt_lengths[row] == len(prompt)
        assert store.target_lengths[row] == len(target)


def test_the_manifest_adds_up(store: TokenStore) -> None:
    manifest = store.manifest
    assert (
        manifest.records.read
        == manifest.records.kept + sum(manifest.dropped.values())
        == 33
    )
    assert manifest.dropped == {"duplicate": 1, "not JSON": 2}
    assert manifest.splits.train + manifest.splits.validation == manifest.examples
    used = store.split != 255
    assert manifest.tokens.prompt == store.prompt_lengths[used].sum()
    assert manifest.tokens.target == store.target_lengths[used].sum()
    assert (store.n_rows, manifest.examples) == (31, 30)
    assert set(store.rows("train")).isdisjoint(store.rows("validation"))


def test_columns_and_what_there_is_of_them(store: TokenStore) -> None:
    assert store.column("id").tolist()[:3] == [0.0, 1.0, 2.0]
    assert store.column("quality").dtype == np.float32
    assert store.column("key").dtype == np.uint64
    with pytest.raises(
        DataError, match=r"no column 'cuisine'\. Its columns are id, key, quality"
    ):
        store.column("cuisine")


def test_a_folder_without_a_store_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The token store .* does not exist"):
        TokenStore.open(tmp_path / "absent")
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        TokenStore.open(tmp_path)
    (tmp_path / "building.json").write_text("{}")
    with pytest.raises(DataError, match=r"The token store .* is unfinished"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not the manifest of a token store"),
        ("[]", "has format None"),
        (
            '{"format": 2}',
            "has format 2, but this version of toque reads formats up to 1",
        ),
        ('{"format": 1}', "is not the manifest of a token store"),
        (
            '{"format": 1, "fingerprint": ' + "[" * 100_000,
            "is not the manifest of a token store",
        ),
    ],
    ids=["cut", "a list", "newer", "empty", "endless brackets"],
)
def test_a_damaged_or_newer_manifest_is_said(
    store: TokenStore, text: str, message: str
) -> None:
    (store.path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=message):
        TokenStore.open(store.path)


def all_files(store: TokenStore) -> list[str]:
    return [entry.file for entry in [*store.manifest.shards, *store.manifest.files]]


def test_every_missing_short_or_changed_file_is_named(store: TokenStore) -> None:
    TokenStore.open(store.path, verify=True)
    for name in all_files(store):
        path = store.path / name
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(DataError, match=f"{name} is missing"):
            TokenStore.open(store.path)
        path.write_bytes(data[:-1])
        with pytest.raises(
            DataError, match=f"{name} has .* bytes, but .* in the manifest"
        ):
            TokenStore.open(store.path)
        at = random.Random(name).randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        TokenStore.open(store.path)
        with pytest.raises(
            DataError, match=f"{name} has the right size but the wrong content"
        ):
            TokenStore.open(store.path, verify=True)
        path.write_bytes(data)
    TokenStore.open(store.path, verify=True)


def test_opening_reads_no_ids(store: TokenStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = TokenStore.open(store.path)
    assert not opened._sides[1].opened
    opened.target(0)
    assert list(opened._sides[1].opened) == [0]
    assert not opened._sides[0].opened
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


@pytest.mark.usefixtures("small_groups")
def test_a_file_of_a_store_that_is_cut_is_named(store: TokenStore) -> None:
    everything = np.arange(store.n_rows)
    store.sides(everything)
    path = store._shards[1] / "target_tokens.npy"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(DataError, match=r"1/target_tokens\.npy was truncated"):
        store.sides(everything)


@pytest.mark.usefixtures("small_groups")
def test_many_rows_at_once_are_the_rows_one_by_one(store: TokenStore) -> None:
    assert len(store._shards) > 3
    rows = np.array([30, 2, 2, 17, 0, 9])
    sides = zip(store.sides(rows), (store.prompt, store.target), strict=True)
    for pieces, one in sides:
        expected = [one(row).tolist() for row in rows.tolist()]
        assert pieces.lengths.tolist() == [len(ids) for ids in expected]
        joined = [i for ids in expected for i in ids]
        assert pieces.joined([(5, 2)]).tolist() == [*joined, 0, 0]
        assert pieces.last().tolist() == [ids[-1] for ids in expected]
    for absent in (-1, store.n_rows):
        with pytest.raises(IndexError):
            store.sides(np.array([0, absent]))
        with pytest.raises(IndexError):
            store.prompt(absent)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "ends",
            lambda a: a[::-1],
            r"target_ends.npy must have \d+ ascending row ends",
        ),
        ("ends", lambda a: a[:-1], r"target_ends.npy must have \d+ ascending row ends"),
        (
            "tokens",
            lambda a: a.astype("u4"),
            "has ids of type uint32, but the first ids of the store have type uint16",
        ),
        (
            "tokens",
            lambda a: a[:-1],
            r"target_tokens.npy has \d+ ids, but its rows have",
        ),
    ],
    ids=["descending ends", "short ends", "ids of another store", "fewer ids"],
)
def test_an_array_that_does_not_fit_the_others_is_refused(
    folder: Path, name: str, change: Callable[..., Any], message: str
) -> None:
    path = folder / "shards" / "00000" / f"target_{name}.npy"
    np.save(path, change(np.load(path, allow_pickle=False)))
    reseal(folder)
    with pytest.raises(DataError, match=message):
        TokenStore.open(folder).target(0)


@pytest.mark.parametrize("bit", [0, 3, 6, 7])  # a byte with bit 7 is no UTF-8
def test_every_flipped_bit_of_the_manifest_is_found(
    store: TokenStore, bit: int
) -> None:
    path = store.path / "manifest.json"
    data = path.read_bytes()
    # Every byte of the end, where the hash stands, and an even share of the others.
    for at in {*range(0, len(data), 23), *range(len(data) - 100, len(data))}:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        with pytest.raises(DataError, match=r"manifest\.json"):
            TokenStore.open(store.path)
    path.write_bytes(data)
    TokenStore.open(store.path)


# Stores with hashes that fit and arrays, columns or a report that cannot be: named.


def reseal(
    folder: Path, change: Callable[[dict[str, Any]], object] = lambda _: None
) -> None:
    path = folder / "manifest.json"
    held = json.loads(path.read_bytes())
    for entry in [*held["shards"], *held["files"]]:
        entry["bytes"] = (folder / entry["file"]).stat().st_size
    change(held)
    held["self_sha256"] = ""
    path.write_bytes(add_seal(json.dumps(held, indent=1).encode()))


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
def test_a_header_that_cannot_be_is_refused(
    tmp_path: Path, header: str, version: int
) -> None:
    text = header.encode() + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + size + text + bytes(6))
    with pytest.raises(
        DataError, match=r"a\.npy is not a valid array of a token store"
    ):
        map_array(path)


@pytest.mark.parametrize(
    ("file", "array", "read"),
    [
        (
            "shards/00000/quality",
            np.zeros(4, np.float32),
            lambda s: s.column("quality"),
        ),
        (
            "shards/00000/quality",
            np.zeros(31, np.uint16),
            lambda s: s.column("quality"),
        ),
        (
            "shards/00000/quality",
            np.zeros((31, 1), np.float32),
            lambda s: s.column("quality"),
        ),
        ("shards/00000/key", np.zeros(31, np.float32), lambda s: s.column("key")),
        ("split", np.zeros(7, np.uint8), lambda s: s.rows("train")),
    ],
)
def test_a_column_or_split_that_is_not_the_stores_is_named(
    folder: Path,
    file: str,
    array: np.ndarray[Any, Any],
    read: Callable[[TokenStore], object],
) -> None:
    np.save(folder / f"{file}.npy", array)
    reseal(folder)
    with pytest.raises(
        DataError, match=rf"{file}\.npy (has|must|is not a valid array)"
    ):
        read(TokenStore.open(folder))


def test_rows_that_no_file_has_room_for_are_refused(folder: Path) -> None:
    def claim(held: dict[str, Any]) -> None:
        held["rows"] = 10**12
        for entry in held["shards"]:
            entry["examples"] = 10**12

    reseal(folder, claim)
    with pytest.raises(DataError, match=r"lists 1,000,000,000,000 rows"):
        TokenStore.open(folder).prompt_lengths  # noqa: B018


def test_a_column_of_no_numbers_is_refused(folder: Path) -> None:
    reseal(folder, lambda held: held["columns"].update(quality="object"))
    with pytest.raises(DataError, match=r"columns of types other than float32"):
        TokenStore.open(folder)


@pytest.mark.parametrize("edges", [[0.0], [3.0, 2.0], [0.0] * 33])
def test_a_report_whose_bins_are_none_is_no_report(
    folder: Path, edges: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / "report.json"
    held = json.loads(path.read_bytes())
    held["target_histogram"]["edges"] = edges
    path.write_text(json.dumps(held))
    assert main(["report", str(folder)]) == 3
    assert "report.json is missing, damaged" in capsys.readouterr().err
