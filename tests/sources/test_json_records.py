"""Every layout of JSON, and the schemas that come in it."""

import gzip
import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError
from toque.sources import json_records as json_files
from toque.sources.decompress import LONG_LINE, MAX_RECORD_BYTES
from toque.sources.json_records import DamagedJsonError, JsonSplitter, decode_line
from toque.sources.layouts import TextRecordsError

STEPS = ["Rinse the lentils in cold water.", "Simmer them until soft, then serve."]


def generic(n):
    return {
        "title": f"Pot {n}",
        "ingredients": [f"{n} cups lentils", "salt"],
        "directions": STEPS,
    }


RECIPES = [generic(n) for n in range(1, 6)]
LAYOUTS = {
    "lines": "\n".join(json.dumps(r) for r in RECIPES),
    "array": json.dumps(RECIPES),
    "array, indented": json.dumps(RECIPES, indent=2),
    "array, a record a line": "[\n" + ",\n".join(map(json.dumps, RECIPES)) + "\n]\n",
    "dict": json.dumps({f"id{r['title']}": r for r in RECIPES}),
    "dict, indented": json.dumps({r["title"]: r for r in RECIPES}, indent=1),
    "under a key": json.dumps({"version": 1, "recipes": RECIPES}),
    "under a key, indented": json.dumps({"count": 5, "data": RECIPES}, indent=2),
    "several keys": json.dumps(
        {"soups": RECIPES[:2], "more": {"n": 1}, "pots": RECIPES[2:]}
    ),
    "indented, side by side": "\n".join(json.dumps(r, indent=1) for r in RECIPES),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_packed_or_not_and_longer_than_the_head(
    read_text, tmp_path, layout, monkeypatch
):
    text, titles = LAYOUTS[layout], [r["title"] for r in RECIPES]
    for data in (text, gzip.compress(text.encode(), mtime=0)):
        assert [r.title for r in read_text(data).recipes] == titles
        schema = RecipeReader().schema(tmp_path / "file")
        assert schema == ("json-lines" if layout == "lines" else "json")
    if layout != "lines":
        cut = "toque.cooking.schemas.reader.head"
        monkeypatch.setattr(cut, lambda p, **_: (p.read_bytes()[:330], 0))
        assert [r.title for r in read_text(text).recipes] == titles


def test_one_recipe_in_a_file(read_text):
    assert read_text(json.dumps(RECIPES[0], indent=2)).one.title == "Pot 1"
    assert read_text(json.dumps(RECIPES[0])).one.title == "Pot 1"


BODY = "A text on bread and butter. " * 5
FORMS = {
    json.dumps({"id": "1", "text": BODY, "meta": {"from": "x"}}): "objects",
    json.dumps({"id": "1", "text": BODY, "meta": {"from": "x"}}, indent=1): "objects",
    json.dumps({"meta": {"from": "x"}, "text": BODY, "spans": [{"at": 1}]}): "objects",
    json.dumps({"meta": {"from": "x"}, "body": BODY}): "objects",
    json.dumps({"version": 1, "a": RECIPES[0], "b": RECIPES[1]}): "dict",
    json.dumps({"a": RECIPES[0]}): "dict",
}


@pytest.mark.parametrize("text", FORMS)
def test_a_record_with_an_object_in_it_is_no_table_of_records(text):
    assert json_files.form_of(text.encode(), is_entire_file=True) == FORMS[text]


@pytest.mark.parametrize("n_seen", [1.5, 0.5])
def test_lines_that_are_longer_than_the_head_are_lines(n_seen):
    lines = [
        json.dumps({"meta": {"from": "x"}, "body": BODY, "n": n}) for n in range(3)
    ]
    start = "\n".join(lines)[: round(n_seen * len(lines[0]))].encode()
    assert json_files.form_of(start, is_entire_file=False) == "lines"
    for of_one_line in (json.dumps(RECIPES), json.dumps({"recipes": RECIPES})):
        assert json_files.form_of(of_one_line[:300].encode(), is_entire_file=False) in (
            "array",
            "wrapped",
        )


@pytest.mark.parametrize(
    "write", [lambda made: "\n".join(map(json.dumps, made)), json.dumps]
)
def test_a_first_record_longer_than_the_head_is_one_of_them(read_text, write):
    """Nothing was known of the fields then, and texts were refused as recipes without a title."""
    made = [{"text": "word " * (60_000 if i == 0 else 5)} for i in range(9)]
    with pytest.raises(TextRecordsError) as error:
        read_text(write(made))
    assert error.value.columns == {"text": "text"}


def test_recipe1m(read_text, tmp_path):
    layer1 = [
        {
            "ingredients": [{"text": "2 cups lentils"}, {"text": "salt"}],
            "url": "http://example.org/1",
            "partition": "train",
            "title": "Pot",
            "id": "000018c8a5",
            "instructions": [{"text": step} for step in STEPS],
        }
    ]
    recipe = read_text(json.dumps(layer1)).one
    assert RecipeReader().schema(tmp_path / "file") == "recipe1m"
    assert recipe.ingredients == ("2 cups lentils", "salt")
    assert recipe.steps == tuple(STEPS)


def test_recipe_box(read_text, tmp_path):
    box = {
        "a1": {
            "title": "Pot ",
            "ingredients": [
                "2 cups lentils ADVERTISEMENT",
                "salt ADVERTISEMENT",
                "ADVERTISEMENT",
            ],
            "instructions": "\n".join(STEPS),
            "picture_link": None,
        },
        "b2": {},
        "c3": None,
        "d4": {
            "title": None,
            "ingredients": [],
            "instructions": None,
            "picture_link": None,
        },
    }
    reading = read_text(json.dumps(box, indent=2))
    assert RecipeReader().schema(tmp_path / "file") == "recipe-box"
    assert reading.one.ingredients == ("2 cups lentils", "salt")
    assert reading.one.steps == tuple(STEPS)
    assert reading.counts == {"no title": 2, "not an object": 1}
    assert reading.notes["boilerplate lines"] > 0


def test_epicurious(read_text, tmp_path):
    dump = [
        {
            "directions": STEPS,
            "fat": 7.0,
            "date": "2006-09-01T04:00:00.000Z",
            "categories": ["Bean", "Soup"],
            "calories": 426.0,
            "desc": None,
            "protein": 30.0,
            "rating": 2.5,
            "title": "Lentil Pot ",
            "ingredients": ["2 cups lentils", "salt"],
            "sodium": 559.0,
        },
        {},
    ]
    reading = read_text(json.dumps(dump))
    assert RecipeReader().schema(tmp_path / "file") == "epicurious"
    assert reading.one.tags == ("Bean", "Soup")
    assert reading.one.nutrition == {
        "energy_kcal": 426.0,
        "fat_g": 7.0,
        "protein_g": 30.0,
        "sodium_mg": 559.0,
    }
    assert reading.counts == {"no title": 1}


def test_names_in_any_case_and_spelling(read_text):
    record = {
        "Recipe Name": "Pot",
        "Ingredient_List": ["2 cups lentils"],
        "Method": STEPS,
    }
    assert read_text(json.dumps([record] * 2)).recipes[1].steps == tuple(STEPS)


def test_columns_that_the_user_names(read_text):
    record = {"titel": "Topf", "zutaten": ["2 Tassen Linsen"], "schritte": STEPS}
    columns = {"title": "titel", "ingredients": "zutaten", "steps": "schritte"}
    with pytest.raises(
        DataError, match="without a column of title and ingredients and steps"
    ):
        read_text(json.dumps(record))
    assert read_text(json.dumps(record), columns).one.title == "Topf"
    with pytest.raises(
        DataError, match=r"no column for title: name\. Its columns are 'titel'"
    ):
        read_text(json.dumps(record), columns | {"title": "name"})


def test_bad_records_are_counted_with_their_line(read_text):
    lines = [json.dumps(generic(n)) for n in range(8)]
    lines[1] = '{"title": "cut'
    lines[2] = "7"
    lines[3] = '{"title": "Ti\\u0000tle", "ingredients": 5, "directions": {"a": 1}}'
    lines[5] = (
        '{"title": "A", "title": "Twice", ' + lines[5][len('{"title": "Pot 5", ') :]
    )
    data = "\n".join(lines).encode() + b'\n{"title": "\xff\xfe"}'
    reading = read_text(data)
    assert reading.dropped == {
        "not JSON": [2],
        "not an object": [3],
        "no ingredients": [4],
        "not UTF-8": [9],
    }
    assert [r.title for r in reading.recipes] == [
        "Pot 0",
        "Pot 4",
        "Twice",
        "Pot 6",
        "Pot 7",
    ]


def test_records_of_an_indented_array_have_lines_and_of_one_line_numbers(read_text):
    bad = [*RECIPES[:2], {"title": "Empty"}, *RECIPES[2:]]
    indented = json.dumps(bad, indent=1)
    line = indented[: indented.index('"Empty"')].count("\n")
    assert read_text(indented).dropped == {"no ingredients": [line]}
    assert read_text(json.dumps(bad)).dropped == {"no ingredients": [3]}


def test_a_file_cut_inside_a_record_loses_that_one(read_text):
    text = json.dumps(RECIPES)
    reading = read_text(text[: text.index("Pot 5") + 20])
    assert reading.kept == 4
    assert reading.dropped == {"cut short": [5]}


def test_brackets_that_go_wrong_are_refused_with_their_line(read_text, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_CUT_BYTES", 500)
    text = "[" + ",\n".join(json.dumps(generic(n)) for n in range(30)) + "]"
    damaged = text.replace('"Pot 4"', '"Pot 4', 1).replace("]}", "]", 5)
    with pytest.raises(DataError, match=r"line \d+ has no end"):
        read_text(damaged)


TWICE = {
    "arrays": json.dumps(RECIPES[:2]) + "\n" + json.dumps(RECIPES[2:]),
    "arrays, indented": json.dumps(RECIPES[:2], indent=1)
    + json.dumps(RECIPES[2:], indent=1),
    "an array a line": "\n".join(json.dumps([r]) for r in RECIPES),
    "under a key": "\n".join(json.dumps({"recipes": [r]}, indent=1) for r in RECIPES),
    "by id": "\n".join(json.dumps({r["title"]: r}, indent=1) for r in RECIPES),
    "recipes behind an array": json.dumps(RECIPES[:4]) + json.dumps(RECIPES[4]),
    "an array behind one under a key": json.dumps({"recipes": RECIPES[:1]}, indent=1)
    + json.dumps(RECIPES[1:]),
}


@pytest.mark.parametrize("layout", TWICE)
def test_values_behind_the_first_are_read(read_text, layout):
    reading = read_text(TWICE[layout])
    assert [r.title for r in reading.recipes] == [r["title"] for r in RECIPES]
    assert reading.dropped == {}


STRAY = {
    "]": {"not JSON": [3]},
    "}": {"not JSON": [3]},
    "the end": {"not JSON": [3, 3]},
    '"a text"': {"not an object": [3]},
}


@pytest.mark.parametrize("stray", STRAY)
@pytest.mark.parametrize("behind", [RECIPES[3:], []])
def test_what_stands_between_the_values_of_a_file_is_counted(read_text, stray, behind):
    text = f"{json.dumps(RECIPES[:3])}\n\n{stray}\n{json.dumps(behind)}"
    reading = read_text(text if behind else text.removesuffix("\n[]"))
    assert [r.title for r in reading.recipes] == [
        r["title"] for r in RECIPES[: 3 + len(behind)]
    ]
    assert reading.dropped == STRAY[stray]


def test_a_bracket_too_many_inside_an_array_loses_no_record_behind_it(read_text):
    text = ",\n".join(map(json.dumps, RECIPES))
    reading = read_text(f"[\n{text.replace('}', '}}', 1)}\n]")
    assert [r.title for r in reading.recipes] == [r["title"] for r in RECIPES]
    assert reading.dropped == {"not JSON": [2]}


def test_fifty_megabytes_in_one_record_are_counted_and_not_held(tmp_path, read_file):
    path = tmp_path / "file"
    with path.open("w") as file:
        file.write(f'[{json.dumps(RECIPES[0])},{{"title": "')
        for _ in range(50):
            file.write("x" * (1 << 20))
        file.write(f'"}},{json.dumps(RECIPES[1])}]')
    reading = read_file(path)
    assert (reading.dropped, reading.kept) == ({"too long": [2]}, 2)
    assert reading.largest_block < 4 << 20


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "without any records"),
        (
            '[\n{"a": ' + "[" * 3_000_000,
            r"not valid JSON at line \d: it has more than 1000",
        ),
        ('{"id": "1", "ingredients": ["a"], "cuisine": "b"}\n' * 5, "title and steps"),
    ],
    ids=["an empty array", "brackets without end", "no steps"],
)
def test_what_holds_no_recipe_is_refused(read_text, text, words):
    with pytest.raises(DataError, match=words):
        read_text(text)


def test_steps_that_only_link_do_not_come_back(read_text):
    record = RECIPES[0] | {
        "directions": None,
        "Instructions": "See the full recipe at A Blog.",
    }
    assert read_text(json.dumps(record)).counts == {"no steps": 1}


TEXT = st.text(max_size=12)
RECORD = st.dictionaries(
    TEXT,
    TEXT | st.lists(st.dictionaries(TEXT, TEXT, max_size=2), max_size=3),
    max_size=4,
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
    by_id = json.dumps(
        {str(n): r for n, r in enumerate(records)}, indent=indent
    ).encode()
    assert decoded(by_id, 1, size) == records
    under = json.dumps({"meta": {"n": [1]}, "recipes": records}, indent=indent).encode()
    assert decoded(under, 2, size) == records
    side_by_side = b"\n".join(json.dumps(r, indent=indent).encode() for r in records)
    assert decoded(side_by_side, 0, size) == records


def test_other_elements_are_records_too():
    data = b'{"a": null, "b": {"x": 1}, "version": "2", "c": 7, "d": [1]}'
    assert [p.text for p in pieces(data, 1, 3)[0]] == [
        b"null",
        b'{"x": 1}',
        b"7",
        b"[1]",
    ]
    assert [p.text for p in pieces(b'["text", {}, true]', 1)[0]] == [
        b'"text"',
        b"{}",
        b"true",
    ]


def test_lines_are_counted():
    data = json.dumps([{"n": n} for n in range(5)], indent=1).encode()
    for size in (1, 4, 1000):
        assert [p.line for p in pieces(data, 1, size)[0]] == [2, 5, 8, 11, 14]


def test_a_file_that_ends_in_the_middle():
    found, _ = pieces(b'[{"a": 1}, {"b": "cut he', 1, 5)
    assert [(p.text, p.whole) for p in found] == [
        (b'{"a": 1}', True),
        (b'{"b": "cut he', False),
    ]


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


@pytest.mark.parametrize(
    "data", [b"[" * 5000, b'[{"a": ' * 2000, b"[1, " + b"7" * 5000]
)
def test_what_can_be_no_json_is_told_and_never_held(data):
    with pytest.raises(DamagedJsonError):
        pieces(data, 1, 100, max_bytes=2000)


# Lines keep their numbers whatever ends them; a line that is too long is counted, never held.


def lines_of(path):
    """(number, line) of every line of every block."""
    return [
        (number, line)
        for block in RecipeReader().blocks(path)
        for number, line in enumerate(
            block.payload.splitlines(), start=block.first_line
        )
    ]


def line(n, more=""):
    return json.dumps(
        {"title": str(n), "ingredients": [more], "directions": []}
    ).encode()


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_lines_keep_their_numbers(tmp_path, monkeypatch, end, packed, chunk_bytes):
    whole = json_files.chunks
    monkeypatch.setattr(
        json_files, "chunks", lambda path, **_: whole(path, chunk_bytes)
    )
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
def test_a_line_that_is_too_long_is_counted_and_not_held(tmp_path, read_file, last):
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
    assert read_file(path).dropped["too long"] == [3]


def test_what_python_writes_is_read():
    assert decode_line(b'{"a": NaN, "a": 1, "b": "\\ud800"}') == {"a": 1, "b": "\ud800"}
    huge = {"a": 10**30}
    assert decode_line(json.dumps(huge).encode()) == huge
    with pytest.raises(UnicodeDecodeError):
        decode_line(b'{"a": "\xff"}')
    for bad in (b"{", b"nul", b"[" * 100_000, b'{"a": ' + b"1" * 5000 + b"}"):
        with pytest.raises(ValueError):
            decode_line(bad)
