from __future__ import annotations

from toque.cooking.prompts import MAX_PROMPT_INGREDIENTS, PROMPT_FORMATS, write_prompt


def test_the_prompt_names_foods_without_amounts():
    lines = ["1 (16 ounce) can black beans, drained", "2 tablespoons olive oil", "salt to taste"]
    assert write_prompt("Bean Soup", lines) == (
        "Generate recipe for: Bean Soup using ingredients: black beans, olive oil, salt"
    )


def test_names_are_written_once_and_at_most_twenty_times():
    assert write_prompt("Eggs", ["2 eggs", "1 cup Eggs"]).endswith("ingredients: eggs")
    many = [f"1 cup {chr(97 + n) * 5}" for n in range(26)]
    assert write_prompt("Much", many).count(",") == MAX_PROMPT_INGREDIENTS - 1


def test_a_title_alone():
    assert write_prompt("Toast", []) == "Generate recipe for: Toast"


def test_the_seven_formats_each_name_the_dish():
    assert len(set(PROMPT_FORMATS)) == 7
    assert all(form.format(text="Pea Soup").endswith("Pea Soup") for form in PROMPT_FORMATS)
