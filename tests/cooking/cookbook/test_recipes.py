import gzip
import hashlib
import json
import re

import pytest

from toque.cooking.cookbook.kitchen import SOURCE, Draw, dishes, nutrition_class
from toque.cooking.cookbook.measures import PANTRY
from toque.cooking.cookbook.recipes import recipe, recipes, write_cookbook
from toque.cooking.ingredients.names import head_noun, ingredient_name
from toque.cooking.recipe import difficulty_of, parse_text, to_text
from toque.cooking.recipe_scores import evaluate_recipe, ingredient_coverage
from toque.cooking.schemas.reader import RecipeReader
from toque.errors import ConfigError, DataError

N = 1500
DIGEST = "279748a31301a800d6c18f1f311b03f4ad40a47ec73e9f734bf387910108241e"
"""SHA-256 of the recipes of seed 17: whoever changes a dish pins the new one, and says so."""


@pytest.fixture(scope="module")
def book():
    return list(recipes(N, seed=5))


def _body(r):
    return "\n".join((*r.ingredients, *r.steps))


def test_at_least_thirty_dishes_and_each_makes_many_recipes():
    assert len(dishes()) >= 30
    for dish in dishes():
        # Refuses a listed food that no step uses.
        made = [dish.recipe(Draw(3, index)) for index in range(40)]
        assert len({_body(r) for r in made}) >= 30, dish.name
        assert len({r.title for r in made}) >= 4, dish.name


def test_the_recipes_of_a_seed_stay_the_same():
    made = "\n".join(map(repr, recipes(1000, seed=17)))
    assert hashlib.sha256(made.encode()).hexdigest() == DIGEST


def test_a_recipe_depends_on_seed_and_index_alone(book):
    assert [recipe(5, 700), recipe(5, 3)] == [book[700], book[3]]
    assert list(recipes(20, seed=6)) != book[:20]
    assert list(recipes(0, seed=5)) == []
    assert len({_body(r) for r in book}) > 0.999 * N


def test_every_recipe_is_well_formed_and_uses_what_it_lists(book):
    for r in book:
        text, steps = to_text(r), " ".join(r.steps).casefold()
        assert set(evaluate_recipe(text, parse_text(text)).values()) == {1.0}, text
        names = [ingredient_name(line) for line in r.ingredients]
        assert ingredient_coverage(names, text) == 1.0
        assert all(head_noun(name) for name in names)
        for name in names:
            assert any(word.rstrip("s") in steps for word in name.casefold().split()), (
                name,
                text,
            )


def test_nothing_is_used_that_is_not_listed(book):
    names = sorted(set(PANTRY) | {"broth", "cheese", "sugar", "flour", "milk"}, key=len)
    food = re.compile(r"\b(" + "|".join(map(re.escape, reversed(names))) + r")\b")
    for r in book:
        listed = "\n".join(r.ingredients)
        for name in food.findall("\n".join(r.steps)):
            # Water to boil or thin something in comes from the tap.
            forms = (
                (PANTRY[name].name, PANTRY[name].plural) if name in PANTRY else (name,)
            )
            assert name == "water" or any(form in listed for form in forms), (
                name,
                to_text(r),
            )


def test_labels_agree_with_the_recipe(book):
    for r in book:
        assert r.difficulty == difficulty_of(len(r.ingredients), len(r.steps))
        assert r.source == SOURCE
        assert "synthetic" in r.source
        assert (r.minutes or 0) >= 5
        assert (r.servings or 0) >= 1
        meats = r"chicken|beef|pork|bacon|ham\b|sausage|turkey|shrimp|salmon|cod |tuna"
        meat = re.search(meats, _body(r))
        assert ("vegetarian" in r.tags) == (meat is None), to_text(r)
    for label in ("Healthy", "Moderate", "Indulgent"):
        assert sum(r.nutrition_class == label for r in book) > 0.15 * N, label
    for label, share in (("easy", 0.1), ("medium", 0.3), ("hard", 0.02)):
        assert sum(r.difficulty == label for r in book) > share * N, label


def test_amounts_are_written_as_people_do(book):
    for line in (line for r in book for line in r.ingredients):
        amount, _, rest = line.partition(" ")
        assert re.fullmatch(r"\d+|\d/\d", amount), line
        if amount == "1" and not re.match(r"\d/\d", rest):
            assert not re.match(
                r"(?:cups|tablespoons|teaspoons|pounds|cloves|cans|slices)\b", rest
            )
        if amount.isdigit() and int(amount) > 1:
            assert not re.match(
                r"(?:cup|tablespoon|teaspoon|pound|clove|slice|egg)\b", rest
            ), line
        assert "  " not in line


@pytest.mark.parametrize(
    ("fat", "sugar", "salt", "kcal", "grams", "expected"),
    [
        (3.0, 5.0, 0.3, 300, 100, "Healthy"),  # all green
        (10.0, 10.0, 0.3, 300, 100, "Healthy"),  # two amber
        (10.0, 10.0, 0.5, 300, 100, "Moderate"),  # three amber
        (10.0, 10.0, 0.5, 700, 100, "Indulgent"),  # three amber, rich
        (18.0, 23.0, 0.0, 300, 100, "Indulgent"),  # two red per 100 g
        (22.0, 28.0, 0.0, 300, 900, "Indulgent"),  # two red per portion
    ],
)
def test_nutrition_classes_by_hand(fat, sugar, salt, kcal, grams, expected):
    facts = {"fat_g": fat, "sugar_g": sugar, "salt_g": salt, "energy_kcal": kcal}
    assert nutrition_class(facts, grams) == expected


@pytest.mark.parametrize("name", ["book.jsonl", "book.jsonl.gz"])
def test_the_written_file_is_read_back(tmp_path, name):
    path = tmp_path / "new" / name
    write_cookbook(path, 30, seed=5)
    plain = (
        gzip.decompress(path.read_bytes())
        if name.endswith(".gz")
        else path.read_bytes()
    )
    records = [json.loads(line) for line in plain.splitlines()]
    assert [r["title"] for r in records] == [r.title for r in recipes(30, seed=5)]
    assert {r["source"] for r in records} == {SOURCE}
    reader = RecipeReader()
    read = [e for block in reader.blocks(path) for e in reader.examples(block).examples]
    assert [e.target for e in read] == [to_text(r) for r in recipes(30, seed=5)]
    assert {e.columns["quality"] for e in read} == {1.0}
    assert {e.columns["nutrition"] for e in read} <= {0, 1, 2}


def test_equal_arguments_give_equal_bytes(tmp_path):
    one, two = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    write_cookbook(one, 10, seed=1)
    write_cookbook(two, 10, seed=1)
    assert one.read_bytes() == two.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl.gz", "b.jsonl.gz"]


def test_recipes_of_unseen_dishes_are_left_out(tmp_path):
    titles = [r.title for r in recipes(300, seed=5)]
    unseen = {titles[0], max(titles, key=titles.count)}
    write_cookbook(tmp_path / "x.jsonl", 300, seed=5, unseen=unseen)
    lines = (tmp_path / "x.jsonl").read_text().splitlines()
    written = [json.loads(line)["title"] for line in lines]
    assert written == [title for title in titles if title not in unseen]
    assert len(written) <= 297


def test_refusals(tmp_path):
    with pytest.raises(ConfigError, match="0 or more, not -1"):
        write_cookbook(tmp_path / "x.jsonl", -1, seed=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_cookbook(tmp_path / "file" / "x.jsonl", 1, seed=0)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
