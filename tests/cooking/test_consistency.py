"""Consistency of a recipe with its prompt, its title and itself."""

from __future__ import annotations

import pytest

from toque.cooking.consistency import (
    foods_of_title,
    hallucinated_ingredients,
    ingredients_used,
    quantity_sanity,
    steps_listed,
    structure_score,
    title_kept,
)
from toque.cooking.prompts import REQUESTS
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.recipe_scores import text_metrics, title_of, variety

SOUP = """Ingredients:
- 1 cup red lentils
- 2 carrots, diced
- 1 teaspoon salt

Instructions:
1. Soften the carrots.
2. Simmer with the lentils for 25 minutes, and season with salt."""


def test_an_ingredient_nobody_asked_for():
    recipe = ParsedRecipe(("1 carrot", "2 cups gummy bears", "1 pinch of salt", "water"))
    assert hallucinated_ingredients(["carrots"], recipe) == 1 / 4
    assert hallucinated_ingredients(["carrots", "gummy bear"], recipe) == 0.0
    assert hallucinated_ingredients(["carrots"], ParsedRecipe()) is None


def test_ingredients_that_no_step_uses():
    lines = ("1 carrot", "2 potatoes")
    assert ingredients_used(ParsedRecipe(lines, ("Boil the potato.",))) == 1 / 2
    assert ingredients_used(ParsedRecipe(lines, ("Mix all of the ingredients.",))) == 1.0
    assert ingredients_used(ParsedRecipe(lines, ())) == 0.0
    assert ingredients_used(ParsedRecipe((), ("Boil.",))) is None


@pytest.mark.parametrize(
    ("line", "sane"),
    [
        ("2 cups flour", True), ("900 cups flour", False), ("500 g flour", True),
        ("50 kg flour", False), ("25 tablespoons salt", False), ("16 tablespoons butter", True),
        ("0 eggs", False), ("0.5 cup milk", True), ("30 almonds", True), ("9000 almonds", False),
        ("1 (14.5 ounce) can tomatoes", True), ("salt to taste", True),
        ("1/2 cup ground cinnamon", False), ("1 1/2 cups vanilla extract", False),
        ("1/4 cup baking powder", True), ("1 cup cayenne pepper sauce", True),
        ("half a cup baking soda", False), ("1 teaspoon nutmeg", True),
    ],
)  # fmt: skip
def test_amounts_a_kitchen_has_use_for(line, sane):
    assert quantity_sanity(ParsedRecipe((line,))) == float(sane)


@pytest.mark.parametrize(
    ("step", "score"),
    [
        ("Bake at 350 degrees for 20 minutes.", 1.0), ("Bake at 3500°F.", 0.0),
        ("Chill for 0 minutes.", 0.0), ("Ferment for 48 hours.", 1.0),
        ("Simmer 100 hours.", 0.0), ("Stir.", None),
    ],
)  # fmt: skip
def test_temperatures_and_times(step, score):
    assert quantity_sanity(ParsedRecipe((), (step,))) == score


def test_structure_loses_a_sixth_for_each_fault():
    def score(text: str) -> float:
        return structure_score(text, parse_text(text))

    assert score(SOUP) == 1.0
    assert score(SOUP.removesuffix(".")) == pytest.approx(5 / 6)
    assert score(SOUP.replace("2. Simmer", "3. Simmer")) == pytest.approx(5 / 6)
    assert score(SOUP.replace("- 2 carrots, diced", "- 1 cup red lentils")) == pytest.approx(5 / 6)
    assert score(SOUP.partition("Instructions")[0]) == 0.0
    assert score("") == 0.0


def test_what_a_prompt_asked_for_decides_what_is_scored():
    asked = "Generate recipe for: Soup using ingredients: red lentils, carrots"
    scores = text_metrics(asked, SOUP)
    assert scores["ingredient_coverage"] == scores["ingredients_used"] == 1.0
    assert scores["hallucinated_ingredients"] == 0.0
    assert scores["recipe_score"] == 1.0
    bare = text_metrics("Generate recipe for: Soup", SOUP)
    assert set(scores) - set(bare) == {"ingredient_coverage", "hallucinated_ingredients"}
    many = "Generate recipe for: Soup using ingredients: " + ", ".join(
        f"food {i}" for i in range(20)
    )
    assert "hallucinated_ingredients" not in text_metrics(many, SOUP)  # the list was cut


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
