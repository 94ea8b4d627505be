from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.sources.json_records import DamagedJsonError, JsonSplitter

TEXT = st.text(max_size=12)
RECORD = st.dictionaries(
    TEXT, TEXT | st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=3), max_size=4
)


def pieces(data, depth, size=1 << 20, **settings):
    splitter = JsonSplitter(depth, **settings)
    found = list(splitter.pieces(data[i : i + size] for i in range(0, len(data), size)))
    return found, splitter


def decoded(data, depth, size):
    return [json.loads(piece.text) for piece in pieces(data, depth, size)[0]]


@given(st.lists(RECORD, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]))
def test_records_are_the_same_for_every_size_of_chunk(records, size, indent):
    array = json.dumps(records, indent=indent, ensure_ascii=False).encode()
    assert decoded(array, 1, size) == records
    by_id = json.dumps({str(n): r for n, r in enumerate(records)}, indent=indent).encode()
    assert decoded(by_id, 1, size) == records
    under = json.dumps({"meta": {"n": [1]}, "recipes": records}, indent=indent).encode()
    assert decoded(under, 2, size) == records
    side_by_side = b"\n".join(json.dumps(r, indent=indent).encode() for r in records)
    assert decoded(side_by_side, 0, size) == records


def test_other_elements_are_records_too():
    data = b'{"a": null, "b": {"x": 1}, "version": "2", "c": 7, "d": [1]}'
    assert [p.text for p in pieces(data, 1, 3)[0]] == [b"null", b'{"x": 1}', b"7", b"[1]"]
    assert [p.text for p in pieces(b'["text", {}, true]', 1)[0]] == [b'"text"', b"{}", b"true"]


def test_lines_are_counted():
    data = json.dumps([{"n": n} for n in range(5)], indent=1).encode()
    for size in (1, 4, 1000):
        assert [p.line for p in pieces(data, 1, size)[0]] == [2, 5, 8, 11, 14]


def test_a_file_that_ends_in_the_middle():
    found, _ = pieces(b'[{"a": 1}, {"b": "cut he', 1, 5)
    assert [(p.text, p.whole) for p in found] == [(b'{"a": 1}', True), (b'{"b": "cut he', False)]


def test_brackets_deeper_than_the_quick_pattern():
    deep = {"a": [[[[[[[[[1]]]]]]]]]}
    data = json.dumps([deep, {"b": 2}]).encode()
    for size in (3, 1000):
        assert decoded(data, 1, size) == [deep, {"b": 2}]


@pytest.mark.parametrize("size", [7, 100, 4096])
@pytest.mark.parametrize(
    "long",
    [
        json.dumps({"steps": "x" * 20_000}),
        json.dumps({"steps": '\\"' * 5_000}),
        json.dumps({"steps": ["y"] * 5_000}),
        json.dumps({"steps": [{"text": "}"}] * 1_000}),
    ],
)
def test_a_record_that_is_too_long_is_told_and_the_next_is_read(long, size):
    data = f'[{{"n": 1}}, {long}, {{"n": 2}}]'.encode()
    found, splitter = pieces(data, 1, size, max_bytes=4000)
    assert [p.text for p in found] == [b'{"n": 1}', None, b'{"n": 2}']
    assert splitter.closed


def test_memory_stays_bounded_for_one_endless_string():
    def chunks():
        yield b'[{"n": 1}, {"steps": "'
        for _ in range(400):
            yield b"x" * (1 << 16)
        yield b'"}, {"n": 2}]'

    tracemalloc.start()
    found = [p.text for p in JsonSplitter(1, max_bytes=1 << 18).pieces(chunks())]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [b'{"n": 1}', None, b'{"n": 2}']
    assert peak < 4 << 20


@given(st.text(alphabet='{}[]",:\\a1 \n', max_size=60), st.integers(0, 2))
def test_damaged_text_never_raises(text, depth):
    for size in (1, 5, 100):
        pieces(text.encode(), depth, size)


@pytest.mark.parametrize("data", [b"[" * 5000, b'[{"a": ' * 2000, b"[1, " + b"7" * 5000])
def test_what_can_be_no_json_is_told_and_never_held(data):
    with pytest.raises(DamagedJsonError):
        pieces(data, 1, 100, max_bytes=2000)
