from __future__ import annotations

from collections import Counter

import pytest

from toque.cooking.schemas.repairs import (
    only_a_link,
    rejoined,
    untokenised,
    without_boilerplate,
    without_repeat,
)

A = "Beat the egg whites until they are stiff."
B = "Fold in the sugar a spoon at a time."
C = "Bake until golden, about half an hour."


@pytest.mark.parametrize(
    ("steps", "once"),
    [
        ([A, B, C, A, B, C], [A, B, C]),
        ([A, B, C, "Serves 4.", A, B, C], [A, B, C, "Serves 4."]),
        ([f"{A} {B} {C}", A, B, C], [A, B, C]),
        ([A, B, C, f"{A} {B} {C}"], [A, B, C]),
        ([f"{A} {B}", A, B, "* Any sugar will do."], [A, B, "* Any sugar will do."]),
        ([A, B, A, B.upper().replace(" ", "  ")], [A, B]),
        ([f"{A} {B} {C} {A} {B} {C}"], [f"{A} {B} {C}"]),
        ([f"{A}{B}{C}{A}{B}{C}"], [f"{A}{B}{C}"]),
    ],
)
def test_doubled_instructions(steps, once):
    notes: Counter[str] = Counter()
    assert without_repeat(steps, notes) == once
    assert notes == {"doubled instructions": 1}


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [A],
        [A, B, C],
        ["Stir.", "Stir."],
        ["Stir. Stir."],
        [A, B, C, A, B, "Make the glaze and spread it on top."],
        [A, "Chill.", B, "Chill.", C, "Chill."],
        [A, B, C, "Turn the cake.", "Ice it.", "Wait.", A],
        [f"{A} {B} {C} {A}"],
    ],
)
def test_recipes_that_only_look_doubled(steps):
    notes: Counter[str] = Counter()
    assert without_repeat(steps, notes) == steps
    assert not notes


def test_boilerplate_of_pages():
    notes: Counter[str] = Counter()
    lines = ["2 eggs", "Add all ingredients to list", "salt ADVERTISEMENT", "Add all the sugar"]
    assert without_boilerplate(lines, notes) == ["2 eggs", "salt", "Add all the sugar"]
    assert notes["boilerplate lines"] == 2


@pytest.mark.parametrize(
    ("steps", "joined"),
    [
        (["Freeze juice", "and", "berries.", "Serve."], ["Freeze juice and berries.", "Serve."]),
        (["Bake for", "20 minutes.", "Cool."], ["Bake for 20 minutes.", "Cool."]),
        (["Mix.", "1. Bake it", "2. Cool it."], ["Mix.", "1. Bake it", "2. Cool it."]),
        (["mix it", "bake it", "eat it"], ["mix it", "bake it", "eat it"]),
        (
            ["Mix (well)", "then bake.", "Cool:", "wait."],
            ["Mix (well)", "then bake.", "Cool:", "wait."],
        ),
    ],
)
def test_sentences_split_in_the_middle(steps, joined):
    assert rejoined(steps, Counter()) == joined


def test_spaces_before_punctuation():
    notes: Counter[str] = Counter()
    lines = ["cook , covered , , 1 / 2 hour ( or so )", "sherbet / sorbet", "wait"]
    assert untokenised(lines, notes) == [
        "cook, covered, 1/2 hour ( or so)",
        "sherbet / sorbet",
        "wait",
    ]
    assert notes == {
        "recipes with spaces before punctuation": 1,
        "recipes with fractions mended": 1,
    }


@pytest.mark.parametrize(
    ("steps", "link"),
    [
        (['<p>See the full recipe at <a href="x">Because I Cook.</a></p>'], True),
        (["for instructions check how to make chutney on a cook's recipes"], True),
        (["Click here for the method"], True),
        (["Find a large pot. Boil the recipe's beans in it."], False),
        (["See that the beans are soft, then drain them and season to taste."], False),
        (["Check the seasoning.", "Serve with the sauce from the other recipe, warm."], False),
        ([], False),
    ],
)
def test_steps_that_only_link(steps, link):
    assert only_a_link(steps) is link
