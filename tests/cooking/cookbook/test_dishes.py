"""The data of the dishes, and what the interpreter makes of it."""

import re
from pathlib import Path

import pytest
import yaml

from toque.cooking.cookbook import kitchen
from toque.cooking.cookbook.kitchen import Dish, Draw
from toque.cooking.cookbook.measures import PANTRY, measure, specification

FOLDER = Path(kitchen.__file__).with_name("dishes")
TOAST = {"serves": [1], "title": ["Toast"], "tags": ["snack"]}


def _keys(data):
    """Every key of nested data."""
    if isinstance(data, dict):
        yield from map(str, data)
        data = list(data.values())
    for item in data if isinstance(data, list) else ():
        yield from _keys(item)


def test_conditions_ask_for_what_there_is():
    files = [yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")]
    keys = list(_keys(files))
    conditions = [key[3:] for key in keys if key.startswith("if ")]
    times = [key.removesuffix(" min") for key in keys if key.endswith(" min")]
    conditions += [
        case.partition(" if ")[2] for time in times for case in time.split(", ")
    ]
    parts = [part for text in conditions for part in re.split(" and | or ", text)]
    names = {part.removeprefix("no ").partition(" = ")[0] for part in parts}
    groups = {
        match[1] for key in keys if (match := re.fullmatch(r"(\w+) \d(?:-\d)?", key))
    }
    named = {key.partition(" ")[2] for key in keys if key.startswith(("let ", "call "))}
    foods = {food.name for food in PANTRY.values()}
    known = foods | groups | named | {"servings", "$garnish", ""}
    assert {name for name in names if not name.endswith("%")} <= known
    assert len(names) > 50


def test_the_example_of_the_format_is_a_dish():
    text = (FOLDER / "README.md").read_text()
    [(name, data)] = yaml.safe_load(
        re.search(r"```yaml\n(.*?)```", text, re.DOTALL)[1]
    ).items()
    dish = Dish(name, **data)
    titles = {dish.recipe(Draw(1, index)).title for index in range(50)}
    assert {"Tomato Soup", "Tomato Soup with Carrots and Salsa"} <= titles


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"eaten 50%": "2 slice bread"}], "listed twice"),
        ([{"eaten 50%": "1 cup unobtainium"}], "unobtainium"),
        (["Toast the {bread} with {butter}."], "butter.*not in the list"),
        (["Wait."], "do not use"),
        ([{"soon": ["Toast the {bread}."]}], "'soon' is not a command"),
        ([{"2-3 if butter min": ["Toast the {bread}."]}], "no time"),
        (["Toast the {bread} in $pan."], "pan"), ([{"use": "flambe"}], "flambe"),
    ],
)  # fmt: skip
def test_a_wrong_dish_is_refused_by_its_name(steps, message):
    dish = Dish("toast", foods=["1 slice bread"], steps=steps, **TOAST)
    with pytest.raises((AssertionError, KeyError, ValueError), match=message) as caught:
        dish.recipe(Draw(0, 0))
    assert caught.value.__notes__ == ["in the dish 'toast' of the cookbook"]


@pytest.mark.parametrize(
    ("spec", "scale", "line"),
    [
        ("1/4 onion, chopped", 2, "1/2 yellow onion"), ("1/4 onion", 4, "1 yellow onion"),
        ("1/4 onion", 6, "2 yellow onions"), ("1/2 clove garlic", 1, "1 clove garlic"),
        ("1/2 clove garlic", 6, "3 cloves garlic"),
        ("1/4 can black beans", 8, "2 (15 ounce) cans black beans"),
        ("1/4 can crushed tomatoes", 4, "1 (28 ounce) can crushed tomatoes"),
        ("1/3 cup rice", 4, "1 1/3 cups long-grain white rice"),
        ("1/3 cup cooked rice", 1, "1/3 cup cooked rice"),
        ("1 tsp olive oil", 3, "1 tablespoon olive oil"),
        ("1/2 tbsp olive oil", 8, "1/4 cup olive oil"), ("1/8 tsp salt", 6, "3/4 teaspoon salt"),
        ("1/16 tsp salt", 1, "1/4 teaspoon salt"), ("1 pinch salt", 1, "1 pinch salt"),
        ("1 pinch salt", 4, "1/4 teaspoon salt"), ("2 oz spaghetti", 2, "4 ounces spaghetti"),
        ("3 oz spaghetti", 4, "3/4 pound spaghetti"),
        ("1/4 lb ground beef", 4, "1 pound ground beef"),
        ("1/3 lb ground beef", 6, "2 pounds ground beef"), ("1/4 egg", 2, "1 large egg"),
        ("2 slice bread", 2, "4 slices bread"),
        ("9/4 tsp yeast", 2, "1 1/2 tablespoons active dry yeast"),
    ],
)  # fmt: skip
def test_amounts_scale_and_read_well(spec, scale, line):
    assert measure(specification(spec), scale).line == line


def test_grams_follow_the_rounded_amount():
    assert measure(specification("1/4 onion"), 6).grams == 300.0
    assert measure(specification("1/2 cup flour"), 2).grams == 125.0
    assert measure(specification("1/4 lb ground beef"), 4).grams == pytest.approx(453.6)
