"""Prompts as they are written, and what a person types read as one."""

import pytest

from toque.cooking.prompts import (
    MAX_PROMPT_INGREDIENTS,
    PROMPT_FORMATS,
    asks_for_a_recipe,
    dish_and_foods,
    write_prompt,
)
from toque.models.loading.provenance import Provenance
from toque.workflows.trained_model.prompt_format import rewrite_prompt


def test_names_are_written_once_and_at_most_twenty_times():
    assert write_prompt("Eggs", ["2 eggs", "1 cup Eggs"]).endswith("ingredients: eggs")
    many = [f"1 cup {chr(97 + n) * 5}" for n in range(26)]
    assert write_prompt("Much", many).count(",") == MAX_PROMPT_INGREDIENTS - 1


def test_the_seven_formats_each_name_the_dish():
    assert len(set(PROMPT_FORMATS)) == 7
    assert all(
        form.format(text="Pea Soup").endswith("Pea Soup") for form in PROMPT_FORMATS
    )


DISHES = {
    "Create a simple pasta dish": "simple pasta dish", "Make a healthy breakfast!":
    "healthy breakfast", "How do I make toast": "toast", "Tell me how to cook a stew": "stew",
    "Can you please write me a quick recipe for beans?": "beans",
    "What is a good recipe for toast? I have bread at home.": "toast",
    "I would like to cook pea soup. How is it done?": "pea soup",
    "I want something with eggs": "something with eggs",
    "Please make pancakes": "pancakes",
    "  pea   soup ": "pea   soup",
} | {
    name: name  # of dishes that begin like requests
    for name in ("Make-Ahead Lasagna", "Baked Beans", "Show-Stopper Cake", "Give 'Em Chili",
                 "What's for Dinner?")
}  # fmt: skip


@pytest.mark.parametrize("typed", DISHES)
def test_the_dish_in_a_request(typed: str) -> None:
    assert dish_and_foods(typed) == (DISHES[typed], ())


@pytest.mark.parametrize("form", PROMPT_FORMATS)
def test_every_wording_of_augmentation_is_understood(form: str) -> None:
    assert dish_and_foods(form.format(text="pea soup")) == ("pea soup", ())


def test_ingredients_stand_after_a_colon() -> None:
    assert dish_and_foods("Make me a soup: peas,  , salt") == ("soup", ("peas", "salt"))
    assert dish_and_foods(": peas") == ("", ("peas",))


@pytest.mark.parametrize(
    ("form", "tasks", "expected"),
    [
        ("recipes", ["write"], "Generate recipe for: soup using ingredients: peas"),
        ("recipes", [], "Generate recipe for: soup using ingredients: peas"),
        ("recipes", ["request"], "Please tell me how to make soup with peas."),
        ("recipes", ["write", "request"], "Generate recipe for: soup using ingredients: peas"),
        ("recipes", ["difficulty"], "Make me a soup: peas"), ("pairs", [], "Make me a soup: peas"),
        ("documents", [], "Make me a soup: peas"), ("gaps", [], "Make me a soup: peas"),
    ],
)  # fmt: skip
def test_the_form_a_model_is_trained_on(
    form: str, tasks: list[str], expected: str
) -> None:
    record = Provenance(form=form, max_new_tokens=9, tasks=tasks)
    assert rewrite_prompt("Make me a soup: peas", record) == expected
    asked = "Generate recipe for: toast"
    assert rewrite_prompt(asked, record) == asked
    request = "How do I make toast?"
    others = form == "recipes" and tasks in ([], ["write"])
    assert rewrite_prompt(request, record) == (asked if others else request)


@pytest.mark.parametrize(
    ("prompt", "by_others"),
    [
        ("Generate recipe for: toast", True), ("How do I make toast?", False),
        ("I have bread, butter. How do I make toast with that?", False),
        ("I need toast for 4 people.", False),
    ],
)  # fmt: skip
def test_a_recipe_is_asked_for_in_whole_requests(prompt: str, by_others: bool) -> None:
    """Of a model that never saw a recipe only what nobody else would say asks for one."""
    assert asks_for_a_recipe(prompt)
    assert asks_for_a_recipe(f" {prompt}\n")
    assert asks_for_a_recipe(prompt, knows_recipes=False) == by_others


def test_what_begins_like_a_request_asks_for_no_recipe() -> None:
    for prompt in (
        "I need help resetting my password", "I have a question about my order.", "",
        "How do I make a payment? My card is new.", "I would like to cook something new.",
    ):  # fmt: skip
        assert not asks_for_a_recipe(prompt)
