"""Recipe's form: which texts its patterns hold."""

import random
import re
from dataclasses import replace

import pytest

from toque.cooking.cookbook.recipes import recipes
from toque.cooking.prompts import write_prompt
from toque.cooking.recipe import Recipe, to_text
from toque.cooking.recipe_form import MAX_OTHER_INGREDIENTS, recipe_form
from toque.cooking.recipe_scores import requested_ingredients

STEPS = ("Mix it all.", "Serve hot.")


def parts(text: str, asked: list[str]) -> list[str] | None:
    """The text cut as its form says; None where it does not match."""
    form, cut = recipe_form(asked), []
    pattern = next(form)
    while found := re.match(pattern, text):
        cut.append(found[0])
        text = text[found.end() :]
        try:
            pattern = form.send(found[0])
        except StopIteration:
            return None if text else cut
    return None


def recipe(*lines: str, steps: tuple[str, ...] = STEPS) -> str:
    return to_text(Recipe("", lines, steps))


def test_every_recipe_of_the_cookbook_has_the_form_in_any_order():
    for number, one in enumerate(recipes(4, seed=5)):
        asked = requested_ingredients(write_prompt(one.title, one.ingredients))
        lines = list(one.ingredients)
        random.Random(number).shuffle(lines)
        cut = parts(to_text(replace(one, ingredients=tuple(lines))), asked)
        assert cut is not None, lines
        assert len(cut) == len(asked)


@pytest.mark.parametrize(
    ("lines", "held"),
    [
        (("2 cups rice", "1 egg"), True),
        (("2 large Eggs, beaten", "rice, to taste", "1 pinch salt"), True),
        (("1 (14 ounce) can rice", "½ cup chopped eggs"), True),
        (("2 cups rice",), False),  # one is missing
        (
            ("1 pinch salt", "2 cups rice", "1 egg"),
            False,
        ),  # not asked for, before what was
        (("2 cups rice", "1 cup rice", "1 egg"), False),  # twice
        (("2 cups rice vinegar", "1 egg"), False),  # another food
        (("2 cups rice", "1 egg", *["1 pinch salt"] * MAX_OTHER_INGREDIENTS), True),
        (
            ("2 cups rice", "1 egg", *["1 pinch salt"] * (MAX_OTHER_INGREDIENTS + 1)),
            False,
        ),
    ],
)
def test_all_that_was_asked_stands_first_and_once(lines, held):
    assert (parts(recipe(*lines), ["rice", "Eggs"]) is not None) == held


def test_a_name_within_a_name_is_told_from_it():
    lines = ("1 cup olive oil", "2 tablespoons oil")
    for order in (lines, lines[::-1]):
        assert parts(recipe(*order), ["oil", "olive oil"]) is not None
    assert parts(recipe(*lines[:1]), ["oil", "olive oil"]) is None


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("Ingredients:\n", ""), ("\nInstructions:\n", "\n"), ("2. Serve", "3. Serve"),
        ("Serve hot.", "Serve hot"), ("- 1 egg", "1 egg"),
        ("- 1 egg", "- 1 egg. Mix it and bake it all for long"),
    ],
)  # fmt: skip
def test_a_text_of_another_form_is_not_held(was, becomes):
    text = recipe("2 cups rice", "1 egg")
    for asked in ([], ["rice", "egg"]):
        assert parts(text, asked) is not None
        assert parts(text.replace(was, becomes), asked) is None
