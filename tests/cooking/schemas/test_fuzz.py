"""Damage of every kind to every format: nothing but DataError, and the counts stay true."""

import csv
import io
import json
import random

import pytest

from fixtures.recipe_files import STEPS, pot
from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError

N = 8


def table(columns, row):
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(row(pot(n)) for n in range(N))
    return text.getvalue()


def vector(items):
    return "c(" + ", ".join(map(json.dumps, items)) + ")"


def marked_up(r):
    return {
        "@type": "Recipe", "name": r["title"], "recipeIngredient": r["ingredients"],
        "recipeInstructions": r["directions"],
    }  # fmt: skip


def page():
    return (
        "<!doctype html><html><body><script type='application/ld+json'>"
        f"{json.dumps({'@graph': [marked_up(pot(0))]})}</script><p><b>x</b></p></body></html>"
    )


NUTRITION = "[1.0, 2, 3, 4, 5, 6, 7]"
RECORDS = [pot(n) for n in range(N)]
FORMATS = {
    "lines": "\n".join(json.dumps(r) for r in RECORDS),
    "array": json.dumps(RECORDS, indent=1),
    "dict": json.dumps({str(n): r for n, r in enumerate(RECORDS)}),
    "wrapped": json.dumps({"recipes": RECORDS}),
    "schema.org": json.dumps([marked_up(r) for r in RECORDS]),
    "recipenlg": table(
        ("title", "ingredients", "directions", "NER"),
        lambda r: (
            r["title"],
            json.dumps(r["ingredients"]),
            json.dumps(r["directions"]),
            "[]",
        ),
    ),
    "foodcom-raw": table(
        ("name", "id", "ingredients", "steps", "nutrition", "n_steps"),
        lambda r: (
            r["title"],
            1,
            repr(r["ingredients"]),
            repr(r["directions"]),
            NUTRITION,
            2,
        ),
    ),
    "foodcom": table(
        (
            "Name",
            "RecipeIngredientQuantities",
            "RecipeIngredientParts",
            "RecipeInstructions",
        ),
        lambda r: (
            r["title"],
            *map(vector, (["1 cup", "2"], r["ingredients"], r["directions"])),
        ),
    ),
    "page": page(),
}
PARTS = [
    *(bytes([mark]) for mark in b"\"'[]{},\\\n\r\0\xff<"),
    *b"&#0; null 1e999 \\ud800 c( \xef\xbb\xbf NaN </script> 1/0".split(), b"[" * 200, b" " * 50,
    "\u2028\u200f".encode(),
]  # fmt: skip


def damaged(data, rng):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 30])):
        at, to = sorted(rng.randrange(len(data) + 1) for _ in "12")
        kind = rng.randrange(6)
        if kind == 0:
            data[at:at] = rng.choice(PARTS)
        elif kind == 1:
            del data[at : min(to, at + rng.choice([1, 3, 40]))]
        elif kind == 2 and at < len(data):
            data[at] = rng.randrange(256)
        elif kind == 3:
            data[at:at] = data[at : min(to, at + 60)]
        elif kind == 4:
            data[at:to] = bytes(reversed(data[at:to])) if to - at < 50 else data[at:to]
        elif rng.random() < 0.1:
            del data[at:]
    return bytes(data)


def read(path, data):
    """Read damaged `data`: records met, or 0 when the file is refused in words."""
    path.write_bytes(data)
    n_read, refused = 0, ""
    try:
        for block in RecipeReader().blocks(path):
            given = RecipeReader().examples(block)
            assert given.read == given.kept + sum(map(len, given.dropped.values()))
            assert given.kept == len(given.examples)
            assert all(count > 0 for count in given.notes.values())
            for example in given.examples:
                example.target.encode()
                example.prompt.encode()
            n_read += given.read
    except DataError as error:
        refused = str(error)
    if refused:
        assert str(path) in refused
    return n_read


@pytest.mark.parametrize("times", [100, pytest.param(50_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMATS)
def test_damage_is_counted_or_refused(tmp_path, name, times):
    data, path = FORMATS[name].encode(), tmp_path / "file"
    n_records, rng = 1 if name == "page" else N, random.Random(f"{name} {times}")
    assert read(path, data) == n_records
    n_files = times if times == 100 else times // n_records
    assert sum(read(path, damaged(data, rng)) for _ in range(n_files)) > n_files // 3


def test_damaged_cells_of_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rng = random.Random(7)
    extended = (
        "[{'original': '1 cup lentils', 'meta': array(['a'], dtype=object)}\n "
        "{'original': 'x'}]"
    )
    cells = [
        extended,
        "<ol><li>" + "</li><li>".join(STEPS) + "</li></ol>",
        "['a' 'b']",
        "Pot",
    ]
    names = ["extendedIngredients", "instructions", "dishTypes", "title"]
    for _ in range(40):
        rows = [
            dict(zip(names, (damaged(c.encode(), rng) for c in cells), strict=True))
            for _ in "1" * 8
        ]
        table = arrow.Table.from_pylist(rows)
        path = tmp_path / "file.parquet"
        parquet.write_table(table, path)
        assert read(path, path.read_bytes()) == 8
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        read(path, bytes(data))
