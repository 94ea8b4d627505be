from __future__ import annotations

import json
from collections import Counter

import pytest

from toque.cooking.recipe import Recipe, to_text
from toque.cooking.sources import (
    REASONS,
    UNKNOWN,
    RecipeReader,
    read_recipe,
    recipe_of,
    recipe_reader,
    write_example,
)
from toque.data.example import Block

SOUP = {
    "title": "Pea Soup",
    "ingredients": ["2 cups frozen peas", "3 cups vegetable broth", "1/2 teaspoon salt"],
    "directions": ["Boil the peas in the broth for 5 minutes.", "Blend and season with the salt."],
}


def _recipe(**changes):
    found = recipe_of(SOUP | changes, Counter())
    assert isinstance(found, Recipe), found
    return found


def test_a_clean_record():
    recipe = _recipe(tags=["soup"], servings="4 servings", total_time="1 hour 5 min", source="me")
    assert recipe == Recipe(
        title="Pea Soup",
        ingredients=tuple(SOUP["ingredients"]),
        steps=tuple(SOUP["directions"]),
        tags=("soup",),
        servings=4,
        minutes=65,
        source="me",
    )


_STEPS = SOUP["directions"]


@pytest.mark.parametrize(
    "fields",
    [
        {"title": "Pea Soup", "directions": _STEPS},
        {"name": "Pea Soup", "steps": _STEPS},
        {"title": "Pea Soup", "instructions": "\n".join(_STEPS)},
        {"title": "Pea Soup", "instructions": "1. " + "\n2. ".join(_STEPS)},
        {"title": "Pea Soup", "instructions_list": _STEPS},
        {"title": "Pea Soup", "recipeInstructions": [{"text": s} for s in _STEPS]},
        {"name": "Pea Soup", "method": [{"itemListElement": [{"text": s} for s in _STEPS]}]},
        {"title": "Pea Soup", "directions": [], "steps": _STEPS},
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_text", [False, True])
def test_common_field_names(fields, as_text):
    lines = SOUP["ingredients"]
    record = fields | {"ingredients": "\n".join(lines) if as_text else [{"text": x} for x in lines]}
    found = recipe_of(record, Counter())
    assert found == _recipe()


@pytest.mark.parametrize(
    ("fields", "minutes"),
    [
        ({"minutes": 30}, 30),
        ({"total_time": "PT1H20M"}, 80),
        ({"prep_time": "10 min", "cook_time": "~30 minutes"}, 40),
        ({"cook_time": "1.5 hours"}, 90),
        ({"minutes": 0}, None),
        ({"total_time": "soon"}, None),
        ({"minutes": float("nan")}, None),
        ({"minutes": True}, None),
        ({"minutes": float("inf")}, None),
    ],
)
def test_times(fields, minutes):
    assert _recipe(**fields).minutes == minutes


def test_nutrition_flat_or_nested_with_units():
    assert _recipe(calories=143.0, fat_g=None).nutrition == {"energy_kcal": 143.0}
    nested = {"calories": "143 kcal", "fatContent": "12 g", "sodiumContent": "629 mg"}
    assert _recipe(nutrients=nested).nutrition == {
        "energy_kcal": 143.0,
        "fat_g": 12.0,
        "sodium_mg": 629.0,
    }
    assert _recipe().nutrition is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b'"soup"', "not an object"),
        (b"[1, 2]", "not an object"),
        (b"null", "not an object"),
        (b'{"title": "\xe9"}', "not UTF-8"),
        (b"{}", "no title"),
        (json.dumps(SOUP | {"title": "  "}).encode(), "no title"),
        (json.dumps(SOUP | {"title": 7}).encode(), "no title"),
        (json.dumps(SOUP | {"ingredients": None}).encode(), "no ingredients"),
        (json.dumps(SOUP | {"ingredients": ["", "Sauce:"]}).encode(), "no ingredients"),
        (json.dumps(SOUP | {"ingredients": 3}).encode(), "no ingredients"),
        (json.dumps(SOUP | {"directions": ["", "2."]}).encode(), "no steps"),
        (json.dumps(SOUP | {"directions": ["Mix."]}).encode(), "too short"),
        (b"\0line too long", "line too long"),
    ],
)
def test_reasons(line, reason):
    assert reason in REASONS
    assert read_recipe(line, Counter()) == reason


def test_a_block_is_counted_to_the_last_line():
    good = json.dumps(SOUP).encode()
    payload = b"\n".join([good, b"oops", b"", good, b"{}", b"oops", b"   ", good])
    result = recipe_reader.examples(Block(source=2, path="x", first_line=11, payload=payload))
    assert result.read == 6
    assert result.kept == len(result.examples) == 3
    assert result.dropped == {"not JSON": [12, 16], "no title": [15]}
    assert result.read == result.kept + sum(map(len, result.dropped.values()))
    assert {e.columns["source"] for e in result.examples} == {2}


def test_the_example():
    example = write_example(_recipe(), source=0)
    assert example.prompt == (
        "Generate recipe for: Pea Soup using ingredients: peas, vegetable broth, salt"
    )
    assert example.target == to_text(_recipe())
    assert example.columns == {
        "n_ingredients": 3,
        "n_steps": 2,
        "quality": 1.0,
        "difficulty": 0,
        "nutrition": UNKNOWN,
        "source": 0,
    }


def test_keys_see_words_and_nothing_else():
    def keys(**changes):
        example = write_example(_recipe(**changes), source=0)
        return example.key, example.title_key, example.record_key

    key, title_key, record_key = keys()
    assert keys(title="PEA  soup!") == (key, title_key, record_key)
    assert keys(directions=[s.upper() for s in SOUP["directions"]]) == (key, title_key, record_key)
    other = keys(title="Green Pea Soup")
    assert other[0] == key
    assert other[1] != title_key
    assert other[2] != record_key
    assert keys(ingredients=[*SOUP["ingredients"], "1 egg"])[0] != key
    assert 0 <= key < 2**64


def test_labels_of_a_record_are_kept():
    columns = write_example(_recipe(difficulty="Hard", nutrition_class="healthy"), source=0).columns
    assert (columns["difficulty"], columns["nutrition"]) == (2, 0)
    odd = write_example(_recipe(difficulty="fiendish", nutrition_class=4), source=0).columns
    assert (odd["difficulty"], odd["nutrition"]) == (0, UNKNOWN)


def test_real_recipes(shared):
    path = shared / "data" / "recipes" / "public_domain_recipes.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    reader = RecipeReader()
    results = [reader.examples(block) for block in reader.blocks(path)]
    read = sum(r.read for r in results)
    assert read == path.read_bytes().count(b"\n")
    assert read == sum(r.kept + sum(map(len, r.dropped.values())) for r in results)
    assert sum(r.kept for r in results) > 0.95 * read


@pytest.mark.slow
def test_the_large_dirty_file(shared):
    path = shared / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not in the shared data")
    reader, read, kept, dropped = RecipeReader(), 0, 0, Counter()
    for block in reader.blocks(path):
        result = reader.examples(block)
        read, kept = read + result.read, kept + result.kept
        dropped.update({reason: len(lines) for reason, lines in result.dropped.items()})
        for example in result.examples:
            assert "\ufffd" not in example.target
            assert "<b" not in example.target
    assert read == 68_004 == kept + dropped.total()
    assert set(dropped) <= {"no ingredients", "no steps", "too short"}
    assert dropped.total() < 100
