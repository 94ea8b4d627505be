from __future__ import annotations

import pytest

from toque.cooking.consistency import foods_of_title, steps_listed, title_kept
from toque.cooking.prompts import REQUESTS
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.recipe_scores import title_of, variety


@pytest.mark.parametrize(
    ("title", "foods"),
    [
        ("Blueberry Muffins", {"blueberry"}),
        ("Muffins with Blueberries and Lemon", {"blueberry", "lemon"}),
        ("Roast Chicken", set()),  # the last word is the dish
        ("Chicken and Rice", {"rice"}),
        ("Coffee Cake", set()),
        ("Peanut Butter Cookies", {"peanut"}),
        ("Grandma's Best Ever", set()),
        ("", set()),
    ],
)
def test_foods_that_a_title_promises(title, foods):
    assert foods_of_title(title) == foods


def test_a_promise_is_kept_by_any_name_of_the_food():
    recipe = ParsedRecipe(("1 cup rolled oats", "2 carrots"), ("Stir in the raisins.",))
    assert title_kept("Oatmeal Raisin Cookies", recipe) == 1.0  # oats are oatmeal
    assert title_kept("Oatmeal Banana Cookies", recipe) == 1 / 2
    assert title_kept("Cookies", recipe) is None


def test_foods_of_the_steps_that_are_not_listed():
    lines = ("2 cups flour", "1 egg", "8 ounces spaghetti")
    assert steps_listed(ParsedRecipe(lines, ("Boil the pasta in water.",))) == 1.0
    assert steps_listed(ParsedRecipe(lines, ("Beat the egg with the shrimp.",))) == 1 / 2
    assert steps_listed(ParsedRecipe(lines, ("Wait.",))) is None


def test_variety_falls_with_what_is_said_again():
    lines = ("2 cups flour", "1 egg", "1 cup milk", "1 teaspoon salt", "1 pinch salt")
    steps = ("Whisk everything.", "Rest the batter for an hour.", "Fry it in butter.")
    assert variety(ParsedRecipe(lines, steps)) == 1.0  # salt may stand twice
    assert variety(ParsedRecipe((), ())) == 1.0  # nothing is said again
    assert variety(ParsedRecipe(lines, steps[:1] * 4)) == pytest.approx(1 / 4 / 0.7)
    assert variety(ParsedRecipe(("1 egg", "2 eggs") * 5, steps)) == pytest.approx(2 / 10 / 0.7)
    again = ("Stir the soup and taste it well. " * 20,)
    assert variety(ParsedRecipe(lines, again)) < 0.2


@pytest.mark.parametrize("form", REQUESTS)
def test_the_title_in_every_form_of_request(form):
    known = {"foods": "peas and ham", "servings": "4", "minutes": "30"}
    assert title_of(form.format(title="Pea Soup", **known)) == "Pea Soup"


def test_a_prompt_without_a_title():
    assert title_of("Once upon a time") == ""
