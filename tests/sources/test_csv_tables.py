import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError
from toque.sources import csv_tables as tables
from toque.sources.csv_tables import row_end, table_blocks, table_records
from toque.sources.records import unpack

STEPS = "Boil the beans in salted water. Serve them warm with butter and dill."
HEADER = ["title", "ingredients", "directions"]


def table(rows, delimiter=",", newline="\n", header=HEADER, quoting=csv.QUOTE_MINIMAL):
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=newline, quoting=quoting)
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
    expected = list(csv.reader(io.StringIO(text.decode(), newline=""), delimiter=delimiter))
    assert [
        tables._fields(row.decode(), delimiter, quoted=True) for row in found if row.strip()
    ] == [row for row in expected if row]


@pytest.mark.parametrize("size", [1, 7, 64])
def test_every_size_of_chunk_gives_the_same_rows(tmp_path, monkeypatch, size):
    rows = [[f"Dish {n}", 'a "quoted"\nline', f"{STEPS}\r\nStep, two"] for n in range(30)]
    path = tmp_path / "t.csv"
    path.write_bytes(table(rows, newline="\r\n").encode())
    monkeypatch.setattr(tables, "CHUNK_BYTES", 500)
    monkeypatch.setattr(tables, "chunks", lambda path, **_: iter_bytes(path.read_bytes(), size))
    found = []
    dialect = tables.dialect_of(path, path.read_bytes(), whole=True, n_known=len)
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


def test_tab_separated_without_quoting(read_text, tmp_path):
    rows = [[f'{n}" pie', '["2 eggs", "1 cup flour"]', f'Use a {n}" tin. {STEPS}'] for n in "567"]
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
        ("2 cups beans, 1 onion, chopped, salt", ("2 cups beans", "1 onion, chopped", "salt")),
        ("beans, onion, salt", ("beans", "onion", "salt")),
        ("<li>2 cups beans</li><li>salt</li>", ("2 cups beans", "salt")),
        ("[{'quantity': 2.0, 'unit': 'cups', 'name': 'beans'}]", ("2 cups beans",)),
        ("{'For the pot': ['beans'], 'For the top': ['salt']}", ("beans", "salt")),
    ],
)
def test_lists_in_cells(read_text, ingredients, lines):
    assert read_text(table([["Bean pot", ingredients, STEPS]])).one.ingredients == lines


def test_row_names_without_a_name_for_them(read_text):
    text = 'title,ingredients,directions\n"1","A","2 eggs","%s"\n"2","B","2 eggs","%s"\n'
    assert [r.title for r in read_text(text % (STEPS, STEPS)).recipes] == ["A", "B"]


def test_a_cut_list_is_dropped_not_taken_for_text(read_text):
    rows = [["A", "['2 eggs', '1 c", STEPS], ["B", "['2 eggs']", STEPS]]
    reading = read_text(table(rows))
    assert reading.dropped == {"broken list": [2]}
    assert reading.one.title == "B"


def test_rows_with_too_few_or_too_many_fields(read_text):
    text = table([["A", "2 eggs", STEPS], ["B", "2 eggs"], ["C", "2 eggs", STEPS, "more"]])
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
    with pytest.raises(DataError, match="more than 20 rows open a quote"):
        read_text(good + damaged)


def test_other_bytes_are_counted_with_their_line(read_text):
    text = table([["A", "2 eggs", STEPS], ["B", "2 eggs", STEPS], ["C", "2 eggs", STEPS]]).encode()
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
