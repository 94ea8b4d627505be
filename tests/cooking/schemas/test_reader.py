"""Recognition as a whole, the reader by name, and its way through `prepare`."""

import json

import numpy as np
import pytest

from toque.cooking.schemas.reader import RecipeReader, reader_for
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import ConfigError, DataError
from toque.sources.documents import DocumentReader, PairReader
from toque.sources.layouts import UnknownFormatError
from toque.sources.records import Source

STEPS = ["Rinse the lentils in cold water.", "Simmer them until soft, then serve."]


def records(n):
    foods = ("lentils", "beans", "rice", "barley", "oats", "corn")
    return [
        {
            "title": f"{food} pot {i}",
            "ingredients": [f"{i + 1} cups {food}", "1 lemon", "salt"],
            "directions": [f"Rinse the {food} {i + 1} times.", *STEPS],
        }
        for i in range(n)
        for food in foods
    ]


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a cook.\nShe made soup, and stew, and more.\n",
        "Salt, pepper, love\nStir the pot with a long spoon.\nTaste, and taste, and taste.\n",
        "just one line of text", "\0\1\2\3 binary \xff", "<?xml version='1.0'?><recipes/>",
    ],
)  # fmt: skip
def test_files_of_no_known_format_are_refused(tmp_path, text):
    path = tmp_path / "RAW_recipes.csv"
    path.write_text(text)
    with pytest.raises(
        UnknownFormatError, match="not in a known recipe format: it begins"
    ):
        RecipeReader().schema(path)


def test_a_table_of_something_else_is_refused_with_its_columns(tmp_path):
    path = tmp_path / "RAW_recipes.csv"
    path.write_text("date,price,open\n2024-01-01,17.5,3\n2024-01-02,18.5,4\n")
    with pytest.raises(
        DataError, match=r"without a column of title.*Found: 'date', 'price'"
    ):
        RecipeReader().schema(path)


def test_books_are_no_recipe_collections(shared):
    for path in sorted((shared / "data" / "text").iterdir()):
        with pytest.raises(UnknownFormatError):
            RecipeReader().schema(path)


def test_the_columns_choose_the_reader():
    columns = {"title": "Naïve: name", "steps": "how, exactly"}
    assert reader_for(columns) == RecipeReader(columns)
    assert reader_for({}) == RecipeReader()
    assert reader_for({"text": "body"}) == DocumentReader("body")
    assert reader_for({"target": "b", "prompt": "a"}) == PairReader("a", "b")
    with pytest.raises(
        ConfigError, match=r"name author\. Allowed: title, ingredients, steps"
    ):
        reader_for({"author": "x"})


def test_prepare_reads_several_formats_into_one_store(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    rows = records(12)
    (folder / "a.json").write_text(json.dumps(rows[:24]))
    (folder / "b.data").write_text("\n".join(json.dumps(r) for r in rows[24:48]))
    cells = [
        [r["title"], json.dumps(r["ingredients"]), json.dumps(r["directions"])]
        for r in rows[48:]
    ]
    quoted = [",".join('"' + c.replace('"', '""') + '"' for c in row) for row in cells]
    (folder / "c.txt").write_text("\n".join(["titel,ingredients,steps", *quoted]))
    settings = PrepareSettings(family_kind="decoder", tokenizer="trained:400")
    result = prepare(
        [
            Source(str(folder / "[ab].*"), reader_for({})),
            Source(str(folder / "c.txt"), reader_for({"title": "titel"})),
        ],
        store=tmp_path / "store",
        settings=settings,
        workers=2,
    )
    assert (result.report.read, result.report.kept) == (72, 72)
    assert result.store.n_rows == 72
    assert np.unique(result.store.column("source")).tolist() == [0, 1]
    target = result.store.codec().decode(result.store.target(0))
    assert target.startswith("Ingredients:\n- 1 cups lentils\n")
