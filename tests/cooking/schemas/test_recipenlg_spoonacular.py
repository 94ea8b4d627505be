import csv
import io
import json

import pytest

from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError
from toque.sources import columnar
from toque.sources.records import unpack

STEPS = [
    "Rinse the lentils in cold",
    "water. Drain",
    "them.",
    "Simmer for",
    "20 minutes.",
]
JOINED = ("Rinse the lentils in cold water. Drain them.", "Simmer for 20 minutes.")


def recipenlg(rows, columns):
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


ROW = {
    "": "0", "Unnamed: 0": "0", "title": "Lentil Pot", "link": "www.example.org/1",
    "ingredients": json.dumps(["1 c. lentils", "1/2 tsp. salt"]),
    "directions": json.dumps(STEPS), "source": "Gathered", "NER": json.dumps(["lentils"]),
}  # fmt: skip


@pytest.mark.parametrize(
    "columns",
    [
        ("", "title", "ingredients", "directions", "link", "source", "NER"),
        ("Unnamed: 0", "title", "ingredients", "directions", "link", "source", "NER"),
        ("title", "ingredients", "directions", "NER"),
        ("title", "NER", "ingredients", "directions", "link"),
    ],
)
def test_recipenlg_with_and_without_its_other_columns(read_text, tmp_path, columns):
    reading = read_text(recipenlg([ROW], columns))
    assert RecipeReader().schema(tmp_path / "file") == "recipenlg"
    assert reading.one.ingredients == ("1 c. lentils", "1/2 tsp. salt")
    assert reading.one.steps == JOINED
    assert reading.one.source == (ROW["link"] if "link" in columns else "")
    assert reading.notes["sentences split in the middle rejoined"] == 3


LONG = "Beat the eggs with a pinch of salt until they are stiff, then bake them until golden."
EXTENDED = (
    "[{'aisle': 'Beans', 'amount': 1.0, 'meta': array(['red', \"cook's\"], dtype=object),"
    " 'name': 'lentils', 'original': '1 cup red lentils'}\n"
    " {'aisle': None, 'amount': 2.0, 'meta': array([], dtype=object), 'name': 'lemon',"
    " 'original': '2 lemons'}]"
)
SPOON = {
    "vegan": True, "id": 1, "title": "Lentil Pot", "extendedIngredients": EXTENDED,
    "ingredients": "lentils, lemon", "readyInMinutes": 45, "cookingMinutes": None, "servings": 4,
    "dishTypes": "['side dish' 'lunch']", "cuisines": "[]", "instructions":
    "<ol><li>Rinse the lentils.</li>"
    "<li>Simmer them&nbsp;until soft, then squeeze in the juice.</li></ol>",
    "analyzedInstructions": None, "sourceUrl": "https://example.org/1",
    "image": b"\xff\xd8 a picture",
}  # fmt: skip


def written(path, rows, **settings):
    arrow = pytest.importorskip("pyarrow")
    module = pytest.importorskip("pyarrow.parquet")
    module.write_table(arrow.Table.from_pylist(rows), path, **settings)
    return path


def test_spoonacular(tmp_path, read_file):
    path = written(tmp_path / "file", [SPOON])
    reading = read_file(path)
    recipe = reading.one
    assert RecipeReader().schema(path) == "spoonacular"
    assert recipe.ingredients == ("1 cup red lentils", "2 lemons")
    rest = "Simmer them until soft, then squeeze in the juice."
    assert recipe.steps == ("Rinse the lentils.", rest)
    assert recipe.tags == ("side dish", "lunch")
    assert recipe.minutes is None
    assert reading.notes["times that are only the API's default"] == 1


def test_spoonacular_odd_rows(tmp_path, read_file):
    step = "Rinse the lentils well and simmer them in fresh water until soft."
    analysed = f"[{{'name': '', 'steps': array([{{'number': 1, 'step': '{step}'}}])}}]"
    rows = [
        SPOON | {"cookingMinutes": 30.0},
        SPOON | {"extendedIngredients": EXTENDED[1:-1].replace("\n", ", ")},
        SPOON | {"instructions": None, "analyzedInstructions": analysed},
        SPOON
        | {"instructions": '<p>See the full recipe at <a href="x">A Blog.</a></p>'},
        SPOON | {"extendedIngredients": "[{'a': 1}\n ...\n {'b': 2}]"},
        SPOON | {"extendedIngredients": "[{'cut", "ingredients": None},
    ]
    reading = read_file(written(tmp_path / "file", rows))
    assert reading.recipes[0].minutes == 45
    assert reading.recipes[1].ingredients == ("1 cup red lentils", "2 lemons")
    assert reading.recipes[2].steps == (step,)
    assert reading.recipes[3].ingredients == ("lentils", "lemon")
    assert reading.counts == {"no steps": 1, "no ingredients": 1}
    assert reading.notes["steps that only link to a page"] == 1


def test_generic_parquet_with_lists_nulls_and_structs(tmp_path, read_file):
    rows = [
        {"name": "A", "ingredients": ["2 eggs", None], "method": [LONG]},
        {"name": None, "ingredients": None, "method": None},
    ]
    path = written(tmp_path / "file", rows)
    reading = read_file(path)
    assert RecipeReader().schema(path) == "parquet"
    assert reading.one.ingredients == ("2 eggs",)
    assert reading.dropped == {"no title": [2]}


def test_text_stored_as_bytes_and_bytes_that_are_no_text(tmp_path, read_file):
    rows = [
        {"title": b"A", "ingredients": b"2 eggs", "directions": LONG.encode()},
        {"title": b"\xff", "ingredients": b"2 eggs", "directions": LONG.encode()},
    ]
    reading = read_file(written(tmp_path / "file", rows))
    assert reading.one.title == "A"
    assert reading.dropped == {"not UTF-8": [2]}


def test_many_rows_in_small_blocks_without_pictures(tmp_path, read_file, monkeypatch):
    monkeypatch.setattr(columnar, "CHUNK_BYTES", 5000)
    rows = [SPOON | {"title": f"Pot {n}", "id": n} for n in range(300)]
    path = written(tmp_path / "file", rows, row_group_size=70)
    reading = read_file(path)
    assert [r.title for r in reading.recipes] == [f"Pot {n}" for n in range(300)]
    assert reading.largest_block < 20_000
    block = next(iter(RecipeReader().blocks(path)))
    assert b"a picture" not in unpack(block).body


def test_without_pyarrow_it_says_what_to_install(tmp_path, read_file, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"PAR1 and more")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'toque\[data\]'"):
        read_file(path)
