from __future__ import annotations

import pytest

from toque.cooking.schemas import RecipeReader, mealmaster


def cell(amount, unit, text):
    return f"{amount:>7} {unit:<2} {text}"


def two(left, right):
    return f"{left:<41}{right}"


def recipe(
    title="Lentil Pot",
    ingredients=(),
    steps=(),
    header="MMMMM----- Recipe via Meal-Master (tm) v8.05",
    end="MMMMM",
):
    return "\r\n".join(
        [
            header,
            " ",
            f"      Title: {title}",
            " Categories: Soups, Main dish",
            "      Yield: 6 Servings",
            " ",
            *ingredients,
            " ",
            *steps,
            " ",
            end,
            " ",
            "",
        ]
    )


STEPS = [
    "  Simmer the lentils in plenty of water until they are soft,",
    "  about 30 minutes.",
    " ",
    "  Stir in the lemon juice.",
]


def test_one_column(read_text, tmp_path):
    text = "A letter before it.\r\n" + recipe(
        ingredients=[
            cell("1 1/2", "c", "Brown lentils;"),
            cell("", "", "-rinsed well"),
            cell("1", "lg", "Onion"),
            cell("2", "", "Lemons"),
            cell("1/2", "ts", "Cumin"),
            cell("2", "bn", "Parsley"),
            cell("", "", "Salt to taste"),
        ],
        steps=STEPS,
    )
    found = read_text(text).one
    assert RecipeReader().schema(tmp_path / "file") == "mealmaster"
    assert found.title == "Lentil Pot"
    assert found.tags == ("Soups", "Main dish")
    assert found.servings == 6
    assert found.ingredients == (
        "1 1/2 cups Brown lentils; rinsed well",
        "1 large Onion",
        "2 Lemons",
        "1/2 teaspoon Cumin",
        "2 bunches Parsley",
        "Salt to taste",
    )
    assert found.steps == (
        "Simmer the lentils in plenty of water until they are soft, about 30 minutes.",
        "Stir in the lemon juice.",
    )


def test_two_columns_are_read_one_after_the_other(read_text):
    text = recipe(
        ingredients=[
            two(cell("1", "c", "Flour"), cell("", "", "-or white wine")),
            two(cell("1", "tb", "Sugar"), cell("2", "c", "Vegetable oil")),
            two(cell("4", "tb", "Sweet wine"), cell("", "", "Sprinkles")),
        ],
        steps=STEPS,
    )
    assert read_text(text).one.ingredients == (
        "1 cup Flour",
        "1 tablespoon Sugar",
        "4 tablespoons Sweet wine or white wine",
        "2 cups Vegetable oil",
        "Sprinkles",
    )


def test_sections_and_meant_line_breaks(read_text):
    section = "MMMMM--------------------------TOPPING-------------------------------"
    text = recipe(
        ingredients=[cell("1", "c", "Lentils"), " ", section, cell("1/2", "c", "Yogurt")],
        steps=[*STEPS, ":Serve hot.", " ", section, "  Spoon the yogurt on top."],
    )
    found = read_text(text).one
    assert found.ingredients == ("1 cup Lentils", "1/2 cup Yogurt")
    assert found.steps[-2:] == ("Serve hot.", "Topping: Spoon the yogurt on top.")


@pytest.mark.parametrize(
    "header",
    [
        "---------- Recipe via Meal-Master (tm) v8.01",
        "MMMMM----------------Meal-Master recipe exported by AnyMeal-----------------",
        "MMMMM----- Now You're Cooking! v5.66 [Meal-Master Export Format]",
        "MMMMM----- Recipe via UNREGISTERED Meal-Master (tm) v8.05",
    ],
)
def test_headers_of_other_programs(read_text, header):
    text = recipe(ingredients=[cell("1", "c", "Lentils")], steps=STEPS, header=header)
    assert read_text(text).one.ingredients == ("1 cup Lentils",)


def test_lines_outside_the_columns(read_text):
    text = recipe(ingredients=["1 slice bread", "2 ts butter", "a pinch of salt"], steps=STEPS)
    assert read_text(text).one.ingredients == (
        "1 slice bread",
        "2 teaspoons butter",
        "a pinch of salt",
    )


def test_long_titles_go_on(read_text):
    text = recipe(
        title="Lentil Pot\r\n             of the House",
        ingredients=[cell("1", "c", "Lentils")],
        steps=STEPS,
    )
    assert read_text(text).one.title == "Lentil Pot of the House"


@pytest.mark.parametrize("size", [50, 333])
def test_many_recipes_in_any_chunks(tmp_path, read_file, monkeypatch, size):
    good = [recipe(f"Pot {n}", [cell(str(n), "c", "Lentils")], STEPS) for n in range(20)]
    good[7] = recipe("Nothing in it")
    good[9] = recipe("Caf\u00e9 Pot", [cell("1", "c", "Lentils")], STEPS)
    path = tmp_path / "file"
    path.write_bytes("".join(good).encode("cp437"))
    data = path.read_bytes()
    monkeypatch.setattr(
        mealmaster,
        "chunks",
        lambda _, **__: (data[i : i + size] for i in range(0, len(data), size)),
    )
    reading = read_file(path)
    lines = "".join(good[:7]).count("\n") + 1
    assert reading.dropped == {"no ingredients": [lines]}
    assert reading.kept == 19
    assert reading.recipes[8].title == "Caf\u00e9 Pot"


def test_a_cut_file_keeps_what_is_whole(read_text):
    whole = recipe("A", [cell("1", "c", "Lentils")], STEPS)
    reading = read_text(whole + recipe("B", [cell("1", "c", "Lentils")])[:-12])
    assert [r.title for r in reading.recipes] == ["A"]
    assert reading.counts == {"no steps": 1}
