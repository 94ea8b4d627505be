"""Lines keep their numbers whatever ends them; a line that is too long is counted, never held."""

from __future__ import annotations

import gzip
import json

import pytest

from toque.cooking.schemas import RecipeReader
from toque.sources import json_records as json_files
from toque.sources.decompress import LONG_LINE, MAX_RECORD_BYTES
from toque.sources.json_records import decode_line


def lines_of(path):
    """(number, line) of every line of every block."""
    return [
        (number, line)
        for block in RecipeReader().blocks(path)
        for number, line in enumerate(block.payload.splitlines(), start=block.first_line)
    ]


def line(n, more=""):
    return json.dumps({"title": str(n), "ingredients": [more], "directions": []}).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_lines_keep_their_numbers(tmp_path, monkeypatch, end, packed, chunk_bytes):
    whole = json_files.chunks
    monkeypatch.setattr(json_files, "chunks", lambda path, **_: whole(path, chunk_bytes))
    records = [line(n) for n in range(40)]
    records[3:3] = [b"", b""]
    data = b"\xef\xbb\xbf" + end.join(records)
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    found = [(n, text) for n, text in lines_of(path) if text]
    assert found == [(n, text) for n, text in enumerate(records, start=1) if text]


def test_blocks_are_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line(n, "a" * 100_000) for n in range(40)))
    blocks = list(RecipeReader().blocks(path))
    assert len(blocks) >= 4
    assert max(len(b.payload) for b in blocks) < 2.2 * json_files.CHUNK_BYTES


@pytest.mark.parametrize("last", [False, True])
def test_a_line_that_is_too_long_is_counted_and_not_held(tmp_path, last):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(line(1) + b"\n" + line(2) + b"\n")
        for _ in range(50):  # 50 MB on one line
            file.write(b"a" * 1_000_000)
        file.write(b"" if last else b"\n" + line(4))
    found = lines_of(path)
    assert found[:3] == [(1, line(1)), (2, line(2)), (3, LONG_LINE)]
    assert found[3:] == ([] if last else [(4, line(4))])
    assert max(len(b.payload) for b in RecipeReader().blocks(path)) < MAX_RECORD_BYTES
    dropped = {}
    for block in RecipeReader().blocks(path):
        for reason, numbers in RecipeReader().examples(block).dropped.items():
            dropped.setdefault(reason, []).extend(numbers)
    assert dropped["too long"] == [3]


def test_what_python_writes_is_read():
    assert decode_line(b'{"a": NaN, "a": 1, "b": "\\ud800"}') == {"a": 1, "b": "\ud800"}
    huge = {"a": 10**30}
    assert decode_line(json.dumps(huge).encode()) == huge
    with pytest.raises(UnicodeDecodeError):
        decode_line(b'{"a": "\xff"}')
    for bad in (b"{", b"nul", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"):
        with pytest.raises(ValueError):
            decode_line(bad)
