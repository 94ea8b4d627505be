import pytest
from hypothesis import given
from hypothesis import strategies as st

from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.shopping_list import shopping_list, write_amount


@pytest.mark.parametrize(
    ("quantity", "unit", "written"),
    [
        (2.5, "teaspoon", "2½ teaspoons"), (3, "teaspoon", "1 tablespoon"),
        (12, "teaspoon", "¼ cup"), (7, "tablespoon", "7 tablespoons"),  # no fraction of a cup
        (1 / 16, "cup", "1 tablespoon"), (1 / 2, "tablespoon", "1½ teaspoons"),
        (1 / 30, "teaspoon", "⅛ teaspoon"),  # never nothing
        (8, "ounce", "8 ounces"), (24, "ounce", "1½ pounds"), (0.2, "pound", "3¼ ounces"),
        (999.6, "gram", "1,000 g"), (1500, "gram", "1.5 kg"), (0.25, "litre", "250 ml"),
        (1.96, None, "2"), (1 / 3, None, "⅓"), (2, "bunch", "2 bunches"),
        (2, "leaf", "2 leaves"), (2, "box", "2 boxes"),
    ],
)  # fmt: skip
def test_amounts_are_written_as_a_kitchen_measures(quantity, unit, written):
    assert write_amount((quantity, quantity), unit) == written


@given(
    st.floats(1e-3, 1e6),
    st.floats(1.0, 5.0),
    st.sampled_from([*UNITS, None]),
    st.booleans(),
)
def test_every_amount_is_written_and_never_as_nothing(low, times, unit, keep_unit):
    written = write_amount((low, low * times), unit, keep_unit=keep_unit)
    assert written
    assert not written.startswith("0 ")
    assert written != "0"


@pytest.mark.parametrize(
    ("lines", "factor", "said"),
    [
        (["2 (14.5 ounce) cans tomatoes"], 1.5, "tomatoes: 3 cans of 14½ ounces"),
        (["1 cup plus 2 tablespoons sugar"], 2, "sugar: 2 cups + ¼ cup"),
        (["250ml/9fl oz milk"], 2, "milk: 500 ml"),
        (["2-3 carrots"], 3, "carrots: 6–9"),
        (["pinch of salt"], 3, "salt: 3 pinches"),
        (
            ["1 cup butter", "2 tablespoons butter, melted"],
            1,
            "butter: 1 cup + 2 tablespoons",
        ),
        (["1 egg", "2 eggs, beaten"], 1, "egg: 3"),
        (["butter for greasing"], 4, "butter:  for greasing"),
        (["2 cloves garlic (optional)"], 0.5, "garlic: 1 clove optional"),
    ],
)
def test_a_line_of_the_list(lines, factor, said):
    items = shopping_list(lines, factor=factor)
    assert [f"{i.food}: {' + '.join(i.amounts)} {i.note}".strip() for i in items] == [
        said
    ]


def test_lines_that_name_nothing_are_left_out():
    assert shopping_list(["", " "], factor=1.0) == []
