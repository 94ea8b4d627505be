from __future__ import annotations

import pytest

from toque.cooking.consistency import ingredient_coverage
from toque.cooking.recipe import parse_text
from toque.cooking.recipe_scores import evaluate_recipe
from toque.cooking.text_keys import ACTION_VERBS, has_action_verb

WORKED_EXAMPLE = """\
Ingredients:
- 2 cups flour
- 1 1/2 teaspoons baking powder
- 2 large eggs
- ½ cup milk
- a pinch of salt

Instructions:
1. Whisk the flour, baking powder and salt in a bowl.
2. Beat in the eggs and milk.
3. Cook spoonfuls in a hot skillet for 2 minutes on each side.
"""


def evaluated(text: str) -> dict[str, float]:
    return evaluate_recipe(text, parse_text(text))


def test_the_worked_example_scores_one_everywhere():
    assert evaluated(WORKED_EXAMPLE) == {
        "ingredient_coherence": 1.0,
        "instruction_quality": 1.0,
        "completeness": 1.0,
        "format_correctness": 1.0,
        "form": 1.0,
    }


def test_a_broken_recipe_by_hand():
    # One of two ingredients has a quantity, one of three steps a verb, "Directions" is no header
    # of the form, and the text is under 100 characters.
    text = "Ingredients:\n- 1 cup rice\n- love\n\nDirections:\n1. Boil the rice.\n2. Yes.\n3. Nice."
    assert len(text) < 100
    scores = evaluated(text)
    assert scores["ingredient_coherence"] == 1 / 2
    assert scores["instruction_quality"] == 1 / 3
    assert scores["completeness"] == 0.66
    assert scores["format_correctness"] == 0.5
    assert scores["form"] == pytest.approx((1 / 2 + 1 / 3 + 0.66 + 0.5) / 4)


def test_no_text_at_all():
    assert set(evaluated("").values()) == {0.0}


def test_only_ingredients_of_the_right_length():
    text = "Ingredients:\n" + "\n".join(f"- {n} cups of flour" for n in range(1, 8))
    scores = evaluated(text)
    assert scores["completeness"] == 0.67
    assert scores["instruction_quality"] == 0.0
    assert scores["format_correctness"] == 0.5
    assert scores["form"] == pytest.approx((1.0 + 0.0 + 0.67 + 0.5) / 4)


@pytest.mark.parametrize(
    ("n_chars", "expected"), [(99, 0.66), (100, 1.0), (2000, 1.0), (2001, 0.66)]
)
def test_completeness_at_the_bounds_of_length(n_chars, expected):
    head = "Ingredients:\n- 1 cup rice\n\nInstructions:\n1. Boil "
    text = head + "a" * (n_chars - len(head))
    assert evaluated(text)["completeness"] == expected


def test_verbs_in_every_regular_form():
    assert len(ACTION_VERBS) >= 150
    for step in ("Chopped onions go in.", "Stirring often.", "The fish bakes slowly.", "Dried out.",
                 "PREHEAT the oven."):  # fmt: skip
        assert has_action_verb(step), step
    for step in ("Yes.", "Delicious and lovely.", "", "12345"):
        assert not has_action_verb(step), step


def test_coverage_counts_head_nouns_in_any_number():
    asked = ["black beans", "ripe tomatoes", "olive oil", "bay leaf"]
    text = "1 can beans\n2 bay leaves\nWarm the oil."
    assert ingredient_coverage(asked, text) == 3 / 4


def test_coverage_takes_whole_lines_and_whole_words():
    assert ingredient_coverage(["1 (16 ounce) can black beans, drained"], "Add the beans.") == 1.0
    assert ingredient_coverage(["rice"], "Sliced thin.") == 0.0
    assert ingredient_coverage(["potatoes"], "A potato.") == 1.0
    assert ingredient_coverage([], "anything") == 1.0
