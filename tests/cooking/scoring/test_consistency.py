from __future__ import annotations

import pytest

from toque.cooking.consistency import (
    hallucinated_ingredients,
    ingredients_used,
    quantity_sanity,
    structure_score,
)
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.recipe_scores import text_metrics

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
