"""Scores of the mistakes in a recipe, and their combination."""

import pytest

from toque.cooking.cookable import WEIGHTS, cookable
from toque.cooking.dish_steps import dish_made, food_cooked
from toque.cooking.ingredient_use import (
    added_once,
    added_twice,
    ingredients_named,
    requested_listed,
    steps_detailed,
    unnamed_ingredients,
)
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.recipe_scores import NAMES, foods_listed, phrases_once, text_metrics
from toque.cooking.usual_amounts import amounts_differ, amounts_usual, unusual_amounts

PROMPT = (
    "Generate recipe for: Tomato Soup using ingredients: olive oil, onion, canned tomatoes, "
    "chicken broth, heavy cream"
)
GOOD = """Ingredients:
- 1 tablespoon olive oil
- 1 onion, chopped
- 1 (28 ounce) can tomatoes
- 2 cups chicken broth
- 1/2 cup heavy cream

Instructions:
1. Heat the olive oil in a pot. Cook the onion in the hot oil until soft, about 5 minutes.
2. Add the tomatoes and chicken broth and simmer for 20 minutes.
3. Puree the soup and stir in the cream."""


def recipe(ingredients: str, steps: str) -> ParsedRecipe:
    """Return a recipe from items that are separated by bars."""
    return ParsedRecipe(tuple(ingredients.split("|")), tuple(steps.split("|")))


def score(text: str, prompt: str = PROMPT) -> float:
    return text_metrics(prompt, text)["cookable"]


def test_a_recipe_without_mistakes_has_the_full_score():
    scores = text_metrics(PROMPT, GOOD)
    assert {name: scores[name] for name in WEIGHTS if scores.get(name, 1.0) < 1.0} == {}
    assert scores["cookable"] == 1.0
    assert set(WEIGHTS) | {"cookable"} <= set(NAMES)


@pytest.mark.parametrize(
    ("before", "after", "mistake"),
    [
        ("the tomatoes and chicken broth", "the chicken broth", "ingredients_named"),
        ("stir in the cream", "stir in the onion", "added_once"),
        ("stir in the cream", "stir in the cream and vodka", "foods_listed"),
        ("- 1/2 cup heavy cream", "- 1/2 cup heavy butter", "requested_listed"),
        ("- 2 cups chicken broth", "- 1 teaspoon chicken broth", "amounts_usual"),
        ("Puree the soup", "Bake in the oven", "oven_fits"),
    ],
)
def test_every_mistake_lowers_the_score(before: str, after: str, mistake: str):
    assert before in GOOD
    changed = GOOD.replace(before, after)
    assert text_metrics(PROMPT, changed).get(mistake, 1.0) < 1.0
    assert score(changed) < 0.8


def test_one_step_that_names_everything_is_not_a_recipe():
    ingredients, _, _ = GOOD.partition("Instructions:")
    steps = "1. Combine olive oil, onion, tomatoes, broth and cream. Serve."
    assert score(f"{ingredients}Instructions:\n{steps}") < score(GOOD)
    assert score(ingredients) == 0.0


def test_mistakes_add_up():
    both = cookable({"added_once": 0.5, "oven_fits": 0.0}, is_complete=True)
    mistakes = 0.5 * WEIGHTS["added_once"] + WEIGHTS["oven_fits"]
    assert both == pytest.approx(1 / (1 + mistakes))
    assert cookable({}, is_complete=True) == 1.0


def test_a_step_names_an_ingredient_by_its_head_or_by_a_word_of_its_own():
    steps = "Boil the pasta.|Add the broth and the brown sugar."
    foods = recipe("1 lb spaghetti|2 cups chicken broth|1 cup brown sugar|1 egg", steps)
    assert unnamed_ingredients(foods) == ["1 egg"]
    assert ingredients_named(foods) == 3 / 4
    everything = recipe("1 egg|1 onion", "Mix everything.")
    assert ingredients_named(everything) == 0.0
    assert ingredients_named(ParsedRecipe((), ("Mix.",))) is None


@pytest.mark.parametrize(
    ("steps", "twice"),
    [
        ("Add the flour to the bowl. Stir in the flour.", ["2 cups flour"]),
        ("Whisk the flour, egg, and flour.", ["2 cups flour"]),
        ("Add half of the flour. Stir in the remaining flour.", []),
        ("Mix the flour. Add the egg to the flour mixture.", []),
        ("Mix the flour. Beat the egg into the flour.", []),
        ("Sprinkle the flour with salt. Sprinkle with salt.", []),
        ("Add the chicken. Pour in the chicken broth.", []),
        ("Dust the egg with flour. Coat the pan with flour.", ["2 cups flour"]),
    ],
)
def test_an_ingredient_is_added_once(steps: str, twice: list[str]):
    foods = recipe("2 cups flour|1 egg|salt|1 chicken|1 cup chicken broth", steps)
    assert added_twice(foods) == twice
    assert added_once(foods) == 1 / (1 + len(twice))


def test_an_ingredient_in_two_lines_is_added_twice():
    lines = "1 cup sugar|1/2 cup sugar"
    assert not added_twice(recipe(lines, "Add the sugar.|Sprinkle with sugar."))


def test_requested_names_are_compared_word_by_word():
    foods = recipe("1 cup chicken oil|2 eggs", "Mix.")
    assert requested_listed(["chicken broth", "egg"], foods) == 3 / 4
    assert requested_listed([], foods) is None
    assert requested_listed(["egg"], ParsedRecipe()) == 0.0


def test_foods_that_no_line_lists():
    foods = recipe("2 eggs|1 cup spaghetti", "Beat the yolks.|Add pasta and butter.")
    assert foods_listed("", foods) == 1 / 2
    assert foods_listed("Butter Noodles", foods) == 1.0
    assert foods_listed("", ParsedRecipe(("1 egg",), ())) is None


@pytest.mark.parametrize(
    ("title", "step", "value"),
    [
        ("Oat Cookies II", "Drop spoonfuls onto a baking sheet.", 1.0),
        ("Oat Cookies II", "Pour into a cake pan.", 0.0),
        ("Grilled Chicken Salad", "Toss everything in a bowl.", 0.5),
        ("Carrots", "Boil.", None),
    ],
)
def test_steps_make_the_dish(title: str, step: str, value: float | None):
    assert dish_made(title, recipe("1 carrot", step)) == value


@pytest.mark.parametrize(
    ("title", "line", "step", "value"),
    [
        ("Quick Supper", "1 pound chicken", "Mix and serve.", 0.0),
        ("Quick Supper", "1 pound chicken", "Roast it.", 1.0),
        ("Quick Supper", "1 can chicken", "Mix and serve.", None),
        ("Apple Cake", "2 apples", "Mix and serve.", 0.0),
        ("Icebox Cake", "2 apples", "Mix and refrigerate.", None),
        ("Fruit Salad", "2 apples", "Mix and serve.", None),
    ],
)
def test_food_is_cooked(title: str, line: str, step: str, value: float | None):
    assert food_cooked(title, recipe(line, step)) == value


def test_amounts_are_usual_for_the_dish():
    lines = "1 cup butter|1 cup sugar|2 eggs|{} flour"
    usual = recipe(lines.format("2 1/2 cups"), "Mix.")
    little = recipe(lines.format("1 teaspoon"), "Mix.")
    assert unusual_amounts("Sugar Cookies", usual) == []
    assert "flour" in unusual_amounts("Sugar Cookies", little)
    assert amounts_usual("Sugar Cookies", usual) == 1.0
    assert amounts_usual("Sugar Cookies", ParsedRecipe()) is None


def test_the_same_number_of_cups_in_many_lines():
    half_cups = [f"1/2 cup {food}" for food in ("flour", "sugar", "milk", "oil")]
    assert amounts_differ(ParsedRecipe(tuple(half_cups[:2]))) == 1.0
    assert amounts_differ(ParsedRecipe(tuple(half_cups))) == 1 / 3
    assert amounts_differ(ParsedRecipe()) is None


def test_repeated_phrases_and_short_steps():
    loop = recipe("1 egg", "Beat the egg and beat the egg and beat the egg.")
    assert phrases_once(loop) == 4 / 9
    assert phrases_once(recipe("1 egg", "Beat.")) is None
    assert steps_detailed(recipe("1 egg|salt", "Beat the egg.")) == 3 / 2 / 4
    assert steps_detailed(ParsedRecipe((), ("Beat.",))) is None
