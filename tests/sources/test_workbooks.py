"""Excel workbooks as sources: values, sheets, formulas, and files that are not what they say."""

import datetime as dt
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from toque.config import RunConfig
from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError
from toque.sources import workbooks
from toque.sources.archives import is_archive
from toque.sources.layouts import RECORD_FUNCTIONS, layout_for
from toque.sources.records import examples_in, unpack
from toque.workflows.configure import configure
from toque.workflows.prepared_store import open_sources

openpyxl = pytest.importorskip("openpyxl")
HEADER = ["title", "ingredients", "directions"]
STEPS = (
    "Boil the lentils with the carrots for 20 minutes. Serve the soup hot with bread."
)
SHEET = "xl/worksheets/sheet1.xml"


def recipe(name: str) -> list[str]:
    return [name, "1 cup lentils\n2 carrots\n1 onion", STEPS]


def write(path: Path, **sheets: list[list[object]]) -> Path:
    workbook = openpyxl.Workbook()
    workbook.remove(workbook.active)
    for title, rows in sheets.items():
        sheet = workbook.create_sheet(title)
        for row in rows:
            sheet.append(row)
    workbook.save(path)
    return path


def change(path: Path, member: str, pattern: str, new: str) -> Path:
    """Change the XML of a member."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text, n = re.subn(pattern, lambda _: new, members[member].decode())
    assert n
    members[member] = text.encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def read(path: Path) -> tuple[list[tuple[int, object]], dict[str, int]]:
    """Return the numbered records of a workbook, and its remarks."""
    records, remarks = [], Counter[str]()
    for block in layout_for(path, set()).blocks(()):
        contents = unpack(block)
        remarks.update(contents.meta["remarks"])
        records += RECORD_FUNCTIONS[contents.kind](contents)
    return records, dict(remarks)


def config_of(path: Path) -> RunConfig:
    return configure(data={"sources": [{"path": str(path)}]})


def test_recipes_of_all_sheets_with_the_same_columns_are_read(tmp_path):
    first = [[], HEADER, recipe("Soup"), [], [], recipe("Stew"), []]
    second = [HEADER, recipe("Curry")]
    path = write(tmp_path / "a", Soups=first, More=second, Notes=[["a", "b"], [1, 2]])
    reader = RecipeReader()
    assert reader.schema(path) == "xlsx"
    (block,) = reader.blocks(path)
    found = examples_in(block, reader)
    titles = [example.prompt.split(" using")[0] for example in found.examples]
    assert [title.split(": ")[1] for title in titles] == ["Soup", "Stew", "Curry"]
    assert found.notes["empty rows"] == 2
    assert found.notes["rows of the sheet 'Notes', which has other columns"] == 2
    assert not found.dropped
    records, _ = read(path)
    assert [number for number, _ in records] == [3, 6, 8]


def test_rows_of_hidden_sheets_are_read_and_counted(tmp_path):
    rows = [HEADER, recipe("Curry"), recipe("Dal")]
    path = write(tmp_path / "a.xlsx", Soups=[HEADER, recipe("Soup")], Old=rows)
    workbook = openpyxl.load_workbook(path)
    workbook["Old"].sheet_state = "veryHidden"
    workbook.save(path)
    records, remarks = read(path)
    assert [record["title"] for _, record in records] == ["Soup", "Curry", "Dal"]
    assert remarks == {"rows of the hidden sheet 'Old'": 2}


def test_values_are_the_texts_of_a_csv_export(tmp_path):
    day = dt.datetime
    values = [
        3, 3.0, 0.1 + 0.2, 1e20, True, day(2026, 5, 1), day(2026, 5, 1, 12, 30),
        dt.time(12, 30), dt.timedelta(hours=26), None, " ½ cup\n", "007",
    ]  # fmt: skip
    header = [f"c{i}" for i in range(len(values) - 1)]
    path = write(tmp_path / "a", Sheet=[[*header, None, "x"], [*values, "y", "beyond"]])
    (((_, record),), _) = read(path)
    assert list(record.values()) == [
        "3", "3", "0.3", "1e+20", "true", "2026-05-01", "2026-05-01 12:30:00",
        "12:30:00", "26:00:00", "", " ½ cup\n", "007", "y", "beyond",
    ]  # fmt: skip
    assert list(record)[-3:] == ["(column 12)", "x", "(column 14)"]


def test_declared_dimensions_cut_nothing(tmp_path):
    path = write(tmp_path / "a", Sheet=[HEADER, recipe("Soup"), recipe("Stew")])
    change(path, SHEET, '<dimension ref="A1:C3"', '<dimension ref="A1:B2"')
    records, _ = read(path)
    assert [record["title"] for _, record in records] == ["Soup", "Stew"]
    assert records[1][1]["directions"] == STEPS


def test_formulas_without_values_are_named_and_calculated_ones_are_read(tmp_path):
    rows = [[*HEADER, "n"], [*recipe("Soup"), "=1+1"], [*recipe("Stew"), '=""']]
    path = write(tmp_path / "a", Sheet=[*rows, [*recipe("Curry"), 4]])
    records, _ = read(path)
    assert [number for number, record in records if isinstance(record, str)] == [2, 3]
    assert "formula without a value" in records[0][1]
    assert records[2][1]["n"] == "4"

    change(path, SHEET, r"<f>1\+1</f><v ?/?>(</v>)?", "<f>1+1</f><v>2</v>")
    records, _ = read(path)
    assert [record["n"] for _, record in records] == ["2", "", "4"]


def test_pairs_and_texts_are_read_in_a_folder_and_an_archive(tmp_path, monkeypatch):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "pairs.xlsx", Sheet=[["prompt", "completion"], ["Say", "hello"]])
    write(folder / "texts.xlsx", Sheet=[["text"], ["Once upon a time."]])
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as archive:
        for path in folder.iterdir():
            archive.write(path, path.name)
            assert not is_archive(path)
    for path in (folder, tmp_path / "mine.zip"):
        (source,) = open_sources(config_of(path), say=lambda _: None)
        found = {}
        for file in source.files:
            reader = source.readers.get(file.name, source.reader)
            (block,) = reader.blocks(file.path)
            (found[file.path.name],) = examples_in(block, reader).examples
        assert found["pairs.xlsx"].target == "hello"
        assert found["texts.xlsx"].text == "Once upon a time."


LEVELS = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(9))
LAUGHS = f'<!DOCTYPE a [<!ENTITY a0 "ha">{LEVELS}]>'  # two gigabytes


@pytest.mark.parametrize(
    ("member", "place"), [(SHEET, "Soup"), ("xl/workbook.xml", 'name="Sheet')]
)
def test_xml_entities_do_not_expand(tmp_path, member, place):
    path = write(tmp_path / "a.xlsx", Sheet=[HEADER, recipe("Soup")])
    change(path, member, place, f"{place}&a9;")
    change(path, member, "^", LAUGHS)
    with pytest.raises(DataError, match=r"a\.xlsx is a damaged Excel .*XML"):
        read(path)


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def without_rows(path: Path) -> None:
    write(path, Sheet=[])


def with_a_wrong_text(path: Path) -> None:
    change(path, SHEET, 't="inlineStr"><is><t>Soup</t></is>', 't="s"><v>999</v>')


def with_a_far_row(path: Path) -> None:
    change(path, SHEET, r'<row r="2"', '<row r="2000"')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (damaged, "is a damaged Excel workbook"),
        (with_a_wrong_text, "is a damaged Excel workbook"),
        (without_rows, "an Excel workbook without rows"),
        (with_a_far_row, "more than 1,000 rows"),
    ],
)
def test_damaged_workbooks_are_refused(tmp_path, monkeypatch, spoil, words):
    monkeypatch.setattr(workbooks, "_MAX_ROWS", 1000)
    path = write(tmp_path / "a.xlsx", Sheet=[HEADER, recipe("Soup")])
    spoil(path)
    with pytest.raises(DataError, match=words) as caught:
        read(path)
    assert "a.xlsx" in str(caught.value)


def test_a_bomb_is_refused_by_its_declared_size(tmp_path, monkeypatch):
    monkeypatch.setattr(workbooks, "MIN_BOMB_BYTES", 1 << 20)
    rows = [HEADER, *(recipe(f"Soup {i}") for i in range(9))]
    path = write(tmp_path / "a.xlsx", Sheet=rows)
    assert len(read(path)[0]) == 9
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/media/zeros", bytes(16 << 20))
    with pytest.raises(DataError, match="decompression bomb"):
        read(path)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.xlsx", Sheet=[HEADER, recipe("Soup")])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(DataError, match=r"pip install 'toque\[data\]'"):
        read(path)
