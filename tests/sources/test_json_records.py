"""Every layout of JSON, and the schemas that come in it."""

from __future__ import annotations

import gzip
import json

import pytest

from toque.cooking.schemas import RecipeReader
from toque.errors import DataError
from toque.sources import json_records as json_files

STEPS = ["Rinse the lentils in cold water.", "Simmer them until soft, then serve."]


def generic(n):
    return {"title": f"Pot {n}", "ingredients": [f"{n} cups lentils", "salt"], "directions": STEPS}


RECIPES = [generic(n) for n in range(1, 6)]
LAYOUTS = {
    "lines": ("json-lines", "\n".join(json.dumps(r) for r in RECIPES)),
    "array": ("json", json.dumps(RECIPES)),
    "array, indented": ("json", json.dumps(RECIPES, indent=2)),
    "array, a record a line": ("json", "[\n" + ",\n".join(map(json.dumps, RECIPES)) + "\n]\n"),
    "dict": ("json", json.dumps({f"id{r['title']}": r for r in RECIPES})),
    "dict, indented": ("json", json.dumps({r["title"]: r for r in RECIPES}, indent=1)),
    "under a key": ("json", json.dumps({"version": 1, "recipes": RECIPES})),
    "under a key, indented": ("json", json.dumps({"count": 5, "data": RECIPES}, indent=2)),
    "under several keys": (
        "json",
        json.dumps({"soups": RECIPES[:2], "more": {"n": 1}, "pots": RECIPES[2:]}),
    ),
    "indented, side by side": ("json", "\n".join(json.dumps(r, indent=1) for r in RECIPES)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("packed", [False, True])
def test_layouts(read_text, tmp_path, layout, packed):
    schema, text = LAYOUTS[layout]
    reading = read_text(gzip.compress(text.encode(), mtime=0) if packed else text)
    assert [r.title for r in reading.recipes] == [r["title"] for r in RECIPES]
    assert RecipeReader().schema(tmp_path / "file") == schema


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "lines"])
def test_layouts_longer_than_the_head(tmp_path, read_file, layout, monkeypatch):
    path = tmp_path / "file"
    path.write_text(LAYOUTS[layout][1])
    cut = "toque.cooking.schemas.reader.head"
    monkeypatch.setattr(cut, lambda p, **_: (p.read_bytes()[:330], 0))
    assert [r.title for r in read_file(path).recipes] == [r["title"] for r in RECIPES]


def test_one_recipe_in_a_file(read_text):
    assert read_text(json.dumps(RECIPES[0], indent=2)).one.title == "Pot 1"
    assert read_text(json.dumps(RECIPES[0])).one.title == "Pot 1"


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
            "ingredients": ["2 cups lentils ADVERTISEMENT", "salt ADVERTISEMENT", "ADVERTISEMENT"],
            "instructions": "\n".join(STEPS),
            "picture_link": None,
        },
        "b2": {},
        "c3": None,
        "d4": {"title": None, "ingredients": [], "instructions": None, "picture_link": None},
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
    record = {"Recipe Name": "Pot", "Ingredient_List": ["2 cups lentils"], "Method": STEPS}
    assert read_text(json.dumps([record] * 2)).recipes[1].steps == tuple(STEPS)


def test_columns_that_the_user_names(read_text):
    record = {"titel": "Topf", "zutaten": ["2 Tassen Linsen"], "schritte": STEPS}
    columns = {"title": "titel", "ingredients": "zutaten", "steps": "schritte"}
    with pytest.raises(DataError, match="without a column of title and ingredients and steps"):
        read_text(json.dumps(record))
    assert read_text(json.dumps(record), columns).one.title == "Topf"
    with pytest.raises(DataError, match=r"column named for title: name\. Its columns are 'titel'"):
        read_text(json.dumps(record), columns | {"title": "name"})


def test_records_without_steps_are_refused_as_a_whole(read_text):
    lines = "\n".join(json.dumps({"id": n, "ingredients": ["a"], "cuisine": "b"}) for n in "12345")
    with pytest.raises(DataError, match="title and steps"):
        read_text(lines)


def test_bad_records_are_counted_with_their_line(read_text):
    lines = [json.dumps(generic(n)) for n in range(8)]
    lines[1] = '{"title": "cut'
    lines[2] = "7"
    lines[3] = '{"title": "Ti\\u0000tle", "ingredients": 5, "directions": {"a": 1}}'
    lines[5] = '{"title": "A", "title": "Twice", ' + lines[5][len('{"title": "Pot 5", ') :]
    data = "\n".join(lines).encode() + b'\n{"title": "\xff\xfe"}'
    reading = read_text(data)
    assert reading.dropped == {
        "not JSON": [2],
        "not an object": [3],
        "no ingredients": [4],
        "not UTF-8": [9],
    }
    assert [r.title for r in reading.recipes] == ["Pot 0", "Pot 4", "Twice", "Pot 6", "Pot 7"]


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
    with pytest.raises(DataError, match=r"line \d+ never ends"):
        read_text(damaged)


def test_fifty_megabytes_in_one_record_are_counted_and_not_held(tmp_path, read_file):
    for before, between, after in (("[", ",", "]"), ("", "\n", "")):
        path = tmp_path / "file"
        with path.open("w") as file:
            file.write(before + json.dumps(RECIPES[0]) + between + '{"title": "')
            for _ in range(50):
                file.write("x" * (1 << 20))
            file.write('"}' + between + json.dumps(RECIPES[1]) + after)
        reading = read_file(path)
        assert reading.dropped == {"too long": [2]}
        assert reading.kept == 2
        assert reading.largest_block < 4 << 20


def test_an_empty_array_is_refused(read_text):
    with pytest.raises(DataError, match="without a single record"):
        read_text("[]")


def test_brackets_without_end_are_refused(tmp_path, read_file):
    path = tmp_path / "file"
    path.write_bytes(b'[\n{"a": ' + b"[" * 3_000_000)
    with pytest.raises(DataError, match=r"no JSON from line \d on: it holds more than 1000"):
        read_file(path)


def test_steps_that_only_link_do_not_come_back(read_text):
    record = RECIPES[0] | {"directions": None, "Instructions": "See the full recipe at A Blog."}
    assert read_text(json.dumps(record)).counts == {"no steps": 1}
