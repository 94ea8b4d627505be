from __future__ import annotations

import gzip
import json

import pytest

from toque.cooking import jsonlines
from toque.cooking.jsonlines import MAX_LINE_BYTES, TOO_LONG, decode_line, line_blocks
from toque.errors import DataError


def _lines(path):
    """(number, line) of every line of every block."""
    return [
        (number, line)
        for block in line_blocks(path)
        for number, line in enumerate(block.payload.splitlines(), start=block.first_line)
    ]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("block_bytes", [7, 64, 1 << 20])
def test_lines_keep_their_numbers(tmp_path, monkeypatch, end, packed, block_bytes):
    monkeypatch.setattr(jsonlines, "BLOCK_BYTES", block_bytes)
    records = [b'{"n": %d}' % n for n in range(40)]
    records[3:3] = [b"", b""]
    data = b"\xef\xbb\xbf" + end.join(records)
    path = tmp_path / "a.jsonl"
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    found = [(n, line) for n, line in _lines(path) if line]
    assert found == [(n, line) for n, line in enumerate(records, start=1) if line]


def test_blocks_are_bounded(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b'{"x": "' + b"a" * 100_000 + b'"}\n')
    blocks = list(line_blocks(path))
    assert len(blocks) >= 4
    assert max(len(b.payload) for b in blocks) < 2.2 * jsonlines.BLOCK_BYTES


def test_a_line_that_is_too_long_is_counted_and_not_held(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"n": 1}\n')
        file.write(b'{"n": "' + b"a" * (2 * MAX_LINE_BYTES) + b'"}\n')
        file.write(b'{"n": 3}\n')
    assert _lines(path) == [(1, b'{"n": 1}'), (2, TOO_LONG), (3, b'{"n": 3}')]


def test_a_long_last_line_without_a_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + b"a" * (2 * MAX_LINE_BYTES))
    assert [number for number, _ in _lines(path)] == [1, 2]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n\r\n", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b'[{"title": "x"}]', "JSON array"),
        (b'\xef\xbb\xbf[\n{"title": "x"}\n]', "JSON array"),
        (b'{\n  "title": "x"\n}', "over many lines"),
        (b'{"a": {"title": "x"}, "b": {"title": "y"}}', "holding many"),
        (b"name,id\nsoup,3\n", "no line that begins"),
        (b"PAR1\x00\x01", "Parquet"),
        ("{}".encode("utf-16"), "UTF-16"),
        (b"PK\x03\x04abc", "ZIP"),
        (gzip.compress(b'{"title": 1}\n' * 5000, mtime=0)[:60], "truncated gzip"),
        (b"\x1f\x8b\x08\x00garbage garbage garbage", "gzip"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, content, words):
    path = tmp_path / "strange.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        list(line_blocks(path))
    assert str(path) in str(caught.value)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        list(line_blocks(tmp_path / "nothing.jsonl"))
    with pytest.raises(DataError, match="is a folder"):
        list(line_blocks(tmp_path))


def test_dirty_lines_do_not_refuse_a_file(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'garbage\n{"n": 2\n{"n": 3}\n')
    assert len(_lines(path)) == 3


def test_what_python_writes_is_read():
    assert decode_line(b'{"a": NaN, "a": 1, "b": "\\ud800"}') == {"a": 1, "b": "\ud800"}
    huge = {"a": 10**30}
    assert decode_line(json.dumps(huge).encode()) == huge
    with pytest.raises(UnicodeDecodeError):
        decode_line(b'{"a": "\xff"}')
    for bad in (b"{", b"nul", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"):
        with pytest.raises(ValueError):
            decode_line(bad)
