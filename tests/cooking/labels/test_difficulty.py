import ast
import csv

import pytest

from toque.cooking.labels.difficulty import DifficultyReport, estimate_difficulty
from toque.cooking.labels.features import read_features
from toque.cooking.recipe import Recipe

WORDY = "Stir the pot gently with a wooden spoon and look at it now and then while it simmers. "


def dish(
    n_ingredients: int,
    n_steps: int,
    *,
    words: int = 8,
    minutes: int | None = None,
    end="",
):
    step = " ".join((WORDY * 20).split()[: max(words // max(n_steps, 1), 1)])
    steps = (*(step for _ in range(n_steps - 1)), f"{step} {end}")
    return Recipe("Dish", ("food",) * n_ingredients, steps, minutes=minutes)


def judged(recipe: Recipe) -> DifficultyReport:
    return estimate_difficulty(read_features(recipe))


@pytest.mark.parametrize(
    ("n_ingredients", "n_steps", "level"),
    [(6, 6, "easy"), (7, 6, "medium"), (6, 7, "medium"), (12, 12, "medium"), (13, 12, "hard"),
     (12, 13, "hard")],
)  # fmt: skip
def test_the_bounds_hold_for_much_work(n_ingredients, n_steps, level):
    much = dish(n_ingredients, n_steps, words=200, minutes=100)
    assert judged(much).by_bounds == level
    assert judged(much).level == level


@pytest.mark.parametrize(
    ("minutes", "words", "end", "level"),
    [(30, 100, "", "easy"), (31, 100, "", "medium"), (30, 110, "", "medium"),
     (14, 100, "Knead.", "easy"), (30, 60, "Knead.", "medium"), (None, 100, "", "easy"),
     (None, 110, "", "medium")],
)  # fmt: skip
def test_where_little_work_ends(minutes, words, end, level):
    """10 ingredients times 100 words times 30 minutes is the limit; a technique halves it."""
    assert judged(dish(10, 10, words=words, minutes=minutes, end=end)).level == level


HARD = "Knead, then deep-fry it."


@pytest.mark.parametrize(
    ("n", "words", "minutes", "end", "level"),
    [
        # Little work is easy, whatever the counts.
        (10, 60, 30, "", "easy"), (14, 60, 30, "", "easy"), (14, 140, 60, "", "hard"),
        (3, 30, 10, "", "easy"),
        # Techniques and time make it harder.
        (5, 8, 60, "Knead it.", "easy"), (5, 8, 150, "Knead it.", "medium"),
        (5, 8, 60, HARD, "medium"), (9, 8, 60, HARD, "hard"), (20, 8, 60, HARD, "hard"),
        (10, 100, 480, "", "medium"),  # long, but nothing to do
    ],
)  # fmt: skip
def test_work_techniques_and_time(n, words, minutes, end, level):
    assert judged(dish(n, n, words=words, minutes=minutes, end=end)).level == level


def test_a_label_does_not_count_and_an_empty_recipe_has_a_level():
    labelled = Recipe("Toast", ("bread",), ("Toast.",), difficulty="hard")
    assert judged(labelled).level == judged(Recipe("", (), ())).level == "easy"


@pytest.mark.parametrize(
    ("text", "techniques"),
    [
        ("Knead the dough on a floured board, let it rise.", ("knead", "proof")),
        ("Give rise to applause.", ()), ("Use a cook's thermometer.", ()),
        ("Boil to the soft-ball stage.", ("temper",)),
        ("Roll the dough out on a board.", ("roll out",)),
        ("Put a roll on each plate with ice cream.", ()), ("Chill in an ice bath.", ("blanch",)),
        ("Beat the whites to stiff peaks.", ("whip to peaks",)),
        ("Cook at room temperature.", ()), ("FLAMBÉ the pan.", ("flambe",)), ("", ()),
    ],
)  # fmt: skip
def test_techniques(text, techniques):
    assert judged(Recipe("", (), (text,))).techniques == techniques


@pytest.mark.parametrize(
    ("steps", "given", "minutes"),
    [
        (("Bake 20 to 25 minutes.", "Chill for 1 hour."), None, 85.0), (("Stir.",), None, None),
        (("Simmer 1.5 hours, then 10 more minutes.",), None, 100.0),
        (("Simmer for 3 hours.",), None, 180.0), (("x",), 20, 20.0),
        (("Rest 1/2 hour.", "Bake 3 1/2 hours, 10–15 minutes under foil."), None, 255.0),
        (("Braise for 1½ to 2 hours. It keeps for 3 days.",), None, 120.0),
    ],
)  # fmt: skip
def test_minutes(steps, given, minutes):
    assert judged(Recipe("Stew", ("beef",), steps, minutes=given)).minutes == minutes


def test_constants_found_on_one_collection_hold_on_another(shared):
    """The limits are from Epicurious' tag; agreement beyond chance with Food.com's is the proof."""
    pairs, bounds = [], 0
    path = shared / "data" / "recipes" / "foodcom_RAW_recipes.csv"
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            texts = (
                tuple(ast.literal_eval(row[name])) for name in ("ingredients", "steps")
            )
            report = judged(Recipe(row["name"], *texts, minutes=int(row["minutes"])))
            easy = not {"easy", "beginner-cook"}.isdisjoint(
                ast.literal_eval(row["tags"])
            )
            pairs.append((easy, report.level == "easy"))
            bounds += (report.by_bounds == "easy") == easy
    assert len(pairs) == 297
    agreement = sum(tagged == called for tagged, called in pairs) / len(pairs)
    tagged, called = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    chance = tagged * called + (1 - tagged) * (1 - called)
    assert agreement >= 0.7
    assert agreement > bounds / len(pairs) + 0.1
    assert (agreement - chance) / (1 - chance) >= 0.4
