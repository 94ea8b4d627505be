from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.recipe import Recipe, parse_text, to_text

_WORDS = st.text("abcdefg é", min_size=1).map(str.strip).filter(bool)


@given(st.lists(_WORDS, min_size=1), st.lists(_WORDS, min_size=1))
def test_parsing_inverts_writing_of_any_words(ingredients, steps):
    parsed = parse_text(to_text(Recipe("x", tuple(ingredients), tuple(steps))))
    assert (parsed.ingredients, parsed.steps) == (tuple(ingredients), tuple(steps))


@pytest.mark.parametrize(
    "text",
    [
        "## Ingredients\n* 2 eggs\n\n## Steps\n1) Boil the eggs.",
        "**Ingredients:**\n• 2 eggs\n**Instructions:**\nStep 1: Boil the eggs.",
        "INGREDIENTS:\n2 eggs\nINSTRUCTIONS\n- Boil the eggs.",
        "Ingredients: 2 eggs\nSteps: 1. Boil the eggs.",
        "Boiled Eggs\n\nIngredients:\n\n-- 2 eggs\n\nInstructions:\n\n1 . Boil the eggs.",
    ],
)
def test_headers_and_marks_as_models_write_them(text):
    parsed = parse_text(text)
    assert parsed.ingredients == ("2 eggs",)
    assert parsed.steps == ("Boil the eggs.",)
    assert parsed.has_ingredients_header
    assert parsed.has_instructions_header


def test_without_headers_the_marks_decide():
    parsed = parse_text("Eggs\n- 2 eggs\n- 1 cup water\n1. Boil the water.\n2. Add the eggs.")
    assert parsed.ingredients == ("2 eggs", "1 cup water")
    assert parsed.steps == ("Boil the water.", "Add the eggs.")
    assert not parsed.has_ingredients_header
    assert not parsed.has_instructions_header


def test_numbered_steps_after_bulleted_ingredients_need_no_header():
    parsed = parse_text("Ingredients:\n- 2 eggs\n1. Boil the eggs.\nPeel them.")
    assert parsed.ingredients == ("2 eggs",)
    assert parsed.steps == ("Boil the eggs.", "Peel them.")


def test_a_quantity_is_not_a_step_number():
    parsed = parse_text("Ingredients:\n1 cup rice\n1.5 cups water\n2 eggs")
    assert parsed.ingredients == ("1 cup rice", "1.5 cups water", "2 eggs")


def test_directions_are_read_but_are_not_the_form_asked_for():
    parsed = parse_text("Ingredients:\n- 2 eggs\nDirections:\n1. Boil the eggs.")
    assert parsed.steps == ("Boil the eggs.",)
    assert not parsed.has_instructions_header


@given(st.text())
def test_any_text_is_read(text):
    parsed = parse_text(text)
    assert all(line.strip() for line in (*parsed.ingredients, *parsed.steps))
