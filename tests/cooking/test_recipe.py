import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.recipe import ParsedRecipe, Recipe, parse_text, to_text

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


@pytest.mark.parametrize(
    ("text", "ingredients", "steps", "headers"),
    [
        # without headers the marks decide
        ("Eggs\n- 2 eggs\n- 1 cup water\n1. Boil the water.\n2. Add the eggs.",
         ("2 eggs", "1 cup water"), ("Boil the water.", "Add the eggs."), (False, False)),
        # numbered steps after bulleted ingredients need no header
        ("Ingredients:\n- 2 eggs\n1. Boil the eggs.\nPeel them.", ("2 eggs",),
         ("Boil the eggs.", "Peel them."), (True, False)),
        # a quantity is not a step number
        ("Ingredients:\n1 cup rice\n1.5 cups water\n2 eggs",
         ("1 cup rice", "1.5 cups water", "2 eggs"), (), (True, False)),
        # directions are read but are not the form asked for
        ("Ingredients:\n- 2 eggs\nDirections:\n1. Boil the eggs.", ("2 eggs",),
         ("Boil the eggs.",), (True, False)),
    ],
)  # fmt: skip
def test_texts_of_other_forms(text, ingredients, steps, headers):
    assert parse_text(text) == ParsedRecipe(ingredients, steps, *headers)


@given(st.text())
def test_any_text_is_read(text):
    parsed = parse_text(text)
    assert all(line.strip() for line in (*parsed.ingredients, *parsed.steps))
