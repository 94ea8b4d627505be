"""Recipe scores of a generated text, each in [0, 1]. Two scores combine them.

* cookable: whether a reader can cook from the text as it is.
* recipe_score: the form of a recipe, and whether it fits the prompt.

The scores of form:

* ingredient_coherence: fraction of ingredients with a quantity and a name.
* instruction_quality: fraction of steps with a cooking verb.
* completeness: 0.33 for ingredients, 0.33 for steps, 0.34 for a length of 100 to 2000 characters.
* format_correctness: 0.5 for the header "Ingredients", 0.5 for "Instructions" or "Steps".
* form: the mean of these four. It does not measure quality: a text that repeats one step twelve
  times has a form of 1.

All other scores compare names of foods to measure consistency with the prompt, with the title and
within the text. The best value is 1, or 0 for `hallucinated_ingredients`. A score that does not
apply to a text is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

from toque.cooking.cookable import cookable
from toque.cooking.dish_steps import dish_made, food_cooked
from toque.cooking.ingredient_use import (
    added_once,
    ingredients_named,
    requested_listed,
    steps_detailed,
)
from toque.cooking.ingredients.names import (
    forms_in_line,
    has_quantity,
    head_of_line,
    ingredient_name,
    stem,
)
from toque.cooking.labels.foods import find_food
from toque.cooking.normalised_words import (
    VERB_FORMS,
    has_action_verb,
    parts_of_title,
    share_distinct,
    share_true,
    words_of,
)
from toque.cooking.plausible_amounts import quantity_sanity
from toque.cooking.prompts import (
    ASKS_FOR,
    FIELD,
    MAX_PROMPT_INGREDIENTS,
    REQUESTS,
    WITH_INGREDIENTS,
    asks_for_a_recipe,
)
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.times_and_heat import oven_fits, times_and_heat
from toque.cooking.usual_amounts import amounts_differ, amounts_usual


def _around_title(request: str) -> tuple[str, str]:
    """Return the texts directly before and after the title in a template of a request."""
    before, _, after = request.partition("{title}")
    return FIELD.split(before)[-1], FIELD.split(after)[0]


_AROUND_TITLES = sorted(
    map(_around_title, REQUESTS),
    key=lambda around: len(around[0]) + len(around[1]),
    reverse=True,
)
"""Texts around the title in each request. The longest are first, because they are the most
specific."""

POOR = 0.6
"""Score below which a recipe is poor. In five collections, 97 to 99 % of the recipes have a better
score.
"""
NAMES = (
    "cookable", "recipe_score", "ingredient_coverage", "hallucinated_ingredients",
    "ingredients_used", "steps_listed", "title_kept", "variety", "quantity_sanity", "structure",
    "ingredient_coherence", "instruction_quality", "completeness", "format_correctness", "form",
    "times_and_heat", "sentences_once", "oven_fits", "ingredients_named", "requested_listed",
    "added_once", "foods_listed", "dish_made", "food_cooked", "amounts_usual", "amounts_differ",
    "phrases_once", "steps_detailed",
)  # fmt: skip
"""Names of the scores in `text_metrics`."""
_IN_MEAN = frozenset(
    {
        "ingredient_coverage", "hallucinated_ingredients", "ingredients_used", "steps_listed",
        "quantity_sanity", "structure", "ingredient_coherence", "instruction_quality",
        "completeness", "format_correctness",
    }
)  # fmt: skip
"""Scores in the mean of `recipe_score`."""

RECIPE_SCORES = frozenset(NAMES)


def text_metrics(
    prompt: str, text: str, *, knows_recipes: bool = True
) -> dict[str, float]:
    """Compute all recipe scores of a text, or none if the prompt does not request a recipe.

    Args:
        prompt: The model's prompt.
        text: The generated text.
        knows_recipes: As in `asks_for_a_recipe`.
    """
    if not asks_for_a_recipe(prompt, knows_recipes=knows_recipes):
        return {}
    recipe, requested = parse_text(text), requested_ingredients(prompt)
    title = title_of(prompt)
    all_scores: dict[str, float | None] = {}
    if requested:
        all_scores["ingredient_coverage"] = ingredient_coverage(requested, text)
        if len(requested) < MAX_PROMPT_INGREDIENTS:  # otherwise it was truncated
            all_scores["hallucinated_ingredients"] = hallucinated_ingredients(
                requested, recipe
            )
    all_scores |= {
        "ingredients_used": ingredients_used(recipe),
        "steps_listed": steps_listed(recipe),
        "title_kept": title_kept(title, recipe),
        "variety": variety(recipe),
        "quantity_sanity": quantity_sanity(recipe),
        "structure": structure_score(text, recipe),
        **evaluate_recipe(text, recipe),
        "times_and_heat": times_and_heat(recipe),
        "sentences_once": sentences_once(recipe),
        "oven_fits": oven_fits(title, recipe),
        "ingredients_named": ingredients_named(recipe),
        "requested_listed": requested_listed(requested, recipe),
        "added_once": added_once(recipe),
        "foods_listed": foods_listed(title, recipe),
        "dish_made": dish_made(title, recipe),
        "food_cooked": food_cooked(title, recipe),
        "amounts_usual": amounts_usual(title, recipe),
        "amounts_differ": amounts_differ(recipe),
        "phrases_once": phrases_once(recipe),
        "steps_detailed": steps_detailed(recipe),
    }
    scores = {name: score for name, score in all_scores.items() if score is not None}
    n_parts = bool(recipe.ingredients) + bool(recipe.steps)
    combined = {
        "cookable": cookable(scores, is_complete=n_parts == 2),
        "recipe_score": recipe_score(scores, share_of_parts=n_parts / 2),
    }
    return combined | scores


def recipe_score(scores: Mapping[str, float], *, share_of_parts: float = 1.0) -> float:
    """Combine the scores of a recipe to one number in [0, 1].

    The mean of the scores (1 - score for hallucinated_ingredients) is multiplied by three factors:
    `variety`, (1 + `title_kept`) / 2, and `share_of_parts`. `share_of_parts` is 1.0 for a text with
    ingredients and steps, and 0.5 for a text with one of them. Good other scores cannot compensate
    for a low factor.
    """
    terms = [
        1.0 - score if name == "hallucinated_ingredients" else score
        for name, score in scores.items()
        if name in _IN_MEAN
    ]
    mean = sum(terms) / len(terms)
    title_factor = (1.0 + scores.get("title_kept", 1.0)) / 2.0
    factor = scores.get("variety", 1.0) * title_factor
    return mean * factor * share_of_parts


def advice_on_score(score: float) -> str:
    """Return advice for a mean recipe score below `POOR`, or ""."""
    if score >= POOR:
        return ""
    return (
        f"The texts are still poor: their recipe score is {score:.2f} of 1. Train longer, train "
        "on more recipes, or start from a pretrained model (model.start_from). Read a few texts "
        "before you trust a single score."
    )


def title_of(prompt: str) -> str:
    """Extract the title from a prompt of `write_prompt` or `REQUESTS`, or return ""."""
    request = prompt.strip()
    if request.startswith(ASKS_FOR):
        return request.removeprefix(ASKS_FOR).partition(WITH_INGREDIENTS)[0].strip()
    for before, after in _AROUND_TITLES:
        _, start, rest = request.partition(before)
        title, end, _ = rest.partition(after)
        if start and end:
            return title.strip()
    return ""


def requested_ingredients(prompt: str) -> list[str]:
    """Extract the names of ingredients from a prompt of `write_prompt`."""
    _, _, names = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in names.split(",") if name.strip()]


MIN_CHARS = 100
MAX_CHARS = 2000
"""Maximum length of a complete recipe, in characters."""


def evaluate_recipe(text: str, recipe: ParsedRecipe) -> dict[str, float]:
    """Compute the scores of a text's form. `recipe` is the parsed text."""
    completeness = 33 * bool(recipe.ingredients) + 33 * bool(recipe.steps)
    if MIN_CHARS <= len(text.strip()) <= MAX_CHARS:
        completeness += 34
    n_headers = recipe.has_ingredients_header + recipe.has_instructions_header
    scores = {
        "ingredient_coherence": share_true(map(has_quantity, recipe.ingredients)),
        "instruction_quality": share_true(map(has_action_verb, recipe.steps)),
        "completeness": completeness / 100,
        "format_correctness": n_headers / 2,
    }
    return scores | {"form": sum(scores.values()) / 4}


FREE_SHARE = 0.3
"""Fraction of repetitions that has no penalty: a cake and its frosting may both need salt."""
RUN_WORDS = 4
"""Words per n-gram, as in the metric `repetition`."""


def variety(recipe: ParsedRecipe) -> float:
    """Compute the lowest fraction of distinct items among ingredients, steps and word n-grams.

    A fraction of `FREE_SHARE` may be repetitions.
    """
    foods = [ingredient_name(line).casefold() for line in recipe.ingredients]
    steps = [" ".join(words_of(step)) for step in recipe.steps]
    texts = (*recipe.ingredients, *recipe.steps)
    words = [word for text in texts for word in words_of(text)]
    shifted = (words[start:] for start in range(RUN_WORDS))
    n_grams = list(zip(*shifted, strict=False))
    lowest = min(share_distinct(foods), share_distinct(steps), share_distinct(n_grams))
    return min(1.0, lowest / (1.0 - FREE_SHARE))


_SENTENCE_END = re.compile(r"[.!?;](?=\s)")


def sentences_once(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of distinct sentences with `RUN_WORDS` or more words; None without any.

    `variety` would not detect one repeated sentence.
    """
    sentences = []
    for step in recipe.steps:
        for sentence in _SENTENCE_END.split(step):
            words = sentence.lower().split()
            if len(words) >= RUN_WORDS:
                sentences.append(" ".join(words).rstrip(".!"))
    return share_distinct(sentences) if sentences else None


def phrases_once(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of distinct sequences of three words in the steps; None without any."""
    words = [word for step in recipe.steps for word in words_of(step)]
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return share_distinct(triples) if triples else None


STAPLES = frozenset({"water", "salt", "pepper"})
"""Head nouns that never count as hallucinated."""

_COLLECTIVE = re.compile(
    r"\b(?:all|remaining|other|rest of|dry|wet)\b(?: \w+){0,2} ingredients\b|\beverything\b"
    r"|\bingredients (?:in|into|together)\b"
)
_NUMBERED = re.compile(r"\n[^\S\n]*+(\d{1,3})[.)](?=\s)")
_SENTENCE_ENDS = (".", "!", "?", ")", '"', "'", "”", "…")  # fmt: skip


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Compute the fraction of ingredients with a head noun in the text, singular or plural.

    The fraction is 1.0 without ingredients.
    """
    if not ingredients:
        return 1.0
    n_missed = len(missing_ingredients(ingredients, text))
    return (len(ingredients) - n_missed) / len(ingredients)


def missing_ingredients(ingredients: Sequence[str], text: str) -> list[str]:
    """List the ingredients with a head noun that is not in the text."""
    words = set(words_of(text))
    return [line for line in ingredients if forms_in_line(line).isdisjoint(words)]


def unlisted_ingredients(ingredients: Sequence[str], recipe: ParsedRecipe) -> list[str]:
    """List the requested ingredients that are in the steps but not in the list of the recipe."""
    unlisted = missing_ingredients(ingredients, "\n".join(recipe.ingredients))
    unused = missing_ingredients(unlisted, "\n".join(recipe.steps))
    return [line for line in unlisted if line not in unused]


def hallucinated_ingredients(
    names: Sequence[str], recipe: ParsedRecipe
) -> float | None:
    """Compute the fraction of listed ingredients that were not requested, or None without any.

    An ingredient was requested if its head noun is a word of the requested `names`.
    """
    lines = recipe.ingredients
    if not lines:
        return None
    requested = STAPLES | {stem(word) for name in names for word in words_of(name)}
    n_hallucinated = sum(head_of_line(line) not in requested for line in lines)
    return n_hallucinated / len(lines)


def ingredients_used(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of listed ingredients that the steps use, or None without any."""
    if not recipe.ingredients:
        return None
    text = " ".join(recipe.steps)
    if _COLLECTIVE.search(text.lower()):  # e.g. "mix everything"
        return 1.0
    return ingredient_coverage(recipe.ingredients, text)


def structure_score(text: str, recipe: ParsedRecipe) -> float:
    """Compute the fraction of six properties of a well-formed recipe."""
    if not recipe.ingredients or not recipe.steps:
        return 0.0
    folded = text.lower()
    last_header = max(folded.rfind("instructions"), folded.rfind("steps"))
    has_ordered_headers = 0 <= folded.find("ingredients") < last_header
    numbers = [int(number) for number in _NUMBERED.findall("\n" + text)]
    is_numbered_from_1 = numbers == list(range(1, len(recipe.steps) + 1))
    lines = "\n".join((*recipe.ingredients, *recipe.steps)).lower().split("\n")
    has_no_repetition = len(set(lines)) == len(lines)
    is_not_cut_off = text.rstrip().endswith(_SENTENCE_ENDS)
    properties = (
        has_ordered_headers,
        len(recipe.ingredients) > 1,
        len(recipe.steps) > 1,
        is_numbered_from_1,
        has_no_repetition,
        is_not_cut_off,
    )
    return sum(properties) / len(properties)


_NAMES_DISHES = frozenset(
    """
    berry biscuit bread bun burger butter cake candy caramel cereal cheese chili chip chutney coffee
    cookie corn cracker cream cup curry custard dip dog dressing drink egg finger fruit gravy green
    guacamole herb hot hummus ice icing jam jelly juice kimchi lasagna leaf loaf marinade milk mock
    mole noodle nut pastry pesto pie pizza pot pound punch relish rib roll salad salsa sauce savory
    sherbet soup spaghetti spice spread steak stew sweet tea toast tortilla vegetable vinaigrette
    water wing
    """.split()  # noqa: SIM905
)
"""Foods in the food table that often name a dish or a kind of food: "coffee cake"."""
UNLISTED = frozenset(
    """
    broth butter flour garlic herb ice juice liquid oil onion pepper salt sauce spice stock sugar
    vegetable water wine
    """.split()  # noqa: SIM905
)
"""Foods that steps may use although the recipe does not list them, and words for mixtures."""


def title_kept(title: str, recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of foods in the title that the recipe uses, or None without foods."""
    foods = foods_of_title(title)
    if not foods:
        return None
    stems = _stems_in_list(recipe) | _stems_in_steps(recipe)
    return len(foods & stems) / len(foods)


@lru_cache(maxsize=1 << 14)
def foods_of_title(title: str) -> frozenset[str]:
    """Extract the foods of a title: "carrot" and "bean" of "Carrot Soup with Beans"."""
    dish, *additions = (words_of(part) for part in parts_of_title(title))
    words = dish[:-1]  # without the name of the dish, such as "soup"
    for addition in additions:
        words += addition
    stems = set(map(stem, words)) - _NAMES_DISHES
    return frozenset(filter(_is_food, stems))


def steps_listed(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of foods in the steps that are in the list, or None without foods."""
    in_list = _stems_in_list(recipe)
    in_steps = _stems_in_steps(recipe)
    listed_foods = in_steps & in_list
    unlisted_words = in_steps - in_list - UNLISTED - _NAMES_DISHES
    n_unlisted_foods = sum(map(_is_food, unlisted_words))
    n_foods = len(listed_foods) + n_unlisted_foods
    return len(listed_foods) / n_foods if n_foods else None


_FOODS_TOO = {"butter", "cheese", "corn", "egg", "noodle", "spaghetti", "tortilla"}
"""Names of dishes that are foods in steps."""
_ALWAYS_THERE = frozenset(
    """
    bechamel crisp custard filling frosting gelatin glaze grit herb ice juice liquid muffin oil
    pepper salt sauce spice stock syrup topping vegetable water yolk
    """.split()  # noqa: SIM905
)
_NOT_FOODS = {stem(word) for word in VERB_FORMS} - {"butter", "flour"} | _ALWAYS_THERE
"""Stems in steps that are verbs, mixtures or always at hand, although the food table has them."""


def foods_listed(title: str, recipe: ParsedRecipe) -> float | None:
    """Score foods in the steps that the recipe does not list: 1 / (1 + their number).

    None without steps. Unlike `steps_listed`, it also counts butter, flour, garlic and onions.
    """
    if not recipe.steps:
        return None
    known = _stems_in_list(recipe) | set(map(stem, words_of(title)))
    unlisted_words = (
        _stems_in_steps(recipe) - known - (_NAMES_DISHES - _FOODS_TOO) - _NOT_FOODS
    )
    return 1.0 / (1.0 + sum(map(_is_food, unlisted_words)))


def _stems_in_steps(recipe: ParsedRecipe) -> set[str]:
    return {stem(word) for step in recipe.steps for word in words_of(step)}


def _stems_in_list(recipe: ParsedRecipe) -> set[str]:
    """Collect the stems of the words in ingredient lines, and in all names of their foods."""
    stems: set[str] = set()
    for line in recipe.ingredients:
        stems.update(map(stem, words_of(line)))
        food = find_food(ingredient_name(line))
        if food is not None:  # the steps may call spaghetti "pasta"
            stems.update(stem(word) for name in food.names for word in words_of(name))
    return stems


@lru_cache(maxsize=1 << 15)
def _is_food(word: str) -> bool:
    return len(word) > 2 and find_food(word) is not None
