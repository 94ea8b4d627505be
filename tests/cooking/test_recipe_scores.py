"""Scores of a text: its form, its consistency, and made-up recipes ranked beside broken ones.

How bad a fault is, a cook would say: 0 good; 1 a slip (an ingredient nobody asked for, one that no
step uses, the numbers gone); 2 a recipe that cannot be followed as it stands (steps missing, absurd
amounts); 3 hardly a recipe; 4 none.
"""

import re
from collections.abc import Callable, Sequence
from itertools import combinations

import pytest

from toque.cooking.cookbook.recipes import recipes
from toque.cooking.normalised_words import ACTION_VERBS, has_action_verb
from toque.cooking.plausible_amounts import quantity_sanity
from toque.cooking.prompts import REQUESTS, write_prompt
from toque.cooking.recipe import ParsedRecipe, Recipe, parse_text, to_text
from toque.cooking.recipe_scores import (
    POOR,
    advice_on_score,
    evaluate_recipe,
    foods_of_title,
    hallucinated_ingredients,
    ingredient_coverage,
    ingredients_used,
    sentences_once,
    steps_listed,
    structure_score,
    text_metrics,
    title_kept,
    title_of,
    variety,
)
from toque.cooking.times_and_heat import oven_fits, times_and_heat

WORKED_EXAMPLE = """\
Ingredients:
- 2 cups flour
- 1 1/2 teaspoons baking powder
- 2 large eggs
- ½ cup milk
- a pinch of salt

Instructions:
1. Whisk the flour, baking powder and salt in a bowl.
2. Beat in the eggs and milk.
3. Cook spoonfuls in a hot skillet for 2 minutes on each side.
"""


def evaluated(text: str) -> dict[str, float]:
    return evaluate_recipe(text, parse_text(text))


def test_the_worked_example_scores_one_everywhere_and_no_text_nothing():
    names = (
        "ingredient_coherence",
        "instruction_quality",
        "completeness",
        "format_correctness",
    )
    assert evaluated(WORKED_EXAMPLE) == dict.fromkeys((*names, "form"), 1.0)
    assert set(evaluated("").values()) == {0.0}


def test_a_broken_recipe_by_hand():
    # One of two ingredients has a quantity, one of three steps a verb, "Directions" is no header
    # of the form, and the text is under 100 characters.
    text = "Ingredients:\n- 1 cup rice\n- love\n\nDirections:\n1. Boil the rice.\n2. Yes.\n3. Nice."
    assert len(text) < 100
    scores = evaluated(text)
    assert scores["ingredient_coherence"] == 1 / 2
    assert scores["instruction_quality"] == 1 / 3
    assert scores["completeness"] == 0.66
    assert scores["format_correctness"] == 0.5
    assert scores["form"] == pytest.approx((1 / 2 + 1 / 3 + 0.66 + 0.5) / 4)


@pytest.mark.parametrize(
    ("n_chars", "expected"), [(99, 0.66), (100, 1.0), (2000, 1.0), (2001, 0.66)]
)
def test_completeness_at_the_bounds_of_length(n_chars, expected):
    head = "Ingredients:\n- 1 cup rice\n\nInstructions:\n1. Boil "
    text = head + "a" * (n_chars - len(head))
    assert evaluated(text)["completeness"] == expected


def test_verbs_in_every_regular_form():
    assert len(ACTION_VERBS) >= 150
    for step in ("Chopped onions go in.", "Stirring often.", "The fish bakes slowly.", "Dried out.",
                 "PREHEAT the oven."):  # fmt: skip
        assert has_action_verb(step), step
    for step in ("Yes.", "Delicious and lovely.", "", "12345"):
        assert not has_action_verb(step), step


@pytest.mark.parametrize(
    ("asked", "text", "coverage"),
    [
        (["black beans", "ripe tomatoes", "olive oil", "bay leaf"],
         "1 can beans\n2 bay leaves\nWarm the oil.", 3 / 4),
        (["1 (16 ounce) can black beans, drained"], "Add the beans.", 1.0),
        (["rice"], "Sliced thin.", 0.0), (["potatoes"], "A potato.", 1.0), ([], "anything", 1.0),
    ],
)  # fmt: skip
def test_coverage_counts_head_nouns_in_any_number(asked, text, coverage):
    assert ingredient_coverage(asked, text) == coverage


SOUP = """Ingredients:
- 1 cup red lentils
- 2 carrots, diced
- 1 teaspoon salt

Instructions:
1. Soften the carrots.
2. Simmer with the lentils for 25 minutes, and season with salt."""


def test_an_ingredient_nobody_asked_for():
    recipe = ParsedRecipe(
        ("1 carrot", "2 cups gummy bears", "1 pinch of salt", "water")
    )
    assert hallucinated_ingredients(["carrots"], recipe) == 1 / 4
    assert hallucinated_ingredients(["carrots", "gummy bear"], recipe) == 0.0
    assert hallucinated_ingredients(["carrots"], ParsedRecipe()) is None


def test_ingredients_that_no_step_uses():
    lines = ("1 carrot", "2 potatoes")
    assert ingredients_used(ParsedRecipe(lines, ("Boil the potato.",))) == 1 / 2
    assert (
        ingredients_used(ParsedRecipe(lines, ("Mix all of the ingredients.",))) == 1.0
    )
    assert ingredients_used(ParsedRecipe(lines, ())) == 0.0
    assert ingredients_used(ParsedRecipe((), ("Boil.",))) is None


@pytest.mark.parametrize(
    ("line", "sane"),
    [
        ("2 cups flour", True), ("900 cups flour", False), ("500 g flour", True),
        ("50 kg flour", False), ("25 tablespoons salt", False), ("16 tablespoons butter", True),
        ("0 eggs", False), ("0.5 cup milk", True), ("30 almonds", True), ("9000 almonds", False),
        ("1 (14.5 ounce) can tomatoes", True), ("salt to taste", True),
        ("1/2 cup ground cinnamon", False), ("1 1/2 cups vanilla extract", False),
        ("1/4 cup baking powder", True), ("1 cup cayenne pepper sauce", True),
        ("half a cup baking soda", False), ("1 teaspoon nutmeg", True),
    ],
)  # fmt: skip
def test_amounts_a_kitchen_has_use_for(line, sane):
    assert quantity_sanity(ParsedRecipe((line,))) == float(sane)


@pytest.mark.parametrize(
    ("step", "score"),
    [
        ("Bake at 350 degrees for 20 minutes.", 1.0), ("Bake at 3500°F.", 0.0),
        ("Chill for 0 minutes.", 0.0), ("Ferment for 48 hours.", 1.0),
        ("Simmer 100 hours.", 0.0), ("Stir.", None),
    ],
)  # fmt: skip
def test_temperatures_and_times(step, score):
    assert quantity_sanity(ParsedRecipe((), (step,))) == score


def test_structure_loses_a_sixth_for_each_fault():
    def score(text: str) -> float:
        return structure_score(text, parse_text(text))

    assert score(SOUP) == 1.0
    assert score(SOUP.removesuffix(".")) == pytest.approx(5 / 6)
    assert score(SOUP.replace("2. Simmer", "3. Simmer")) == pytest.approx(5 / 6)
    assert score(
        SOUP.replace("- 2 carrots, diced", "- 1 cup red lentils")
    ) == pytest.approx(5 / 6)
    assert score(SOUP.partition("Instructions")[0]) == 0.0
    assert score("") == 0.0


def test_what_a_prompt_asked_for_decides_what_is_scored():
    asked = "Generate recipe for: Soup using ingredients: red lentils, carrots"
    scores = text_metrics(asked, SOUP)
    assert scores["ingredient_coverage"] == scores["ingredients_used"] == 1.0
    assert scores["hallucinated_ingredients"] == 0.0
    assert scores["recipe_score"] == 1.0
    bare = text_metrics("Generate recipe for: Soup", SOUP)
    assert set(scores) - set(bare) == {
        "ingredient_coverage",
        "hallucinated_ingredients",
        "requested_listed",
    }
    many = "Generate recipe for: Soup using ingredients: " + ", ".join(
        f"food {i}" for i in range(20)
    )
    assert "hallucinated_ingredients" not in text_metrics(
        many, SOUP
    )  # the list was cut


@pytest.mark.parametrize(
    ("title", "foods"),
    [
        ("Blueberry Muffins", {"blueberry"}), ("Chicken and Rice", {"rice"}), ("", set()),
        ("Muffins with Blueberries and Lemon", {"blueberry", "lemon"}),
        ("Roast Chicken", set()),  # the last word is the dish
        ("Coffee Cake", set()), ("Peanut Butter Cookies", {"peanut"}),
        ("Grandma's Best Ever", set()),
    ],
)  # fmt: skip
def test_foods_that_a_title_promises(title, foods):
    assert foods_of_title(title) == foods


def test_a_promise_is_kept_by_any_name_of_the_food():
    recipe = ParsedRecipe(("1 cup rolled oats", "2 carrots"), ("Stir in the raisins.",))
    assert title_kept("Oatmeal Raisin Cookies", recipe) == 1.0  # oats are oatmeal
    assert title_kept("Oatmeal Banana Cookies", recipe) == 1 / 2
    assert title_kept("Cookies", recipe) is None


def test_foods_of_the_steps_that_are_not_listed():
    lines = ("2 cups flour", "1 egg", "8 ounces spaghetti")
    assert steps_listed(ParsedRecipe(lines, ("Boil the pasta in water.",))) == 1.0
    assert (
        steps_listed(ParsedRecipe(lines, ("Beat the egg with the shrimp.",))) == 1 / 2
    )
    assert steps_listed(ParsedRecipe(lines, ("Wait.",))) is None


def test_variety_falls_with_what_is_said_again():
    lines = ("2 cups flour", "1 egg", "1 cup milk", "1 teaspoon salt", "1 pinch salt")
    steps = ("Whisk everything.", "Rest the batter for an hour.", "Fry it in butter.")
    assert variety(ParsedRecipe(lines, steps)) == 1.0  # salt may stand twice
    assert variety(ParsedRecipe((), ())) == 1.0  # nothing is said again
    assert variety(ParsedRecipe(lines, steps[:1] * 4)) == pytest.approx(1 / 4 / 0.7)
    assert variety(ParsedRecipe(("1 egg", "2 eggs") * 5, steps)) == pytest.approx(
        2 / 10 / 0.7
    )
    again = ("Stir the soup and taste it well. " * 20,)
    assert variety(ParsedRecipe(lines, again)) < 0.2


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        (["Bake at 350 degrees F for 20 minutes."], 1.0), (["Stir."], None), ([], None),
        (["Preheat the oven to 350.", "Bake until golden."], 1.0),
        (["Bake for 20 minutes."], 2 / 3), (["Bake in the oven."], 0.0),
        (["Bake at 3000 F for 20 minutes."], 3 / 4), (["Bake at 180 C for 0 minutes."], 3 / 4),
        (["Bake at 320 C for an hour."], 2 / 3), (["Bake at 300 C for an hour."], 1.0),
        (["Bake at 50 degrees overnight."], 1.0), (["Bake at 50 F overnight."], 2 / 3),
        (["Preheat the oven to 99999999."], 0.0), (["Set the oven to broil."], 1.0),
        (["Heat a moderate oven.", "Put it on a baking sheet."], 1.0),
        (["Simmer the beans."], 0.0), (["Simmer.", "Serve after 2 hours."], 1.0),
        (["Bring to a boil."], None), (["Cover and chill overnight."], 1.0), (["Chill."], 0.0),
        (["Heat the milk to 110 degrees F."], None),  # of no oven
        (["Microwave for 30 seconds."], 1.0), (["Stir for 100 hours."], 0.0),
    ],
)  # fmt: skip
def test_times_and_the_heat_of_an_oven_are_there_and_sane(steps, score):
    assert times_and_heat(ParsedRecipe((), tuple(steps))) == score


@pytest.mark.parametrize(
    ("steps", "score"),
    [
        (["Stir the soup quite well. Add the peas. Stir the soup quite well."], 1 / 2),
        (["Whisk the eggs with sugar.", "Melt it. Whisk the eggs  with sugar!"], 1 / 2),
        (["Cook it for 3 minutes.", "Cook it for 4 minutes."], 1.0),
        (["Set aside. Stir. Set aside."], None),  # too short to be a fault
    ],
)
def test_a_sentence_that_is_said_again(steps, score):
    recipe = ParsedRecipe((), tuple(steps))
    assert sentences_once(recipe) == score


@pytest.mark.parametrize(
    ("title", "step", "score"),
    [
        ("Carrot Soup", "Simmer for an hour.", 1.0), ("Carrot Soups II", "Bake it.", 0.0),
        ("Soup with Cheese Biscuits", "Heat the oven to 350.", 0.0),
        ("Carrot Soup", "Cook in a Dutch oven.", 1.0), ("Soup-Pot Bread", "Bake it.", None),
        ("Carrot Cake", "Bake it.", None), ("Carrot Cake", "Stir.", None), ("", "Bake it.", None),
        ("Vanilla Ice Cream", "Bake it.", 0.0), ("Whipped Cream Pie", "Bake it.", None),
    ],
)  # fmt: skip
def test_an_oven_is_not_heated_for_what_is_made_without(title, step, score):
    assert oven_fits(title, ParsedRecipe((), (step,))) == score
    assert oven_fits(title, ParsedRecipe()) is None


def test_one_sentence_again_is_too_little_for_variety():
    kept = [f"Add {n}one {n}two {n}three {n}four." for n in "abcdefghij"]
    recipe = ParsedRecipe((), (" ".join([*kept, kept[0]]),))
    assert variety(recipe) == 1.0
    assert sentences_once(recipe) == 10 / 11


def test_the_recipe_score_is_what_it_was_before_times_and_sentences_were_scored():
    # Values of the version before.
    asked = (
        "Generate recipe for: Carrot Soup using ingredients: red lentils, carrots, salt"
    )
    baked = SOUP.removesuffix(".").replace("2. Simmer", "2. Bake at 3000 F and bake")
    texts = (SOUP, WORKED_EXAMPLE, SOUP.replace("25 minutes", "0 minutes"), baked)
    scored = [text_metrics(asked, text) for text in texts]
    assert [scores["recipe_score"] for scores in scored] == [
        1.0, 0.42666666666666664, 0.975, 0.9833333333333332,
    ]  # fmt: skip
    assert scored[2]["times_and_heat"] < scored[0]["times_and_heat"] == 1.0


def test_the_title_in_every_form_of_request():
    known = {"foods": "peas and ham", "servings": "4", "minutes": "30"}
    for form in REQUESTS:
        assert title_of(form.format(title="Pea Soup", **known)) == "Pea Soup", form
    assert title_of("Once upon a time") == ""


GOOD = list(recipes(8, seed=1))


def changed(r: Recipe, *, lines: Sequence[str] = (), steps: Sequence[str] = ()) -> str:
    """The text of the recipe with other lines or other steps."""
    return to_text(
        Recipe(r.title, tuple(lines or r.ingredients), tuple(steps or r.steps))
    )


def without_its_food(r: Recipe) -> str:
    """A fine recipe of the same dish, but for what the title promises."""
    (food,) = foods_of_title(r.title)
    lines = [line for line in r.ingredients if food not in line]
    return changed(
        r, lines=lines, steps=[re.sub(rf"\b{food}\w*", "dough", s) for s in r.steps]
    )


def in_a_loop(r: Recipe) -> str:
    """Lines of the right form that differ in their numbers alone; repetition is about 0.97."""
    food = r.ingredients[0].split()[-1]
    steps = [
        f"Add the {food} to the {food} and stir for {n} minutes." for n in range(1, 40)
    ]
    return changed(r, lines=[f"{n} cups {food}" for n in range(1, 40)], steps=steps)


def unnumbered(r: Recipe) -> str:
    lines = [line.partition(". ")[2] or line for line in to_text(r).splitlines()]
    return "\n".join(lines).removesuffix(".") + " and then"


FAULTS: dict[str, tuple[int, Callable[[Recipe], str]]] = {
    "invented": (1, lambda r: changed(r, lines=[*r.ingredients[:-1], "2 cups gummy bears",
                                                "1 pound anchovies"])),
    "unnumbered": (1, unnumbered),
    "unused": (2, lambda r: changed(r, steps=r.steps[:1] * 2).rstrip(".")),
    "absurd": (2, lambda r: changed(r, steps=r.steps[:1],
                                    lines=[f"9000 pounds {x.split()[-1]}" for x in r.ingredients])),
    "of another": (2, lambda r: to_text(GOOD[(GOOD.index(r) + 3) % len(GOOD)])),
    "without its food": (2, without_its_food),
    "without steps": (3, lambda r: to_text(r).partition("\n\nInstructions")[0]),
    "stuttering": (3, lambda r: "Ingredients:\n" + "- the the the\n" * 12 + r.title),
    "one step again": (3, lambda r: changed(r, steps=r.steps[:1] * 12)),
    "one ingredient again": (3, lambda r: changed(r, lines=r.ingredients[:1] * 12)),
    "chatter": (4, lambda r: f"{r.title} is lovely and everybody says so. " * 4),
    "in a loop": (4, in_a_loop),
}  # fmt: skip
"""How bad a fault is, and the text of a recipe that has it."""


@pytest.fixture(scope="module")
def scored() -> list[tuple[str, str, int, float]]:
    """(title, fault, how bad, score) of every dish, whole and with every fault."""
    found = []
    for recipe in GOOD:
        prompt = write_prompt(recipe.title, recipe.ingredients)
        for name, (bad, text_of) in {"good": (0, to_text), **FAULTS}.items():
            if name != "without its food" or len(foods_of_title(recipe.title)) == 1:
                score = text_metrics(prompt, text_of(recipe))["recipe_score"]
                found.append((recipe.title, name, bad, score))
    return found


def test_recipes_are_ranked_as_a_cook_would_rank_them(scored):
    good = [score for _, _, bad, score in scored if bad == 0]
    assert len(good) == len(GOOD)
    assert min(good) >= 0.9
    for title, fault, bad, score in scored:
        assert bad == 0 or score < min(good), (title, fault, score)
    pairs = [(a, b) for a, b in combinations(scored, 2) if a[2] != b[2]]
    in_order = sum((a[2] < b[2]) == (a[3] > b[3]) for a, b in pairs)
    assert in_order / len(pairs) >= 0.95


@pytest.mark.parametrize(
    "fault", ["one step again", "one ingredient again", "in a loop"]
)
def test_text_that_repeats_itself_scores_low_however_fine_its_form(fault):
    for recipe in GOOD:
        text = FAULTS[fault][1](recipe)
        scores = text_metrics(write_prompt(recipe.title, recipe.ingredients), text)
        assert scores["recipe_score"] < 0.25, (recipe.title, scores)
        assert (
            scores["format_correctness"] == 1.0
        )  # the checklist's rules see nothing wrong


def test_muffins_without_blueberries():
    muffins = Recipe(
        "Blueberry Muffins",
        ("2 cups flour", "1 cup sugar", "2 eggs", "1 cup milk"),
        (
            "Mix the flour, sugar, eggs and milk in a bowl.",
            "Bake in cups for 20 minutes.",
        ),
    )
    asked = "Generate recipe for: Blueberry Muffins using ingredients: flour, sugar, eggs, milk"
    scores = text_metrics(asked, to_text(muffins))
    assert scores["form"] == 1.0
    assert scores["title_kept"] == 0.0
    assert scores["recipe_score"] <= 0.5
    assert [*scores][:2] == ["cookable", "recipe_score"]  # what is printed first
    lines = (*muffins.ingredients, "1 cup blueberries")
    steps = (muffins.steps[0], "Fold in the blueberries.", muffins.steps[1])
    whole = text_metrics(
        f"{asked}, blueberries", changed(muffins, lines=lines, steps=steps)
    )
    assert whole["recipe_score"] == pytest.approx(1.0)


def test_text_without_steps_or_ingredients_scores_low():
    for recipe in GOOD:
        prompt = write_prompt(recipe.title, recipe.ingredients)
        steps = "\n".join(f"{n}. {step}" for n, step in enumerate(recipe.steps, 1))
        for text in (FAULTS["without steps"][1](recipe), f"Instructions:\n{steps}"):
            assert text_metrics(prompt, text)["recipe_score"] < 0.4, text
        for text in ("", recipe.title, FAULTS["chatter"][1](recipe)):
            assert text_metrics(prompt, text)["recipe_score"] == 0.0, text


def test_a_hint_says_what_to_do_while_texts_are_poor():
    assert advice_on_score(POOR) == advice_on_score(1.0) == ""
    said = advice_on_score(0.314)
    assert "0.31" in said
    assert "model.start_from" in said
