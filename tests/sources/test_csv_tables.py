import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.config.schema import FilesConfig
from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.errors import DataError
from toque.sources import csv_tables as tables
from toque.sources.csv_tables import row_end, table_blocks, table_records
from toque.sources.documents import DocumentReader, TextReader
from toque.sources.file_kinds import FileJudge
from toque.sources.layouts import TextRecordsError, layout_for
from toque.sources.records import examples_in, unpack
from toque.sources.source_files import blocks_of, find_files, locate_files

STEPS = "Boil the beans in salted water. Serve them warm with butter and dill."
HEADER = ["title", "ingredients", "directions"]


def table(rows, delimiter=",", newline="\n", header=HEADER, quoting=csv.QUOTE_MINIMAL):
    text = io.StringIO()
    writer = csv.writer(
        text, delimiter=delimiter, lineterminator=newline, quoting=quoting
    )
    writer.writerows([header, *rows])
    return text.getvalue()


CELL = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(
    st.lists(st.tuples(CELL, CELL, CELL), min_size=1, max_size=6),
    st.sampled_from(",;\t"),
    st.sampled_from(["\n", "\r\n"]),
)
def test_rows_are_cut_where_csv_cuts_them(rows, delimiter, newline):
    text = table(rows, delimiter, newline).encode()
    at, found = 0, []
    while at < len(text):
        end = row_end(text, at, delimiter, quoted=True, last=True)
        assert end is not None
        assert end > at
        found.append(text[at:end])
        at = end
    expected = list(
        csv.reader(io.StringIO(text.decode(), newline=""), delimiter=delimiter)
    )
    assert [
        tables._fields(row.decode(), delimiter, quoted=True)
        for row in found
        if row.strip()
    ] == [row for row in expected if row]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_size_of_chunk_gives_the_same_rows(tmp_path, monkeypatch, size):
    rows = [
        [f"Dish {n}", 'a "quoted"\nline', f"{STEPS}\r\nStep, two"] for n in range(30)
    ]
    path = tmp_path / "t.csv"
    path.write_bytes(table(rows, newline="\r\n").encode())
    monkeypatch.setattr(tables, "CHUNK_BYTES", 500)
    monkeypatch.setattr(
        tables, "chunks", lambda path, **_: iter_bytes(path.read_bytes(), size)
    )
    found = []
    dialect = tables.dialect_of(
        path, path.read_bytes(), is_entire_file=True, n_known=len
    )
    blocks = list(table_blocks(path, dialect))
    for block in blocks:
        found += list(table_records(unpack(block)))
    assert len(blocks) > 3
    assert [list(record.values()) for _, record in found] == rows
    assert [number for number, _ in found] == list(range(2, 2 + 3 * 30, 3))


def iter_bytes(data, size):
    return (data[i : i + size] for i in range(0, len(data), size))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiters_are_recognised(read_text, delimiter):
    text = table([["Bean pot", "2 cups beans\n1 onion, chopped", STEPS]], delimiter)
    recipe = read_text(text).one
    assert recipe.title == "Bean pot"
    assert recipe.ingredients == ("2 cups beans", "1 onion, chopped")
    assert recipe.steps == (STEPS,)


@pytest.mark.parametrize(
    ("first", "delimiter"),
    [
        ("sep=;\n", ";"), ("\ufeffSEP=,\n", ","), ('"sep=|"\n', "|"), ("sep=^\r\n", "^"),
        ("sep=\\t\n", "\t"), ("sep=;;;\n\n", ";"), ("sep=;\n", ","),
    ],
)  # fmt: skip
def test_a_first_line_that_names_the_delimiter(read_text, first, delimiter):
    rows = [["Beans", "2 cups beans; 1 leek, sliced", STEPS]]
    reading = read_text(first + table([*rows, ["", "1 leek", STEPS]], delimiter))
    assert reading.one.title == "Beans"
    assert reading.dropped == {"no title": [2 + first.count("\n") + 1]}


def test_tab_separated_without_quoting(read_text, tmp_path):
    rows = [
        [f'{n}" pie', '["2 eggs", "1 cup flour"]', f'Use a {n}" tin. {STEPS}']
        for n in "567"
    ]
    text = "\n".join("\t".join(row) for row in [HEADER, *rows])
    reading = read_text(text)
    assert [r.title for r in reading.recipes] == ['5" pie', '6" pie', '7" pie']
    assert reading.recipes[0].ingredients == ("2 eggs", "1 cup flour")
    assert RecipeReader().schema(tmp_path / "file") == "tsv"


@pytest.mark.parametrize(
    ("ingredients", "lines"),
    [
        ("['2 cups beans', 'salt']", ("2 cups beans", "salt")),
        ('["2 cups beans", "salt"]', ("2 cups beans", "salt")),
        ('c("2 cups beans", "salt")', ("2 cups beans", "salt")),
        ("2 cups beans|salt", ("2 cups beans", "salt")),
        ("2 cups beans; salt", ("2 cups beans", "salt")),
        (
            "2 cups beans, 1 onion, chopped, salt",
            ("2 cups beans", "1 onion, chopped", "salt"),
        ),
        ("beans, onion, salt", ("beans", "onion", "salt")),
        ("<li>2 cups beans</li><li>salt</li>", ("2 cups beans", "salt")),
        ("[{'quantity': 2.0, 'unit': 'cups', 'name': 'beans'}]", ("2 cups beans",)),
        ("{'For the pot': ['beans'], 'For the top': ['salt']}", ("beans", "salt")),
    ],
)
def test_lists_in_cells(read_text, ingredients, lines):
    assert read_text(table([["Bean pot", ingredients, STEPS]])).one.ingredients == lines


def test_row_names_without_a_name_for_them(read_text):
    text = (
        'title,ingredients,directions\n"1","A","2 eggs","%s"\n"2","B","2 eggs","%s"\n'
    )
    assert [r.title for r in read_text(text % (STEPS, STEPS)).recipes] == ["A", "B"]


def test_a_stray_delimiter_in_the_first_row_costs_that_row(read_text):
    rows = [["A", "2 eggs", STEPS, "stray"]] + [
        [f"B{n}", "2 eggs", STEPS] for n in range(9)
    ]
    reading = read_text(table(rows))
    assert reading.dropped == {"wrong number of fields": [2]}
    assert [recipe.title for recipe in reading.recipes] == [f"B{n}" for n in range(9)]


@pytest.mark.parametrize("first", ["A", "1"])
def test_rows_that_end_in_a_delimiter(read_text, first):
    text = f'title,ingredients,directions\n{first},"2 eggs","{STEPS}",\nB,"2 eggs","{STEPS}",\n'
    reading = read_text(text)
    assert [r.title for r in reading.recipes] == [first, "B"]
    assert reading.recipes[0].steps == (STEPS,)


def test_questions_with_answers_are_a_table_though_rows_lack_their_last_field(tmp_path):
    rows = [f"How long is {n} boiled?,{n} minutes{',x' * (n % 2)}\n" for n in range(20)]
    (tmp_path / "file").write_text("question,answer,note\n" + "".join(rows))
    with pytest.raises(TextRecordsError, match="prompt: question"):
        RecipeReader().schema(tmp_path / "file")


@pytest.mark.parametrize(
    "cell", ["word " * 60_000, '"word, ""word""\n' + "more\n" * 60_000 + '"']
)
def test_a_first_row_longer_than_the_head_is_a_row(tmp_path, cell):
    (tmp_path / "file").write_text(
        "label,text\na," + cell + "\n" + "b,some other text\n" * 20
    )
    with pytest.raises(TextRecordsError, match="text: text"):
        RecipeReader().schema(tmp_path / "file")


def test_a_row_without_a_line_break_is_a_row(tmp_path):
    path = tmp_path / "one.csv"
    path.write_text("heading,body\nOne,Simmer the beans")
    assert layout_for(path, set()).fits


def test_a_cut_list_is_dropped_not_taken_for_text(read_text):
    rows = [["A", "['2 eggs', '1 c", STEPS], ["B", "['2 eggs']", STEPS]]
    reading = read_text(table(rows))
    assert reading.dropped == {"broken list": [2]}
    assert reading.one.title == "B"


def test_rows_with_too_few_or_too_many_fields(read_text):
    text = table(
        [["A", "2 eggs", STEPS], ["B", "2 eggs"], ["C", "2 eggs", STEPS, "more"]]
    )
    reading = read_text(text)
    assert reading.dropped == {"wrong number of fields": [3, 4]}
    assert reading.one.title == "A"


@pytest.mark.parametrize("reason", ["unclosed quote", "wrong number of fields"])
def test_a_quote_that_never_closes_or_swallows_rows_costs_one_line(read_text, reason):
    lines = table([[f"Dish {n}", "2 eggs", STEPS] for n in range(40)]).splitlines()
    lines[10] = '"Damaged,2 eggs,' + STEPS
    if reason == "wrong number of fields":
        lines[20] = 'Dish 19,"2 eggs",' + STEPS  # where the swallowing ends
    reading = read_text("\n".join(lines))
    assert reading.dropped == {reason: [11]}
    assert reading.kept == 39


def test_quotes_damaged_throughout_are_refused(read_text, monkeypatch, request):
    monkeypatch.setattr(tables, "MAX_RECORD_BYTES", 1000)
    limit = csv.field_size_limit()
    request.addfinalizer(lambda: csv.field_size_limit(limit))
    good = table([["A", "2 eggs", STEPS]] * 50)
    damaged = "".join(f'"Dish {n}{good}' for n in range(21))
    with pytest.raises(DataError, match="more than 20 rows have an unclosed quote"):
        read_text(good + damaged)


def test_other_bytes_are_counted_with_their_line(read_text):
    text = table(
        [["A", "2 eggs", STEPS], ["B", "2 eggs", STEPS], ["C", "2 eggs", STEPS]]
    ).encode()
    text = text.replace(b"\nB,", b"\nB\xff,").replace(b"\nC,", b"\nC\0,")
    reading = read_text(text)
    assert reading.dropped == {"not UTF-8": [3]}
    assert [r.title for r in reading.recipes] == ["A", "C"]


def test_a_line_of_fifty_megabytes_is_counted_and_not_held(tmp_path, read_file):
    path = tmp_path / "t.csv"
    with path.open("wb") as file:
        file.write(table([["A", "2 eggs", STEPS]]).encode() + b'B,"')
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b'",y\n' + b"C,2 eggs," + STEPS.encode())
    reading = read_file(path)
    assert reading.dropped == {"too long": [3]}
    assert [r.title for r in reading.recipes] == ["A", "C"]
    assert reading.largest_block < 4 << 20


LINES = ["Line, number 1", 'Say "hi"', "Two\nlines", "plain"]


def judged(path, **settings):
    source = FilesConfig(path=str(path), **settings)
    return FileJudge(source, "utf-8", reader_for).judge(locate_files(str(path)), print)


def targets_in(source):
    blocks = [block for file in find_files([source]) for block in blocks_of(file)]
    found = [examples_in(block, source.reader) for block in blocks]
    return [e.target for part in found for e in part.examples]


@pytest.mark.parametrize(
    ("header", "settings"),
    [
        ("text", {}),
        ("Text", {}),
        ("text", {"columns": {"text": "text"}}),
        ("my line", {"columns": {"text": "my line"}}),
    ],
)
def test_a_table_of_one_column_is_read_by_rows(tmp_path, header, settings):
    path = tmp_path / "t.csv"
    path.write_text(table([[line] for line in LINES], header=[header]))
    source = judged(path, **settings)
    assert isinstance(source.reader, DocumentReader)
    assert targets_in(source) == LINES
    # As `echo` writes it, without quotes.
    path.write_text(f"{header}\nLine, number 1\nLine, number 2, and more\nplain\n")
    assert targets_in(judged(path, **settings)) == [
        "Line, number 1",
        "Line, number 2, and more",
        "plain",
    ]


@pytest.mark.parametrize("header", ["Ingredients", "my line", "title"])
def test_another_first_line_is_that_of_a_text(tmp_path, header):
    path = tmp_path / "t.txt"
    path.write_text(f"{header}\n2 eggs, beaten\nsalt\n")
    assert isinstance(judged(path).reader, TextReader)


def test_named_columns_are_never_those_of_a_plain_text(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(table([[line] for line in LINES], header=["my line"]))
    for place in (path, tmp_path):
        with pytest.raises(
            DataError, match=r"not a file of records\. It begins with b'(my l|Stir)"
        ):
            judged(place, columns={"text": "line"})
        (tmp_path / "README.md").write_text("# Of these lines\n")
        (tmp_path / "more.txt").write_text("Stir it.\n")
    (tmp_path / "z.csv").write_text(table([[line] for line in LINES], header=["line"]))
    (tmp_path / "old.xls").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1")
    source = judged(tmp_path, columns={"text": "line"})
    assert targets_in(source) == LINES
    assert {Path(name).name: why for name, why in source.left_out.items()} == {
        "README.md": "documentation",
        "more.txt": "plain text beside files of records",
        "old.xls": "an old Office file (.xls, .doc or .ppt), or one with a password",
        "t.csv": "plain text beside files of records",
    }
