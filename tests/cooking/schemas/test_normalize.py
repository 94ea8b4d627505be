from collections import Counter

import pytest

from toque.cooking.examples import BY_FIGURES, BY_RULE, BY_SOURCE, UNKNOWN, examples_of
from toque.cooking.labels.features import read_features
from toque.cooking.labels.quality import quality_of
from toque.cooking.recipe import Recipe, to_text
from toque.cooking.schemas.fields import records_of
from toque.cooking.schemas.normalize import REASONS, recipe_of

SOUP = {
    "title": "Pea Soup",
    "ingredients": [
        "2 cups frozen peas",
        "3 cups vegetable broth",
        "1/2 teaspoon salt",
    ],
    "directions": [
        "Boil the peas in the broth for 5 minutes.",
        "Blend and season with the salt.",
    ],
}


def _read(raw):
    """The recipe of a raw record, through the adapter of its schema."""
    (record,) = records_of(raw, (), Counter())
    return recipe_of(record, Counter())


def _example(recipe):
    (example,) = examples_of(recipe, Counter())
    return example


def _recipe(**changes):
    found = _read(SOUP | changes)
    assert isinstance(found, Recipe), found
    return found


def test_a_clean_record():
    recipe = _recipe(
        tags=["soup"], servings="4 servings", total_time="1 hour 5 min", source="me"
    )
    parts = ("Pea Soup", tuple(SOUP["ingredients"]), tuple(SOUP["directions"]))
    assert recipe == Recipe(*parts, ("soup",), servings=4, minutes=65, source="me")


_STEPS = SOUP["directions"]


@pytest.mark.parametrize(
    "fields",
    [
        {"title": "Pea Soup", "directions": _STEPS}, {"name": "Pea Soup", "steps": _STEPS},
        {"title": "Pea Soup", "instructions": "\n".join(_STEPS)},
        {"title": "Pea Soup", "instructions": "1. " + "\n2. ".join(_STEPS)},
        {"title": "Pea Soup", "instructions_list": _STEPS},
        {"title": "Pea Soup", "analyzed_instructions": [{"text": s} for s in _STEPS]},
        {"name": "Pea Soup", "method": [{"itemListElement": [{"text": s} for s in _STEPS]}]},
        {"title": "Pea Soup", "directions": [], "steps": _STEPS},
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_text", [False, True])
def test_common_field_names(fields, as_text):
    lines = SOUP["ingredients"]
    record = fields | {
        "ingredients": "\n".join(lines) if as_text else [{"text": x} for x in lines]
    }
    assert _read(record) == _recipe()


@pytest.mark.parametrize(
    ("fields", "minutes"),
    [
        ({"minutes": 30}, 30), ({"total_time": "PT1H20M"}, 80),
        ({"prep_time": "10 min", "cook_time": "~30 minutes"}, 40), ({"cook_time": "1.5 hours"}, 90),
        ({"minutes": 0}, None), ({"total_time": "soon"}, None), ({"minutes": float("nan")}, None),
        ({"minutes": True}, None), ({"minutes": float("inf")}, None),
        # Fractions, clocks, days, and what exporters write for ISO 8601.
        ({"cook_time": "1½ hours"}, 90), ({"cook_time": "1 1/2 hours"}, 90),
        ({"cook_time": "1h30"}, 90), ({"cook_time": "0:45"}, 45), ({"cook_time": "1:05:00"}, 65),
        ({"cook_time": "3 days"}, 4320), ({"cook_time": "45–60 minutes"}, 60),
        ({"total_time": "P0Y0M0DT0H45M0.000S"}, 45), ({"total_time": "PT1800S"}, 30),
        ({"total_time": "P"}, None), ({"total_time": "9" * 400 + " hours"}, None),
        ({"cook_time": "2 hours 4 servings"}, 120),
    ],
)  # fmt: skip
def test_times(fields, minutes):
    assert _recipe(**fields).minutes == minutes


def test_nutrition_flat_or_nested_with_units():
    assert _recipe(calories=143.0, fat_g=None).nutrition == {"energy_kcal": 143.0}
    nested = {"calories": "143 kcal", "fatContent": "12 g", "sodiumContent": "629 mg"}
    figures = {"energy_kcal": 143.0, "fat_g": 12.0, "sodium_mg": 629.0}
    assert _recipe(nutrients=nested).nutrition == figures
    assert _recipe().nutrition is None


@pytest.mark.parametrize(
    ("written", "sodium_mg"),
    [("1,200 mg", 1200.0), ("1 200 mg", 1200.0), ("1\u00a0200 mg", 1200.0), ("1,2 g", 1200.0),
     ("0,125 g", 125.0), ("1,234.5 mg", 1234.5), ("1,2,3 mg", 1.2), ("12,345,678,901 mg", None)],
)  # fmt: skip
def test_separators_of_thousands_and_of_decimals(written, sodium_mg):
    nutrition = _recipe(sodiumContent=written).nutrition
    assert (nutrition or {}).get("sodium_mg") == sodium_mg


def test_energy_in_kilojoules():
    for unit in ("kJ", "kilojoules", "Kilojoule"):
        assert _recipe(calories=f"2,000 {unit}").nutrition == {"energy_kcal": 478.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"title": "  "}, "no title"), ({"title": 7}, "no title"), ({"title": "*!*"}, "no title"),
        ({"ingredients": None}, "no ingredients"),
        ({"ingredients": ["", "Sauce:"]}, "no ingredients"), ({"ingredients": 3}, "no ingredients"),
        ({"directions": ["", "2."]}, "no steps"), ({"directions": ["Mix."]}, "too short"),
        ({"ingredients": ["1 cup peas 2 cups broth 1/2 tsp salt 3 small onions, all diced"]},
         "ingredients on one line"),
        ({"ingredients": ["salt", "peas - 2 cups; broth, 3 cups; 1/2 tsp dill; 2 onions; 1 leek"]},
         "ingredients on one line"),
        ({"ingredients": ["2 cups peas", "Cover with more peas", "Grind the dill in a mill",
          "Line a pan with the peas"]}, "steps among the ingredients"),
        ({"directions": ["You will need waxed paper and a rolling pin for this."]}, "no method"),
        ({"directions": ["This soup was invented in 5 minutes on a day without peas.",
          "It is the best of all."]}, "no method"),
    ],
)  # fmt: skip
def test_reasons(changes, reason):
    assert reason in REASONS
    assert _read(SOUP | changes) == reason


def test_the_example():
    example = _example(_recipe())
    assert example.prompt == (
        "Generate recipe for: Pea Soup using ingredients: frozen peas, vegetable broth, salt"
    )
    assert example.target == to_text(_recipe())
    assert example.columns == {
        "n_ingredients": 3, "n_steps": 2, "quality": quality_of(read_features(_recipe())).score,
        "difficulty": 0, "difficulty_from": BY_RULE, "nutrition": 1, "nutrition_from": BY_RULE,
        "nutrition_coverage": 1.0, "cuisine": UNKNOWN,
    }  # fmt: skip


def test_keys_see_words_and_nothing_else():
    def keys(**changes):
        example = _example(_recipe(**changes))
        return example.key, example.title_key, example.record_key

    key, title_key, record_key = keys()
    assert keys(title="PEA  soup!") == (key, title_key, record_key)
    assert keys(directions=[s.upper() for s in SOUP["directions"]]) == (
        key,
        title_key,
        record_key,
    )
    other = keys(title="Green Pea Soup")
    assert other[0] == key
    assert other[1] != title_key
    assert other[2] != record_key
    assert keys(ingredients=[*SOUP["ingredients"], "1 egg"])[0] != key
    assert 0 <= key < 2**64


def test_labels_of_a_record_are_kept_and_told_from_ours():
    columns = _example(_recipe(difficulty="Hard", nutrition_class="healthy")).columns
    assert (columns["difficulty"], columns["difficulty_from"]) == (2, 1)
    assert (columns["nutrition"], columns["nutrition_from"]) == (0, BY_SOURCE)
    odd = _example(_recipe(difficulty="fiendish", nutrition_class=4)).columns
    assert (odd["difficulty"], odd["difficulty_from"]) == (0, 0)
    assert (odd["nutrition"], odd["nutrition_from"]) == (1, BY_RULE)
    assert 0.9 < odd["nutrition_coverage"] <= 1.0
    given = _example(
        _recipe(nutrition={"fatContent": "30 g", "saturatedFatContent": "9 g"})
    )
    assert (given.columns["nutrition"], given.columns["nutrition_from"]) == (
        2,
        BY_FIGURES,
    )
    strange = _example(
        _recipe(ingredients=["3 frobs", "1 quux", "a blivet of great size"])
    )
    assert strange.columns["nutrition"] == strange.columns["nutrition_from"] == UNKNOWN


def test_where_labels_come_from_is_counted():
    notes = Counter()
    for changes in (
        {},
        {},
        {"nutrition_class": "Moderate"},
        {"fat_g": 0, "sodium_mg": 5},
    ):
        examples_of(_recipe(**changes), notes)
    assert notes == {
        "nutrition class estimated from the ingredients": 2,
        "nutrition class as the source says": 1,
        "nutrition class from the source's figures": 1,
    }


@pytest.mark.parametrize("line", ["§ teaspoon salt", "1§ cups salt", "\ufffd cup salt"])
def test_a_recipe_with_a_lost_fraction_is_dropped(line):
    record = {**SOUP, "ingredients": [*SOUP["ingredients"], line]}
    assert recipe_of(record, Counter()) == "lost fraction"


@pytest.mark.parametrize(
    "step",
    [
        "Then add cup flour and beat.",
        "Combine cup sugar and peas.",
        "Mix dill and tsp. of salt.",
    ],
)
def test_a_recipe_with_a_lost_number_is_dropped(step):
    record = {**SOUP, "directions": [*SOUP["directions"], step]}
    assert recipe_of(record, Counter()) == "lost fraction"


@pytest.mark.parametrize(
    "step",
    ["Drain the peas and let them all sit in a", "Mix peas and", "Depending on how",
     "Stew them for about 25", "Stir peas until the mix is", "Add cold peas or",
     "Add the dill when",
     "Fill the tin up to 3/", "Mix peas ("],
)  # fmt: skip
def test_a_recipe_with_a_step_cut_off_is_dropped(step):
    record = {**SOUP, "directions": [*SOUP["directions"], step]}
    assert recipe_of(record, Counter()) == "text cut off"


def test_the_next_step_is_not_joined_to_a_step_cut_off():
    steps = [
        "Pour stock over the leeks and",
        "About an hour before supper, stir in the peas.",
    ]
    record = {**SOUP, "directions": [*SOUP["directions"], *steps]}
    assert recipe_of(record, Counter()) == "text cut off"


@pytest.mark.parametrize(
    "step",
    ["Braten Sie das Fleisch an", "Keep the lid on", "Serve with rice.", "Prenez ce qu'il y a",
     "Use as is", "Serve for 4", "Bake at about 350", "Drop it in teaspoon size balls.",
     "Hold plate and cup together.", "See http://peas.example/soup/"],
)  # fmt: skip
def test_a_step_without_a_full_stop_is_not_cut_off(step):
    record = {**SOUP, "directions": [*SOUP["directions"], step]}
    assert not isinstance(recipe_of(record, Counter()), str)


@pytest.mark.parametrize(
    "changes",
    [
        {"ingredients": ["1 cup peas or 2 cups beans, 1/2 cup dill plus 3 tbsp dill, 1 tsp salt"]},
        {"ingredients": ["1 (3 cups, 4 oz, 5 g, 6 ml) can of peas that were boiled in broth"]},
        {"directions": ["Die Erbsen sind das Beste, was es gibt."]},
        {"directions": ["Gently massage the peas.", "It is ready."]},
    ],
)  # fmt: skip
def test_recipes_that_only_look_damaged_stay(changes):
    assert not isinstance(_read(SOUP | changes), str)
