import gzip
import itertools
import json
from dataclasses import replace

import pytest

from toque.cooking.cookbook.recipes import recipes
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.labels.features import read_features
from toque.cooking.labels.quality import ESSENTIAL, WEIGHTS, Quality, quality_of
from toque.cooking.recipe import Recipe

GOOD = Recipe(
    "Tomato Soup",
    (
        "2 tablespoons olive oil",
        "1 onion, chopped",
        "800 g canned tomatoes",
        "salt to taste",
    ),
    (
        "Heat the oil in a large pot and cook the onion over medium heat for 8 minutes.",
        "Add the tomatoes and salt, and simmer for 20 minutes.",
        "Blend until smooth and serve.",
    ),
)
OTHER_STEPS = (
    "Cream the butter and sugar until fluffy, then beat in the eggs one at a time.",
    "Fold in the flour and bake at 350 degrees for 30 minutes until golden.",
)


def scored(recipe: Recipe) -> Quality:
    return quality_of(read_features(recipe))


def names_only(recipe: Recipe) -> tuple[str, ...]:
    return tuple(parse_line(line).name for line in recipe.ingredients)


BROKEN = {
    "no steps": lambda r: replace(r, steps=()),
    "no ingredients": lambda r: replace(r, ingredients=()),
    "steps of another dish": lambda r: replace(r, steps=OTHER_STEPS),
    "no amounts": lambda r: replace(r, ingredients=names_only(r)),
    "everything twice": lambda r: replace(r, steps=r.steps * 2),
    "cut off": lambda r: replace(r, steps=(r.steps[0][:25],)),
    "an advert": lambda r: replace(r, steps=(*r.steps, "Click here to subscribe.")),
    "a shop's button": lambda r: replace(
        r, ingredients=(*r.ingredients, "Add all ingredients to list")
    ),
    "markup": lambda r: replace(r, steps=(f"<p>{r.steps[0]}</p>", *r.steps[1:])),
    "another language": lambda r: replace(
        r,
        steps=(
            "Das Mehl mit der Butter verkneten, eine Stunde kalt stellen und backen.",
        )
        * 3,
    ),
    "prose without cooking": lambda r: replace(
        r,
        steps=(
            "My grandmother was a lovely person who lived by the sea for forty years.",
        ),
    ),
    "no title": lambda r: replace(r, title=""),
    "a link for a title": lambda r: replace(r, title="http://example.org/soup"),
}


def test_a_good_recipe_has_all_parts():
    quality = scored(GOOD)
    assert quality.score == 1.0
    assert dict(quality.parts) == dict.fromkeys(WEIGHTS, 1.0)


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_is_ranked_below_good(fault):
    for recipe in itertools.chain([GOOD], recipes(25, seed=11)):
        good, broken = scored(recipe), scored(BROKEN[fault](recipe))
        assert broken.score < good.score, recipe.title


@pytest.mark.parametrize("fault", ["no steps", "no ingredients", "another language"])
def test_what_is_no_recipe_scores_low(fault):
    assert scored(BROKEN[fault](GOOD)).score < 0.6


def test_parts_name_the_fault():
    found = scored(BROKEN["steps of another dish"](GOOD))
    assert found.parts["used"] == 0.0
    assert min(ESSENTIAL, key=found.parts.__getitem__) == "used"
    assert scored(BROKEN["everything twice"](GOOD)).parts["unique"] == 0.5
    assert (
        scored(BROKEN["no amounts"](GOOD)).parts["amounts"] == 0.25
    )  # salt needs none
    assert scored(BROKEN["markup"](GOOD)).parts["clean"] < 1.0


def test_weights_and_range():
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)
    assert set(ESSENTIAL) <= set(WEIGHTS)
    assert scored(Recipe("", (), ())).score < 0.1
    for fault in BROKEN.values():
        quality = scored(fault(GOOD))
        assert all(
            0.0 <= part <= 1.0 for part in (quality.score, *quality.parts.values())
        )


@pytest.mark.parametrize(
    ("step", "part", "score"),
    [
        ("Put all ingredients into a slow cooker and cook for hours, then stir.", "used", 0.75),
        ("Stir the soup with the onion and the oil and salt. " * 200, "length", 800 / 2200),
    ],
)  # fmt: skip
def test_parts_by_hand(step, part, score):
    assert scored(replace(GOOD, steps=(step,))).parts[part] == pytest.approx(score)


@pytest.mark.slow
def test_real_recipes_beat_their_damaged_selves(shared):
    wins = total = 0
    path = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    with gzip.open(path, "rb") as file:
        for line in itertools.islice(file, 0, 40000, 40):
            record = json.loads(line)
            parts = (
                tuple(filter(None, record[n])) for n in ("ingredients", "directions")
            )
            recipe = Recipe(record["title"] or "", *parts)
            if not recipe.steps or not recipe.ingredients:
                continue
            good = scored(recipe).score
            for fault in (
                "no amounts",
                "steps of another dish",
                "everything twice",
                "an advert",
            ):
                total += 1
                wins += scored(BROKEN[fault](recipe)).score < good
    assert wins / total > 0.98
