"""Both of Food.com's tables, with recipes made up for the test."""

import csv
import io

import pytest

from toque.cooking.schemas.reader import RecipeReader

RAW_HEADER = (
    "name,id,minutes,contributor_id,submitted,tags,nutrition,n_steps,steps,description,"
    "ingredients,n_ingredients"
)
RAW = {
    "name": "lemon   lentil pot", "id": "1", "minutes": "40", "contributor_id": "7",
    "submitted": "2005-09-16", "tags": "['60-minutes-or-less', 'easy']",
    "nutrition": "[200.0, 10.0, 20.0, 5.0, 30.0, 15.0, 9.0]", "n_steps": "2",
    "steps": "['rinse the lentils , drain', \"don't stir them for 1 / 2 hour\", "
             "'squeeze the lemon over the pot and serve']",
    "description": "one\nline, and another", "ingredients": "['lentils', 'lemon', 'olive oil']",
    "n_ingredients": "3",
}  # fmt: skip
COLUMNS = (
    "RecipeId,Name,AuthorId,AuthorName,CookTime,PrepTime,TotalTime,DatePublished,Description,"
    "Images,RecipeCategory,Keywords,RecipeIngredientQuantities,RecipeIngredientParts,"
    "AggregatedRating,ReviewCount,Calories,FatContent,SaturatedFatContent,CholesterolContent,"
    "SodiumContent,CarbohydrateContent,FiberContent,SugarContent,ProteinContent,RecipeServings,"
    "RecipeYield,RecipeInstructions"
)
STEPS = ("Rinse the lentils.", "Simmer them with the lemons until soft, then serve.")
FULL = dict.fromkeys(COLUMNS.split(","), "NA") | {
    "RecipeId": "38", "Name": "Lemon Lentil Pot", "TotalTime": "PT1H20M",
    "Images": "character(0)", "Keywords": 'c("Easy", "Beans")',
    "RecipeIngredientQuantities": 'c("1 1/2 cups", "2", NA)',
    "RecipeIngredientParts": 'c("red lentils", "lemons", "\\"good\\" olive oil")',
    "Calories": "200.5", "FatContent": "6.5", "SugarContent": "5", "SodiumContent": "120",
    "ProteinContent": "15", "RecipeServings": "4",
    "RecipeInstructions": f'c("{STEPS[0]}", "{STEPS[1]}")',
}  # fmt: skip


def written(rows, header):
    text = io.StringIO()
    writer = csv.DictWriter(text, header.split(","), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def test_raw_recipes(read_text, tmp_path):
    reading = read_text(written([RAW], RAW_HEADER))
    recipe = reading.one
    assert RecipeReader().schema(tmp_path / "file") == "foodcom-raw"
    assert recipe.title == "lemon lentil pot"
    assert recipe.ingredients == ("lentils", "lemon", "olive oil")
    assert recipe.steps == (
        "rinse the lentils, drain",
        "don't stir them for 1/2 hour",
        "squeeze the lemon over the pot and serve",
    )
    assert recipe.tags == ("60-minutes-or-less", "easy")
    assert recipe.minutes == 40
    assert reading.notes["recipes with spaces before punctuation"] == 1
    # Percentages of daily values become grams.
    figures = {"energy_kcal": 200.0, "fat_g": 6.5, "sugar_g": 5.0, "sodium_mg": 120.0}
    assert recipe.nutrition | figures | {"protein_g": 15.0} == recipe.nutrition


def test_missing_and_odd_values_of_raw_recipes(read_text):
    rows = [
        RAW | {"description": "", "minutes": "0", "nutrition": "", "tags": ""},
        RAW | {"name": ""},
        RAW | {"steps": "['cut in the mid"},
        RAW | {"ingredients": "[]"},
    ]
    reading = read_text(written(rows, RAW_HEADER))
    assert reading.one.minutes is None
    assert reading.one.nutrition is None
    assert reading.dropped == {
        "no title": [3],
        "broken list": [5],
        "no ingredients": [7],
    }


def test_r_vectors_and_nutrient_columns(read_text, tmp_path):
    recipe = read_text(written([FULL], COLUMNS)).one
    assert RecipeReader().schema(tmp_path / "file") == "foodcom"
    assert recipe.title == "Lemon Lentil Pot"
    assert recipe.ingredients == (
        "1 1/2 cups red lentils",
        "lemons",
        '"good" olive oil',
    )
    assert recipe.steps == STEPS
    assert recipe.tags == ("Easy", "Beans")
    assert (recipe.servings, recipe.minutes) == (4, 80)
    assert (recipe.nutrition["energy_kcal"], recipe.nutrition["sodium_mg"]) == (
        200.5,
        120.0,
    )


def test_an_amount_without_its_unit_is_left_out_and_counted(read_text):
    row = FULL | {"RecipeIngredientQuantities": 'c("1/4", "2", NA)'}
    reading = read_text(written([row], COLUMNS))
    assert reading.one.ingredients == ("red lentils", "lemons", '"good" olive oil')
    assert reading.notes["quantities without a unit left out"] == 2


def test_single_values_and_empty_vectors_of_r(read_text):
    rows = [
        FULL
        | {"RecipeIngredientParts": '"lentils"', "RecipeIngredientQuantities": '"2"'},
        FULL | {"RecipeInstructions": "character(0)"},
        FULL | {"RecipeInstructions": "NA"},
    ]
    reading = read_text(written(rows, COLUMNS))
    assert reading.one.ingredients == ("lentils",)
    assert reading.counts == {"no steps": 2}


def test_parquet_with_real_lists(tmp_path, read_file):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    row = FULL | {
        "RecipeIngredientQuantities": ["1 1/2 cups", "2", None],
        "RecipeIngredientParts": ["red lentils", "lemons", "olive oil"],
        "RecipeInstructions": list(STEPS), "Keywords": ["Easy", "Beans"], "Calories": 200.5,
        "RecipeServings": 4.0, "SodiumContent": float("nan"),
    }  # fmt: skip
    path = tmp_path / "recipes.bin"
    parquet.write_table(arrow.Table.from_pylist([row]), path)
    recipe = read_file(path).one
    assert RecipeReader().schema(path) == "foodcom"
    assert recipe.ingredients[0] == "1 1/2 cups red lentils"
    assert recipe.servings == 4
    assert "sodium_mg" not in recipe.nutrition
