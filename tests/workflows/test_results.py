"""Written texts: their scores, and the hint while they are poor."""

from __future__ import annotations

from toque.workflows.results import Answer, Written, hint_of

PROMPT = "Generate recipe for: Pea Soup using ingredients: peas, onion"
GOOD = (
    "Ingredients:\n- 2 cups peas\n- 1 onion, diced\n\nInstructions:\n1. Soften the onion in a pot "
    "for 5 minutes.\n2. Add the peas, cover with water and simmer for 20 minutes."
)


def test_poor_texts_get_a_hint_and_good_ones_none() -> None:
    good, poor = Written(PROMPT, GOOD, 60), Written(PROMPT, "peas peas peas peas", 4)
    assert next(iter(good.metrics)) == "recipe_score"  # the one to rank by comes first
    assert hint_of([good]) == ""
    assert "0.00 of 1" in hint_of([poor, poor])
    assert hint_of([good, poor, poor]).startswith("The texts are still poor")


def test_no_hint_about_what_is_no_recipe() -> None:
    assert hint_of([]) == ""
    assert hint_of([Written("Once upon a time", "there was", 2)]) == ""
    assert hint_of([Answer(PROMPT, "easy", {"easy": 1.0})]) == ""
