import json

import pytest

from toque.cooking.schemas.reader import RecipeReader

STEPS = ["Rinse the lentils in cold water.", "Simmer them until soft, then serve."]
NODE = {
    "@type": "Recipe", "name": "Lentil &amp; Lemon Pot",
    "recipeIngredient": ["2 cups lentils", "1 lemon"], "recipeInstructions": STEPS,
    "recipeYield": ["4", "4 servings"], "totalTime": "PT1H5M", "keywords": "easy, beans",
    "recipeCuisine": "Turkish", "nutrition":
    {"@type": "NutritionInformation", "calories": "210 kcal", "sodiumContent": "0.3 g"},
}  # fmt: skip


def page(*values, extra=""):
    scripts = "".join(
        f'<script type="application/ld+json">{v if isinstance(v, str) else json.dumps(v)}</script>'
        for v in values
    )
    return f"<!DOCTYPE html>\n<html><head>\n{scripts}</head><body>{extra}</body></html>"


def test_a_page_with_a_recipe(read_text, tmp_path):
    recipe = read_text(page({"@context": "https://schema.org", **NODE})).one
    assert RecipeReader().schema(tmp_path / "file") == "web-page"
    assert recipe.title == "Lentil & Lemon Pot"
    assert recipe.ingredients == ("2 cups lentils", "1 lemon")
    assert recipe.steps == tuple(STEPS)
    assert (recipe.servings, recipe.minutes) == (4, 65)
    assert recipe.tags == ("easy", "beans", "Turkish")
    assert recipe.nutrition == {"energy_kcal": 210.0, "sodium_mg": 300.0}


@pytest.mark.parametrize(
    "value",
    [
        {"@context": "https://schema.org", "@graph": [{"@type": "WebPage"}, NODE]},
        [{"@type": "WebSite"}, NODE], {"@type": "WebPage", "mainEntity": NODE},
        NODE | {"@type": ["Recipe", "NewsArticle"]}, NODE | {"@type": "http://schema.org/Recipe"},
    ],
)  # fmt: skip
def test_where_a_recipe_stands(read_text, value):
    assert read_text(page(value)).one.title == "Lentil & Lemon Pot"
    assert read_text(json.dumps(value)).one.title == "Lentil & Lemon Pot"
    assert read_text(json.dumps(value, indent=2)).one.title == "Lentil & Lemon Pot"


@pytest.mark.parametrize(
    ("instructions", "steps"),
    [
        (STEPS, STEPS), ("\n".join(STEPS), STEPS),
        ("<ol><li>" + "</li><li>".join(STEPS) + "</li></ol>", STEPS),
        ([{"@type": "HowToStep", "name": "First", "text": step} for step in STEPS], STEPS),
        ([{"@type": "HowToStep", "name": step} for step in STEPS], STEPS),
        (
            [{"@type": "HowToSection", "name": "The pot",
              "itemListElement": [{"@type": "HowToStep", "text": step} for step in STEPS]}],
            [f"The pot: {STEPS[0]}", STEPS[1]],
        ),
        ({"@type": "ItemList", "itemListElement": [{"text": s} for s in STEPS]}, STEPS),
        (
            [{"@type": "HowToStep", "itemListElement": [
                {"@type": "HowToDirection", "text": STEPS[0]},
                {"@type": "HowToTip", "text": "Any lentils will do."},
                {"@type": "HowToDirection", "text": STEPS[1]}]}],
            STEPS,
        ),
        ([[{"text": STEPS[0]}], [{"text": STEPS[1]}]], STEPS),
    ],
)  # fmt: skip
def test_instructions_in_every_form(read_text, instructions, steps):
    recipe = read_text(page(NODE | {"recipeInstructions": instructions})).one
    assert recipe.steps == tuple(steps)


def test_slips_that_pages_make(read_text):
    text = json.dumps(NODE)
    for slip in (
        "<!-- " + text + " -->",
        "//<![CDATA[\n" + text + "\n//]]>",
        text + ";",
        text[:-1] + ",}",
        text.replace("Rinse", "Rinse\n"),
        text.replace("Rinse", "Rinse\\'"),
        text.replace('"', "&quot;"),
    ):
        assert read_text(page("{broken", slip)).one.ingredients == (
            "2 cups lentils",
            "1 lemon",
        )


def test_a_page_or_record_without_a_recipe_is_counted(read_text):
    record = json.dumps({"@graph": [{"@type": "WebPage"}]})
    assert read_text(record).dropped == {"no recipe in record": [1]}
    for values in ([{"@type": "NewsArticle", "headline": "Lentils"}], []):
        assert read_text(page(*values)).dropped == {"no recipe in page": [1]}


def test_the_recipes_of_a_carousel_are_not_those_of_the_page(read_text):
    stub = {"@type": "Recipe", "name": "Other", "url": "https://example.org/other"}
    assert (
        read_text(page({"@graph": [stub, NODE, NODE]})).one.title
        == "Lentil & Lemon Pot"
    )
    assert read_text(page([stub, stub])).dropped == {"no recipe in page": [1]}


def test_two_recipes_on_a_page_are_two_records(read_text):
    reading = read_text(page(NODE, NODE | {"name": "Second"}, {"@type": "Recipe"}))
    assert [r.title for r in reading.recipes] == ["Lentil & Lemon Pot", "Second"]
    assert reading.read == 2


def test_a_recipe_with_empty_lists_says_so(read_text):
    empty = NODE | {"recipeIngredient": [], "recipeInstructions": []}
    assert read_text(page(empty)).dropped == {"no ingredients": [3]}
    assert read_text(page(empty, NODE)).kept == 1


def test_encodings(read_text):
    text = page(json.dumps(NODE | {"name": "Soufflé"}, ensure_ascii=False))
    assert read_text(text.encode("cp1252")).one.title == "Soufflé"
    declared = text.replace("<head>", '<head><meta charset="iso-8859-2">').replace(
        "é", "ł"
    )
    assert read_text(declared.encode("iso-8859-2")).one.title == "Soufflł"


def test_a_page_that_is_too_long_is_counted(tmp_path, read_file):
    path = tmp_path / "page"
    path.write_bytes(b"<!doctype html>" + b"x" * (9 << 20))
    assert read_file(path).dropped == {"too long": [1]}


@pytest.mark.parametrize(
    "piece",
    ["<script ", "<script type='application/ld+json'>", "<a <a <!--", '<p x="'],
)
def test_damaged_markup_is_counted(read_text, piece):
    assert read_text(page(extra=piece * 20_000)).dropped == {"no recipe in page": [1]}
