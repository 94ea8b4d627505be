"""Nested brackets, fineness of sugar, numbers of cans, brands that begin with a size."""

from __future__ import annotations

import pytest

from toque.cooking.ingredients.names import ingredient_name
from toque.cooking.ingredients.parser import parse_line


@pytest.mark.parametrize(
    ("line", "name", "amounts"),
    [
        ("1 lb pasta (such as penne (or rigatoni))", "pasta", [(1.0, "pound")]),
        ("2 cups pasta )", "pasta", [(2.0, "cup")]),
        ("1/2 cup (1 stick (4 ounces)) butter", "butter",
         [(0.5, "cup"), (1.0, "stick"), (4.0, "ounce")]),
        ("1 cup milk (240 ml [8 oz])", "milk",
         [(1.0, "cup"), (240.0, "millilitre"), (8.0, "ounce")]),
        ("1 cup 10x sugar", "confectioners' sugar", [(1.0, "cup")]),
        ("2 c. 10X powdered sugar, sifted", "confectioners' sugar", [(2.0, "cup")]),
        ("1 box 10-x sugar", "confectioners' sugar", [(1.0, "box")]),
        ("1 can Big Red soda", "Big Red soda", [(1.0, "can")]),
        ("12 ounces Big Red", "Big Red", [(12.0, "ounce")]),
        ("2 big red onions", "red onions", [(2.0, None)]),
        ("1 can No.21 tomatoes", "tomatoes", [(1.0, "can")]),
        ("1 No. 2 can pineapple", "pineapple", [(1.0, "can")]),
        ("1 (No. 303) can peas", "peas", [(1.0, "can")]),
        ("1 #10 can beans", "beans", [(1.0, "can")]),
        ("10 x 2 inch sugar wafers", "sugar wafers", None),
        ("1 cup Mexican sugar", "Mexican sugar", [(1.0, "cup")]),
    ],
)  # fmt: skip
def test_names_and_amounts(line, name, amounts):
    assert ingredient_name(line) == name
    if amounts is not None:
        found = [(a.quantity and a.quantity[0], a.unit) for a in parse_line(line).amounts]
        assert found == amounts


@pytest.mark.parametrize("depth", [2, 50, 5000])
def test_brackets_of_any_depth(depth):
    line = "1 cup rice " + "(white " * depth + "grain" + ")" * depth
    assert parse_line(line).name == "rice"
    assert ingredient_name("2 eggs " + "(" * depth) == ingredient_name("2 eggs (")
    assert ingredient_name("2 eggs " + ")" * depth) == "eggs"
