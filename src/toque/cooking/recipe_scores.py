"""Recipe scores of a generated text, each in [0, 1]. `recipe_score` combines them.

* ingredient_coherence: share of ingredients with a quantity and a name.
* instruction_quality: share of steps with a cooking verb.
* completeness: 0.33 for ingredients, 0.33 for steps, 0.34 for a length of 100 to 2000 characters.
* format_correctness: 0.5 for the header "Ingredients", 0.5 for "Instructions" or "Steps".
* form: the mean of these four. It does not measure quality: a text with one step repeated twelve
  times has the form 1.

All other scores measure consistency with the prompt, with the title and within the text, by the
names of foods. The best value is 1, and for `hallucinated_ingredients` 0. A score that does not
apply to a text is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.names import (
    forms_in_line,
    has_quantity,
    head_of_line,
    ingredient_name,
    stem,
)
from toque.cooking.labels.foods import find_food
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
from toque.cooking.text_keys import (
    has_action_verb,
    parts_of_title,
    share,
    share_different,
    words_of,
)
from toque.cooking.times_and_heat import oven_fits, times_and_heat

_AROUND_TITLES: Final = sorted(
    (
        (FIELD.split(before)[-1], FIELD.split(after)[0])
        for before, _, after in (form.partition("{title}") for form in REQUESTS)
    ),
    key=lambda around: -len(around[0]) - len(around[1]),
)
"""Texts before and after the title in each request. The longest are first."""

POOR: Final = 0.6
"""Limit of poor scores. In five collections, 97 to 99 % of the recipes have a better score."""
NAMES: Final = (
    "recipe_score", "ingredient_coverage", "hallucinated_ingredients", "ingredients_used",
    "steps_listed", "title_kept", "variety", "quantity_sanity", "structure",
    "ingredient_coherence", "instruction_quality", "completeness", "format_correctness", "form",
    "times_and_heat", "sentences_once", "oven_fits",
)  # fmt: skip
"""Names of the scores in `text_metrics`."""
_NOT_IN_MEAN: Final = {
    *("variety", "title_kept", "form", "times_and_heat", "sentences_once", "oven_fits")
}
"""Scores that are not in the mean of `recipe_score`. Two are factors, and later scores would change
its meaning."""

RECIPE_SCORES: Final = frozenset(NAMES)


def text_metrics(
    prompt: str, text: str, *, knows_recipes: bool = True
) -> dict[str, float]:
    """Compute all recipe scores of a text. Empty if the prompt does not request a recipe.

    Args:
        prompt: The prompt of the model.
        text: The text that the model wrote.
        knows_recipes: As in `asks_for_a_recipe`.
    """
    if not asks_for_a_recipe(prompt, knows_recipes=knows_recipes):
        return {}
    recipe, requested = parse_text(text), asked_ingredients(prompt)
    all_scores: dict[str, float | None] = {}
    if requested:
        all_scores["ingredient_coverage"] = ingredient_coverage(requested, text)
        if len(requested) < MAX_PROMPT_INGREDIENTS:  # a longer list was truncated
            all_scores["hallucinated_ingredients"] = hallucinated_ingredients(
                requested, recipe
            )
    all_scores |= {
        "ingredients_used": ingredients_used(recipe),
        "steps_listed": steps_listed(recipe),
        "title_kept": title_kept(title_of(prompt), recipe),
        "variety": variety(recipe),
        "quantity_sanity": quantity_sanity(recipe),
        "structure": structure_score(text, recipe),
        **evaluate_recipe(text, recipe),
        "times_and_heat": times_and_heat(recipe),
        "sentences_once": sentences_once(recipe),
        "oven_fits": oven_fits(title_of(prompt), recipe),
    }
    scores = {name: score for name, score in all_scores.items() if score is not None}
    n_parts = bool(recipe.ingredients) + bool(recipe.steps)
    return {"recipe_score": recipe_score(scores, share_of_parts=n_parts / 2), **scores}


def recipe_score(scores: Mapping[str, float], *, share_of_parts: float = 1.0) -> float:
    """Combine the scores of a recipe to one number in [0, 1].

    It is the mean of the scores (1 - score for hallucinated_ingredients), multiplied by three
    factors: `variety`, (1 + `title_kept`) / 2, and `share_of_parts`, the share of ingredients and
    steps that the text has. A good form cannot compensate for a low factor.
    """
    parts = [
        1.0 - score if name == "hallucinated_ingredients" else score
        for name, score in scores.items()
        if name not in _NOT_IN_MEAN
    ]
    mean = sum(parts) / len(parts)
    factor = scores.get("variety", 1.0) * (1.0 + scores.get("title_kept", 1.0)) / 2.0
    return mean * factor * share_of_parts


def hint(score: float) -> str:
    """Return advice about texts with a poor mean recipe score, or ""."""
    if score >= POOR:
        return ""
    return (
        f"The texts are still poor: their recipe score is {score:.2f} of 1. Recipes by people have "
        "about 0.9. Train longer, train on more recipes, or start from a pretrained model "
        "(model.start_from). Read a few texts before you trust a single score."
    )


def title_of(prompt: str) -> str:
    """Extract the dish from a prompt of `write_prompt` or `REQUESTS`. Return "" for other texts."""
    request = prompt.strip()
    if request.startswith(ASKS_FOR):
        return request.removeprefix(ASKS_FOR).partition(WITH_INGREDIENTS)[0].strip()
    for before, after in _AROUND_TITLES:
        _, start, rest = request.partition(before)
        title, end, _ = rest.partition(after)
        if start and end:
            return title.strip()
    return ""


def asked_ingredients(prompt: str) -> list[str]:
    """Extract the names of ingredients from a prompt of `write_prompt`."""
    _, _, names = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in names.split(",") if name.strip()]


MIN_CHARS = 100
MAX_CHARS = 2000


def evaluate_recipe(text: str, recipe: ParsedRecipe) -> dict[str, float]:
    """Compute the scores of the form of a text. `recipe` is the parsed text."""
    is_long_enough = MIN_CHARS <= len(text.strip()) <= MAX_CHARS
    parts = (
        33 * bool(recipe.ingredients) + 33 * bool(recipe.steps) + 34 * is_long_enough
    )
    headers = recipe.has_ingredients_header + recipe.has_instructions_header
    scores = {
        "ingredient_coherence": share(map(has_quantity, recipe.ingredients)),
        "instruction_quality": share(map(has_action_verb, recipe.steps)),
        "completeness": parts / 100,
        "format_correctness": headers / 2,
    }
    return scores | {"form": sum(scores.values()) / 4}


FREE_SHARE: Final = 0.3
"""Share of repetitions without a penalty: a cake and its frosting may both need salt."""
RUN_WORDS: Final = 4
"""Words in a sequence, as in the metric `repetition`."""


def variety(recipe: ParsedRecipe) -> float:
    """Compute the lowest share of distinct ingredients, steps and sequences of words.

    `FREE_SHARE` of them may be repetitions.
    """
    words = [
        word for text in (*recipe.ingredients, *recipe.steps) for word in words_of(text)
    ]
    sequences = list(zip(*(words[start:] for start in range(RUN_WORDS)), strict=False))
    shares = (
        share_different(
            [ingredient_name(line).casefold() for line in recipe.ingredients]
        ),
        share_different([" ".join(words_of(step)) for step in recipe.steps]),
        share_different(sequences),
    )
    return min(1.0, min(shares) / (1.0 - FREE_SHARE))


_SENTENCE_END: Final = re.compile(r"[.!?;](?=\s)")


def sentences_once(recipe: ParsedRecipe) -> float | None:
    """Compute the share of distinct sentences of at least `RUN_WORDS` words, or None without any.

    `variety` does not change if a single sentence is repeated.
    """
    sentences = []
    for step in recipe.steps:
        for sentence in _SENTENCE_END.split(step):
            words = sentence.lower().split()
            if len(words) >= RUN_WORDS:
                sentences.append(" ".join(words).rstrip(".!"))
    return share_different(sentences) if sentences else None


STAPLES: Final = frozenset({"water", "salt", "pepper"})
"""Head nouns that never count as hallucinated."""

_COLLECTIVE: Final = re.compile(
    r"\b(?:all|remaining|other|rest of|dry|wet)\b(?: \w+){0,2} ingredients\b|\beverything\b"
    r"|\bingredients (?:in|into|together)\b"
)
_NUMBERED: Final = re.compile(r"\n[^\S\n]*+(\d{1,3})[.)](?=\s)")
_ENDED: Final = (".", "!", "?", ")", '"', "'", "”", "…")  # fmt: skip


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Compute the share of ingredients with a head noun in the text, in any number."""
    n_missed = len(missed_ingredients(ingredients, text))
    return (len(ingredients) - n_missed) / len(ingredients) if ingredients else 1.0


def missed_ingredients(ingredients: Sequence[str], text: str) -> list[str]:
    """List the ingredients without a head noun in the text."""
    words = set(words_of(text))
    return [line for line in ingredients if forms_in_line(line).isdisjoint(words)]


def unlisted_ingredients(ingredients: Sequence[str], recipe: ParsedRecipe) -> list[str]:
    """List the requested ingredients that are in the steps but not in the list of the recipe."""
    unlisted = missed_ingredients(ingredients, "\n".join(recipe.ingredients))
    unused = missed_ingredients(unlisted, "\n".join(recipe.steps))
    return [line for line in unlisted if line not in unused]


def hallucinated_ingredients(
    names: Sequence[str], recipe: ParsedRecipe
) -> float | None:
    """Compute the share of ingredients in the list that were not requested. None if it is empty.

    An ingredient was requested if its head noun is a word of the requested `names`.
    """
    lines = recipe.ingredients
    if not lines:
        return None
    requested = STAPLES | {stem(word) for name in names for word in words_of(name)}
    return sum(head_of_line(line) not in requested for line in lines) / len(lines)


def ingredients_used(recipe: ParsedRecipe) -> float | None:
    """Compute the share of ingredients in the list that the steps use. None if it is empty."""
    if not recipe.ingredients:
        return None
    text = " ".join(recipe.steps)
    if _COLLECTIVE.search(text.lower()):  # e.g. "mix everything"
        return 1.0
    return ingredient_coverage(recipe.ingredients, text)


def structure_score(text: str, recipe: ParsedRecipe) -> float:
    """Compute the share of six properties of a well-formed recipe."""
    if not recipe.ingredients or not recipe.steps:
        return 0.0
    numbers = [int(n) for n in _NUMBERED.findall("\n" + text)]
    folded = text.lower()
    lines = "\n".join((*recipe.ingredients, *recipe.steps)).lower().split("\n")
    properties = (
        0
        <= folded.find("ingredients")
        < max(folded.rfind("instructions"), folded.rfind("steps")),
        len(recipe.ingredients) > 1,
        len(recipe.steps) > 1,
        numbers == list(range(1, len(recipe.steps) + 1)),  # consecutive numbers from 1
        len(set(lines)) == len(lines),  # no repetition
        text.rstrip().endswith(_ENDED),  # not cut off
    )
    return sum(properties) / len(properties)


_NAMES_DISHES: Final = frozenset(
    """
    berry biscuit bread bun burger butter cake candy caramel cereal cheese chili chip chutney coffee
    cookie corn cracker cream cup curry custard dip dog dressing drink egg finger fruit gravy green
    guacamole herb hot hummus ice icing jam jelly juice kimchi lasagna leaf loaf marinade milk mock
    mole noodle nut pastry pesto pie pizza pot pound punch relish rib roll salad salsa sauce savory
    sherbet soup spaghetti spice spread steak stew sweet tea toast tortilla vegetable vinaigrette
    water wing
    """.split()  # noqa: SIM905
)
"""Foods of the table that often are the name of a dish or a kind instead: "coffee cake"."""
UNLISTED: Final = frozenset(
    """
    broth butter flour garlic herb ice juice liquid oil onion pepper salt sauce spice stock sugar
    vegetable water wine
    """.split()  # noqa: SIM905
)
"""Foods that steps may use although they are not in the list, and words for mixtures."""


def title_kept(title: str, recipe: ParsedRecipe) -> float | None:
    """Compute the share of the foods in the title that the recipe uses, or None without foods."""
    foods = foods_of_title(title)
    if not foods:
        return None
    words = _words_of_list(recipe) | _words_of_steps(recipe)
    return len(foods & words) / len(foods)


@lru_cache(maxsize=1 << 14)
def foods_of_title(title: str) -> frozenset[str]:
    """Extract the foods of a title, before the name of the dish and after "with"."""
    dish, *additions = (words_of(part) for part in parts_of_title(title))
    words = {
        stem(word)
        for word in (*dish[:-1], *(word for part in additions for word in part))
    }
    return frozenset(word for word in words - _NAMES_DISHES if _is_food(word))


def steps_listed(recipe: ParsedRecipe) -> float | None:
    """Compute the share of the foods in the steps that are in the list, or None without foods."""
    list_words = _words_of_list(recipe)
    step_words = _words_of_steps(recipe)
    unlisted = step_words - list_words - UNLISTED - _NAMES_DISHES
    foods = (step_words & list_words) | set(filter(_is_food, unlisted))
    return len(foods & list_words) / len(foods) if foods else None


def _words_of_steps(recipe: ParsedRecipe) -> set[str]:
    return {stem(word) for step in recipe.steps for word in words_of(step)}


def _words_of_list(recipe: ParsedRecipe) -> set[str]:
    """Collect the words of the ingredients, and of all names of their foods."""
    words: set[str] = set()
    for line in recipe.ingredients:
        words.update(map(stem, words_of(line)))
        food = find_food(ingredient_name(line))
        if food is not None:  # the steps may call spaghetti "pasta"
            words.update(stem(word) for name in food.names for word in words_of(name))
    return words


@lru_cache(maxsize=1 << 15)
def _is_food(word: str) -> bool:
    return len(word) > 2 and find_food(word) is not None
