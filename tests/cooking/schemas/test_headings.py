from collections import Counter

import pytest

from toque.cooking.schemas.headings import HEADINGS, LISTS, PARTS, with_headings_joined

A = "Whisk the buttermilk, the water and the yeast in a bowl."
B = "Cover the bowl and let it stand for an hour."
C = "Fry the peas in oil until they are soft and green."
NO_STOP = "Punch it down, then put it back into the same bowl"


@pytest.mark.parametrize(
    ("steps", "joined", "note"),
    [
        (["Salsa", A, B, C], [f"Salsa: {A}", B, C], PARTS),
        (["Prepare the dough", A, B, C, NO_STOP, C], [f"Prepare the dough: {A}", B, C, NO_STOP, C],
        PARTS),
        ([A, "Making Falafel", B, C], [A, f"Making Falafel: {B}", C], PARTS),
        ([A, "heating-oil", C, "serving", B], [A, C, B], HEADINGS),
        (["In each jar put:", "bay leaf", "dill weed, dried", A],
         ["In each jar put: bay leaf; dill weed, dried", A], LISTS),
        (["Mix", "1 cup peas", "2 tsp dill", A, B], ["Mix: 1 cup peas; 2 tsp dill", A, B], LISTS),
        ([f"{A} Pea Compote", B, "Stir"], [A, f"Pea Compote: {B}", "Stir"], PARTS),
        ([f"{A} FOR THE DILL", B, "Stir"], [A, f"FOR THE DILL: {B}", "Stir"], PARTS),
        ([A, f"{B} Pubblicità", "Stir"], [A, B, "Stir"], HEADINGS),
        ([A, f"{B} FILLING", C, "Stir"], [A, B, f"FILLING: {C}", "Stir"], PARTS),
        (["Before You Start...", A, B], [A, B], HEADINGS),
        ([A, "2 cups peas, shelled", "2 cups dill", B], [A, "2 cups peas, shelled; 2 cups dill",
        B], LISTS),
    ],
)  # fmt: skip
def test_headings_and_lists_are_joined_and_counted(steps, joined, note):
    notes: Counter[str] = Counter()
    assert with_headings_joined(tuple(steps), notes) == tuple(joined)
    assert set(notes) == {note}


@pytest.mark.parametrize(
    "steps",
    [
        [A, f"{B} The", C], [A, f"{B} Serve", C], [A, f"{B} Pea Goat Log"],
        [A, B, "Serve"], [A, "Freeze for at least 15 minutes", B, C], ["Dice the onions",
        A, NO_STOP, NO_STOP],
        [NO_STOP, "Add herbs to the pot", A, B, C], ["peel the peas", "cook them", "eat"],
        [A, NO_STOP, "Tsp salt", B, C],
        [A, NO_STOP, "Salt and pepper to taste", B, C], ["Preheat oven to 325°F", A, B],
        [A, "1 cup at a time, add the peas", "2 cups are enough", B], [A, B, "shallots"],
    ],
)  # fmt: skip
def test_steps_that_only_look_like_headings_stay(steps):
    notes: Counter[str] = Counter()
    assert with_headings_joined(tuple(steps), notes) == tuple(steps)
    assert not notes
