"""Ingredients and steps as objects, in the forms of recipe managers, APIs and websites."""

import json
from collections import Counter

import pytest

from toque.cooking.recipe import Recipe
from toque.cooking.schemas.fields import records_of
from toque.cooking.schemas.ingredient_objects import HEADINGS
from toque.cooking.schemas.item_objects import UNUSED
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.object_keys import NOT_READ
from toque.cooking.schemas.reader import RecipeReader
from toque.errors import DataError

LINES = ("250 g white beans, soaked", "2 carrots")
STEPS = (
    "Simmer the beans until they are tender.",
    "Add the carrots and cook for ten minutes.",
)
BEANS = {"name": "white beans", "amount": 250, "unit": "g", "note": "soaked"}
CARROTS = {"name": "carrots", "amount": 2}


def read(**fields):
    """The recipe of a record, and its notes."""
    notes = Counter()
    raw = {
        "title": "Stew",
        "ingredients": ["1 bean"],
        "instructions": [*STEPS],
        **fields,
    }
    (record,) = records_of(raw, (), notes)
    recipe = recipe_of(record, notes)
    assert isinstance(recipe, Recipe), recipe
    return recipe, notes


def unread(notes):
    return sorted(
        note.removeprefix(UNUSED) for note in notes if note.startswith(UNUSED)
    )


MEALIE = {
    "quantity": 250.0, "food": {"name": "white bean", "pluralName": "white beans"},
    "unit": {"id": "1", "name": "gram", "abbreviation": "g", "useAbbreviation": True},
    "note": "soaked", "title": None, "display": "", "originalText": None, "isFood": True,
    "disableAmount": False, "referenceId": "9",
}  # fmt: skip
TANDOOR = {
    "food": {"name": "white beans"}, "unit": {"name": "g", "plural_name": None}, "amount": 250.0,
    "note": "soaked", "order": 0, "is_header": False, "no_amount": False,
}  # fmt: skip
TASTY = {
    "raw_text": "n/a", "extra_comment": "soaked", "position": 1,
    "ingredient": {"name": "white bean", "display_plural": "white beans"},
    "measurements": [{"quantity": "250", "unit": {"name": "gram", "abbreviation": "g"}}],
}  # fmt: skip
COOKLANG = {
    "name": "white beans", "note": "soaked", "alias": None,
    "quantity": {"value": {"type": "number", "value": {"type": "regular", "value": 250.0}},
                 "unit": "g"},
}  # fmt: skip


@pytest.mark.parametrize(
    "beans",
    [
        BEANS, {"ingredient": "white beans", "amount": "250 g", "preparation": "soaked"},
        {"name": "white beans", "amount": {"value": 250, "unit": "g"}, "notes": ["soaked"]},
        {"food": {"name": "white beans"}, "quantity": 250, "unit": {"name": "g"},
         "note": "soaked"},
        {"originalText": "250 g white beans, soaked", "food": None, "quantity": 1.0,
         "note": "soaked"},
        {"text": "250 g white beans", "quantity": 250, "food": "white beans",
         "comment": "(soaked)"},
        {"qty": "250", "measure": "g", "item": "white beans", "modifier": "soaked"},
        {"amt": {"qty": "250", "unit": "g"}, "item": "white beans", "prep": "soaked"},
        {"quantityText": "250 g", "ingredientText": "white beans", "noteText": "soaked"},
        {"quantity": {"amount": 250, "quantityType": "G"}, "ingredient": {"name": "white beans"},
         "usageInfo": ", soaked"},
        {"white beans": {"amounts": [{"amount": 250, "unit": "g"}], "processing": ["soaked"]}},
        {"@type": "PropertyValue", "name": "white beans", "value": "250", "unitText": "g",
         "description": "soaked"},
        {"name": "white beans", "description": "250 g, soaked", "optional": False},
        {"zutat": "white beans", "menge": 250, "einheit": "g", "bemerkung": "soaked"},
        {"ingredient_name": "white beans", "ingredient_quantity": "250", "ingredient_uom": "g",
         "ingredient_notes": "soaked"},
        MEALIE, TANDOOR, COOKLANG,
    ],
)  # fmt: skip
def test_an_ingredient_keeps_its_amount_unit_food_and_note(beans):
    recipe, notes = read(ingredients=[beans, CARROTS])
    assert recipe.ingredients[0].replace("250 G", "250 g") == LINES[0]
    assert recipe.ingredients[1] == LINES[1]
    assert unread(notes) == []


@pytest.mark.parametrize(
    ("item", "line"),
    [
        ({"quantity": 2.0, "food": "carrots"}, "2 carrots"),
        ({"quantity": 0.5, "unit": "cup", "food": "milk"}, "1/2 cup milk"),
        ({"quantity": 1.333, "unit": "cups", "food": "milk"}, "1 1/3 cups milk"),
        ({"quantity": 0.5, "unit": "kg", "food": "flour"}, "0.5 kg flour"),
        ({"quantity": "0.3333333", "unit": "cup", "food": "milk"}, "1/3 cup milk"),
        ({"min": 2, "max": 3, "food": "carrots"}, "2-3 carrots"),
        ({"quantity": {"from": 2, "to": 3}, "food": "carrots"}, "2-3 carrots"),
        ({"quantity": 1, "quantity_max": 2, "unit": "cups", "food": "milk"}, "1-2 cups milk"),
        ({"amount": "1-2", "unit": "cups", "food": "milk"}, "1-2 cups milk"),
        ({"amount": "one to two", "unit": "cups", "food": "milk"}, "one to two cups milk"),
        ({"food": "flour", "measure": {"amount": 2, "unit": {"short": "c", "long": "cups"}}},
         "2 cups flour"),
        ({"food": "flour", "metric": "200 g", "us": {"amount": 1.5, "unit": "cups"}},
         "1 1/2 cups (200 g) flour"),
        ({"quantity": {"whole": 1, "num": 1, "den": 2}, "food": "lemons"}, "1 1/2 lemons"),
        ({"quantity": 2, "unit": {"name": "cup", "pluralName": "cups"}, "food": "milk"},
         "2 cups milk"),
        ({"quantity": 2, "food": {"name": "egg", "pluralName": "eggs"}}, "2 eggs"),
        ({"quantity": 2, "unit": "<unit>", "food": "eggs", "size": "large"}, "2 large eggs"),
        ({"food": "salt", "amount": "To taste"}, "salt, to taste"),
        ({"food": "salt", "amount": 1, "unit": "to taste"}, "salt, to taste"),
        ({"food": "salt", "amount": 1, "no_amount": True}, "salt"),
        ({"food": "parsley", "optional": True}, "parsley (optional)"),
        ({"food": "flour", "grams": 200}, "200 grams flour"),
        ({"food": "flour", "amount": 2, "unit": "cups", "weight": "240 g"}, "2 cups (240 g) flour"),
        ({"quantity": "1", "text": "cup milk"}, "1 cup milk"),
        ({"quantity": 1, "unit": "serving", "text": "a pinch of salt"}, "a pinch of salt"),
        ({"original": "salt", "name": "salt", "amount": 1.0, "unit": "serving"}, "salt"),
        ({"food": None, "unit": None, "quantity": 1.0, "note": "1 tsp cumin", "title": "Spices"},
         "1 tsp cumin"),
        ({"food": "flour", "amount": {"us": "1 cup", "metric": {"value": 120, "unit": "g"}}},
         "1 cup (120 g) flour"),
        ({"id": 1, "ingredient": {"name": "flour", "amount": 200, "unit": "g"}}, "200 g flour"),
        ({"text": "beans", "quantity": 250, "unit": "g", "food": "white beans"}, "250 g beans"),
        ({"text": "salt to taste", "quantity": 1.0, "unit": None}, "salt to taste"),
        (TASTY, "250 gram white beans, soaked"),
    ],
)  # fmt: skip
def test_how_amounts_and_remarks_are_written(item, line):
    assert read(ingredients=[item, "2 carrots"])[0].ingredients[0] == line


@pytest.mark.parametrize(
    "ingredients",
    [
        {"white beans": "250 g", "carrots": 2, "salt": None},
        {"1": "250 g white beans", "2": "2 carrots", "3": "salt"},
        {"a81f0c2d": {"amount": "250", "measurement": "g", "name": "white beans"},
         "a81f0c2e": {"section_heading_name": "For the pot"},
         "a81f0c2f": {"amount": "2", "name": "carrots"}, "a81f0c30": {"name": "salt"}},
        {"For 2 pots": {"white beans": "250 g", "carrots": "2"}, "To serve": ["salt"]},
        [{"name": "Pot", "ingredients": [{"amount": 250, "unit": "g", "name": "white beans"}]},
         {"header": "Rest", "items": ["2 carrots", {"name": "salt"}]}],
        [{"title": "For the pot", "isHeader": True}, {"text": "250 g white beans"},
         {"type": "group", "name": "Rest"}, {"title": "carrots", "amount": 2}, "salt"],
        {"edges": [{"node": {"name": "white beans", "quantity": 250, "unit": "g"}},
                   {"node": {"name": "carrots", "quantity": 2}}, {"node": {"name": "salt"}}]},
        {"ing": [{"amt": {"qty": 250, "unit": "g"}, "item": "white beans"}, "2 carrots", "salt"]},
        [{"section": "Pot", "name": "white beans", "amount": "250 g"},
         {"section": "Pot", "name": "carrots", "amount": "2"}, {"section": "Top", "name": "salt"}],
    ],
)  # fmt: skip
def test_lists_by_name_number_and_part(ingredients):
    recipe, notes = read(ingredients=ingredients)
    assert recipe.ingredients == ("250 g white beans", "2 carrots", "salt")
    assert unread(notes) == []


def test_headings_among_ingredients_are_counted():
    items = [{"group": part, "name": food} for part, food in ("Aa", "Ab", "Bc")]
    assert read(ingredients=items)[1][HEADINGS] == 2
    assert (
        read(ingredients=[{"title": "Top", "food": {"name": "salt"}}])[1][HEADINGS] == 1
    )


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"original": "salt", "amount": 1.0, "unit": "serving"}, ["amount", "unit"]),
        ({"original": "1 cup chickpeas", "display": "1 c. chickpeas", "name": "garbanzo beans"},
         ["display", "name"]),
        ({"text": "beans", "quantity": 250, "unit": "g", "food": "white beans"}, ["food"]),
        ({"food": "oil", "product": "Brand", "quantity": 2, "unit": "tbsp",
          "unitLong": "tablespoon", "unitCode": "EA"}, ["product", "unitCode"]),
        ({"food": "oil", "quantity": 2, "count": 3, "weight": 30}, ["count", "weight"]),
        ({"food": {"name": "oil", "label": "Fats"}, "amount": {"value": 2, "system": "us"}},
         ["amount.system", "food.label"]),
        ({"food": "oil", "name": ["a", "b"]}, ["name"]),
        ({"url": "https://example.org"}, ["url"]), ({"food": "oil", "description": ", "}, []),
    ],
)  # fmt: skip
def test_another_form_of_a_part_that_the_line_does_not_repeat_is_counted(item, names):
    _, notes = read(ingredients=[item, "2 carrots"])
    assert unread(notes) == [f"ingredients.{name}" for name in names]


def test_what_an_ingredient_does_not_use_is_counted():
    unit = {"name": "g", "description": "metric", "id": 4}
    beans = {
        "name": "white beans",
        "amount": 250,
        "unit": unit,
        "aisle": "Beans",
        "kcal": 90,
    }
    recipe, notes = read(
        ingredients=[
            beans,
            {**beans, "amount": 90, "id": 7, "order": 2},
            5,
            {"x": "1", "y": "a"},
        ]
    )
    assert recipe.ingredients == ("250 g white beans", "90 g white beans")
    names = ["aisle", "kcal", "unit.description", "x", "y"]
    assert unread(notes) == [
        "ingredients (int)",
        *(f"ingredients.{name}" for name in names),
    ]
    assert notes[f"{UNUSED}ingredients.aisle"] == 1  # records
    assert notes[NOT_READ] == 1


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ({"2": STEPS[1], "1": STEPS[0], "10": "Serve the stew."}, (*STEPS, "Serve the stew.")),
        ([{"step": n, "description": text} for n, text in enumerate(STEPS, 1)], STEPS),
        ([{"step": f"Step {n}", "instruction": t} for n, t in enumerate(STEPS, 1)], STEPS),
        ([{"display_text": text, "position": n} for n, text in enumerate(STEPS)], STEPS),
        ([{"number": f"{n}", "text": text} for n, text in enumerate(STEPS)], STEPS),
        ([{"instructions": text, "ingredients": ["1"]} for text in STEPS], STEPS),
        ([{"@type": "HowToSection"}, {"@type": "HowToSection", "name": "Pot", "item": [
            {"@type": "HowToStep", "text": text} for text in STEPS]}],
         (f"Pot: {STEPS[0]}", STEPS[1])),
        ({"@type": "ItemList", "itemListElement": [
            {"@type": "ListItem", "item": {"@type": "HowToStep", "text": t}} for t in STEPS]},
         STEPS),
        ([{"title": "Pot", "text": STEPS[0]}, {"title": "", "text": STEPS[1]}],
         (f"Pot: {STEPS[0]}", STEPS[1])),
        ([STEPS[0], {"title": "Add the carrots", "text": STEPS[1]}], STEPS),
        ([{"step": "Pot", "isSection": True}, {"step": STEPS[0]}, {"step": STEPS[1]}],
         (f"Pot: {STEPS[0]}", STEPS[1])),
        ([{"text": "Cook the beans.", "substeps": [STEPS[0]]}, STEPS[1]],
         ("Cook the beans.", *STEPS)),
        ({"Pot": STEPS[0], "Rest": [STEPS[1]]}, (f"Pot: {STEPS[0]}", f"Rest: {STEPS[1]}")),
        ([{"type": "step", "content": [{"type": "html", "data": {"value": f"<p>{t}</p>"}}]}
          for t in STEPS], STEPS),
        ([{"name": "", "instructions": [{"text": text} for text in STEPS]}], STEPS),
        ([[{"type": "text", "value": "Simmer the "}, {"type": "ingredient", "name": "beans"},
           {"type": "text", "value": " for "},
           {"type": "timer", "quantity": 5, "units": "minutes"},
           {"type": "text", "value": "."}], STEPS[1]],
         ("Simmer the beans for 5 minutes.", STEPS[1])),
    ],
)  # fmt: skip
def test_steps_in_every_form(steps, expected):
    recipe, notes = read(instructions=steps)
    assert recipe.steps == expected
    assert unread(notes) == []


def test_the_longer_of_action_and_detail_is_the_step():
    steps = {
        "1": {"action": "Begin", "detail": STEPS[0]},
        "2": {"action": STEPS[1], "detail": "gently"},
    }
    recipe, notes = read(instructions=steps)
    assert recipe.steps == STEPS
    assert unread(notes) == ["instructions.action", "instructions.detail"]


def test_the_end_of_a_range_is_written():
    recipe, _ = read(ingredients=[{"name": "leeks", "qty": "2", "range_end": "3"}])
    assert recipe.ingredients == ("2-3 leeks",)


def test_a_list_of_objects_in_place_of_servings_is_counted():
    yields = [{"yields": 2, "ingredients": [{"id": "a", "amount": 250}]}]
    assert unread(read(yields=yields)[1]) == ["yields"]
    assert unread(read(yields=["4", "4 servings"])[1]) == []


def test_what_a_step_does_not_use_is_counted():
    steps = [
        {"number": 1, "step": STEPS[0], "equipment": [{"id": 1, "name": "pot"}]},
        {"@type": "HowToStep", "name": "Carrots!", "text": STEPS[1], "image": "x.png"},
        {"foo": "x", "bar": "y"},
    ]
    recipe, notes = read(instructions=steps)
    assert recipe.steps == STEPS
    names = ["bar", "equipment", "foo", "image"]
    assert unread(notes) == [f"instructions.{name}" for name in names]
    assert notes[NOT_READ] == 1


def test_the_data_report_names_the_keys_with_the_number_of_records(tmp_path):
    path = tmp_path / "file.jsonl"
    record = {
        "title": "Stew",
        "ingredients": [BEANS | {"aisle": "Beans"}],
        "steps": [*STEPS],
    }
    path.write_text(f"{json.dumps(record)}\n" * 2)
    (block,) = RecipeReader().blocks(path)
    assert RecipeReader().examples(block).unused == {"ingredients.aisle": 2}


def test_mealie(read_text):
    cumin = MEALIE | {
        "quantity": 1.0,
        "unit": None,
        "food": None,
        "note": "1/4 tsp cumin",
    }
    steps = [{"title": "", "text": text, "ingredientReferences": []} for text in STEPS]
    record = {
        "name": "Stew",
        "recipeIngredient": [MEALIE, cumin],
        "recipeInstructions": steps,
    }
    record["recipeCategory"] = [{"name": "Soups", "slug": "soups"}]
    recipe = read_text(json.dumps(record)).one
    assert recipe.ingredients == (LINES[0], "1/4 tsp cumin")
    assert recipe.steps == STEPS
    assert recipe.tags == ("Soups",)


def test_ingredients_inside_of_steps(read_text):
    header = {
        "food": None,
        "unit": None,
        "amount": 0,
        "note": "For the pot",
        "is_header": True,
    }
    carrots = {"food": {"name": "carrots"}, "unit": None, "amount": 2.0, "note": ""}
    steps = [
        {"name": "", "instruction": STEPS[0], "ingredients": [header, TANDOOR]},
        {"name": "", "instruction": STEPS[1], "ingredients": [carrots]},
    ]
    recipe = read_text(json.dumps({"name": "Stew", "steps": steps})).one
    assert (recipe.ingredients, recipe.steps) == (LINES, STEPS)
    node = {"@type": "Recipe", "name": "Stew", "recipeInstructions": steps}
    assert read_text(json.dumps(node)).one.ingredients == LINES


def test_steps_without_ingredients_inside_are_refused_as_before(read_text):
    with pytest.raises(DataError, match="without a column of ingredients"):
        read_text(
            json.dumps(
                {"name": "Stew", "steps": [{"instruction": text} for text in STEPS]}
            )
        )


@pytest.mark.parametrize(
    "record",
    [
        {"strMeal": "Stew", "strInstructions": "\r\n".join(STEPS), "strIngredient1": "white beans",
         "strMeasure1": "250 g", "strIngredient2": "carrots", "strMeasure2": "2",
         "strIngredient3": "", "strMeasure3": " "},
        {"title": "Stew", "Directions": "\n".join(STEPS), "Quantity": "250", "Unit01": "g",
         "Ingredient01": "white beans", "Quantity02": "2", "Unit02": "", "Ingredient02": "carrots"},
        {"title": "Stew", "ingredient_1": "white beans", "amount_1": "250 g",
         "ingredient_2": "carrots", "amount_2": 2, "step_1": STEPS[0], "step_2": STEPS[1]},
        {"recipe": {"label": "Stew", "ingredientLines": ["250 g white beans", "2 carrots"],
                    "instructionLines": [*STEPS]}},
        {"name": "Stew", "sections": [{"name": "Pot", "components": [
            TASTY | {"extra_comment": "", "raw_text": "250 g white beans"}, CARROTS]}],
         "instructions": [{"display_text": text} for text in STEPS]},
    ],
)  # fmt: skip
def test_numbered_fields_and_wrapped_records(read_text, record):
    recipe = read_text(json.dumps(record)).one
    assert recipe.ingredients == ("250 g white beans", "2 carrots")
    assert (recipe.title, recipe.steps) == ("Stew", STEPS)


def test_steps_of_cooklang_name_ingredients_by_index(read_text):
    content = [
        {"type": "step", "value": {"number": 1, "items": [
            {"type": "text", "value": "Simmer the "}, {"type": "ingredient", "index": 0},
            {"type": "text", "value": " until they are tender."}]}},
        {"type": "text", "value": STEPS[1]},
    ]  # fmt: skip
    sections = [{"name": None, "content": content}]
    record = {"title": "Stew", "ingredients": [COOKLANG, CARROTS], "sections": sections}
    recipe = read_text(json.dumps(record)).one
    assert recipe.ingredients == LINES
    assert recipe.steps == ("Simmer the white beans until they are tender.", STEPS[1])


def test_headings_in_brackets_are_not_a_broken_list():
    text = "[Pot]\n250 g white beans\n[To serve]\n2 carrots"
    assert read(ingredients=text)[0].ingredients == ("250 g white beans", "2 carrots")


def test_documents_with_sections_are_not_recipes(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(
        json.dumps({"title": "Beans", "text": "Beans are seeds.", "sections": ["a"]})
    )
    with pytest.raises(DataError, match="of documents"):
        RecipeReader().schema(path)
