"""The real files beside the repository: counts, shares kept, and facts of single recipes.

`well_formed` is how many records have a title, an ingredient and a step at all.
"""

import ast
import csv

import pytest

from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError

FILES = {
    # name: (schema, records, well formed)
    "RecipeNLG_head49.csv": ("recipenlg", 49, 49),
    "RecipeNLG_healthy50pct_no_link_source.csv": ("recipenlg", 3407, 3403),
    "foodcom_RAW_recipes.csv": ("foodcom-raw", 297, 297),
    "foodista_cc_by_3_0.jsonl": ("json-lines", 499, 499),
    "grand_recipe_dataset_cuisine.jsonl": ("json-lines", 1869, 1869),
    "public_domain_recipes.jsonl": ("json-lines", 508, 508),
    "recipe_scrapers_all_languages.jsonl": ("json-lines", 810, 807),
    "recipebox_epi_subset.json": ("recipe-box", 158, 158),
    "spoonacular.parquet": ("spoonacular", 773, 748),
    "epicurious_nutrition.jsonl.gz": ("json-lines", 8052, 8052),
}


@pytest.fixture(scope="module")
def recipes(shared):
    return shared / "data" / "recipes"


@pytest.fixture(scope="module")
def readings(recipes, read_file):
    found = {}

    def read(name):
        if name.endswith(".parquet"):
            pytest.importorskip("pyarrow")
        if name not in found:
            found[name] = read_file(recipes / name)
        return found[name]

    return read


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if f[1] > 5000 else n
        for n, f in FILES.items()
    ],
)
def test_what_is_kept(recipes, readings, name):
    schema, n_records, n_well_formed = FILES[name]
    reading = readings(name)
    assert RecipeReader().schema(recipes / name) == schema
    assert reading.read == n_records
    assert reading.kept + sum(reading.counts.values()) == n_records
    # In RecipeNLG, 1 % have no method, and 1 % have all ingredients on one line.
    assert reading.kept >= 0.965 * n_well_formed


@pytest.mark.slow
def test_the_large_file(recipes, read_file):
    reading = read_file(recipes / "allrecipes_epicurious_as_is.jsonl.gz")
    assert reading.read == 68_004
    assert reading.kept >= 0.999 * 68_004
    assert set(reading.counts) <= {
        "lost fraction",
        "no ingredients",
        "no method",
        "no steps",
        "steps among the ingredients",
        "text cut off",
        "too short",
    }
    texts = [
        line
        for recipe in reading.recipes
        for line in (*recipe.ingredients, *recipe.steps)
    ]
    assert not [text for text in texts if "\ufffd" in text or "<b" in text]
    assert reading.notes["ingredient sub-headings"] > 3000


def test_the_cut_schema_is_refused(recipes, read_file):
    with pytest.raises(
        DataError, match=r"without a column of steps.*'name', 'id', 'ingredients'"
    ):
        read_file(recipes / "foodcom_RAW_recipes_cut_schema.csv")
    with pytest.raises(DataError, match="without a column of ingredients"):
        read_file(recipes / "ingredient_lines_labelled.csv")


# Rows of foodcom_RAW_recipes.csv without a method, or with units without their numbers.
DAMAGED = {62, 124, 277}


def test_food_com_fields_are_the_cells(recipes, readings):
    with (recipes / "foodcom_RAW_recipes.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = [row for n, row in enumerate(csv.DictReader(file)) if n not in DAMAGED]
    for row, recipe in zip(
        rows, readings("foodcom_RAW_recipes.csv").recipes, strict=True
    ):
        assert recipe.ingredients == tuple(
            " ".join(i.split())
            for i in ast.literal_eval(row["ingredients"])
            if i != "aluminum foil"  # the one tool of the file
        )
        assert recipe.minutes == (int(row["minutes"]) or None)
        assert recipe.tags == tuple(t for t in ast.literal_eval(row["tags"]) if t)


def test_food_com_daily_values_agree_with_energy(recipes, readings):
    """9 kcal a gram of fat, 4 of protein and carbohydrate; sugar is part of carbohydrate."""
    with (recipes / "foodcom_RAW_recipes.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        rows = [row for n, row in enumerate(csv.DictReader(file)) if n not in DAMAGED]
    carbohydrate = [3.0 * ast.literal_eval(row["nutrition"])[6] for row in rows]
    errors = []
    found = readings("foodcom_RAW_recipes.csv").recipes
    for recipe, carbohydrate_g in zip(found, carbohydrate, strict=True):
        facts = {"fat_g": 0.0, "protein_g": 0.0, "sugar_g": 0.0, **recipe.nutrition}
        energy = 9 * facts["fat_g"] + 4 * facts["protein_g"] + 4 * carbohydrate_g
        errors.append(
            abs(energy - facts["energy_kcal"]) / max(50, facts["energy_kcal"])
        )
        assert facts["sugar_g"] <= carbohydrate_g + 3
    assert sorted(errors)[len(errors) // 2] < 0.05


def test_repairs_that_these_files_need(readings):
    assert readings("recipebox_epi_subset.json").notes["doubled instructions"] > 100
    assert (
        readings("grand_recipe_dataset_cuisine.jsonl").notes["boilerplate lines"]
        == 1479
    )
    nlg = readings("RecipeNLG_healthy50pct_no_link_source.csv")
    assert nlg.notes["sentences split in the middle rejoined"] > 150
    spoon = readings("spoonacular.parquet")
    assert spoon.notes["times that are only the API's default"] == 630
    assert spoon.notes["steps that only link to a page"] == 18
    texts = [line for r in spoon.recipes for line in (*r.ingredients, *r.steps)]
    assert not [
        t for t in texts if "<li>" in t or "</" in t or "array(" in t or "dtype" in t
    ]


def test_web_pages(shared, read_file):
    pages = sorted((shared / "data" / "html").glob("*.html"))
    assert len(pages) == 30
    dropped = {}
    for page in pages:
        assert RecipeReader().schema(page) == "web-page"
        reading = read_file(page)
        assert reading.read == 1
        if reading.dropped:
            dropped[page.name] = reading.counts
            continue
        assert len(reading.one.ingredients) >= 3
    # Two say they hold a recipe and give empty lists, as it is in their text only; two have it in
    # microdata.
    assert dropped == {
        "alittlebityummy_1.html": {"no ingredients": 1},
        "bongeats_1.html": {"no ingredients": 1},
        "cdkitchen_2.html": {"no recipe in page": 1},
        "drinkoteket_2.html": {"no recipe in page": 1},
    }
