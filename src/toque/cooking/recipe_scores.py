"""Recipe scores of one generated text and its prompt, each in [0, 1]; `recipe_score` combines them.

* ingredient_coherence: share of items in the ingredient section with a quantity and a name.
* instruction_quality: share of steps with a cooking verb.
* completeness: 0.33 for an ingredient section, 0.33 for an instruction section, 0.34 for a
  length of 100 to 2000 characters.
* format_correctness: 0.5 for an "Ingredients" header, 0.5 for "Instructions" or "Steps".
* form: the mean of the four. It is no quality: a step repeated twelve times is perfect to it.

The others judge consistency with the prompt, the title and itself, by words of the food table; 1 is
best, but 0 of `hallucinated_ingredients`. A score that does not apply to a text is None.
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
)  # text just before and just after the title in each request, the longest first


POOR: Final = 0.6  # of five collections, 97 to 99 % of the recipes have a better score
NAMES: Final = (  # of the scores in `text_metrics`; a text has those that apply to it
    "recipe_score", "ingredient_coverage", "hallucinated_ingredients", "ingredients_used",
    "steps_listed", "title_kept", "variety", "quantity_sanity", "structure",
    "ingredient_coherence", "instruction_quality", "completeness", "format_correctness", "form",
    "times_and_heat", "sentences_once", "oven_fits",
)  # fmt: skip
_APART: Final = ("variety", "title_kept", "form", "times_and_heat", "sentences_once", "oven_fits")
"""Scores that are no part of the mean: factors of it, and those that are younger than it."""

RECIPE_SCORES: Final = frozenset(NAMES)


def text_metrics(prompt: str, text: str, *, knows_recipes: bool = True) -> dict[str, float]:
    """Every recipe score of a text, `recipe_score` first; empty if no recipe was asked for.

    Args:
        prompt: as the model reads it.
        text: what it wrote.
        knows_recipes: see `asks_for_a_recipe`.
    """
    if not asks_for_a_recipe(prompt, knows_recipes=knows_recipes):
        return {}
    recipe, asked = parse_text(text), asked_ingredients(prompt)
    found: dict[str, float | None] = {}
    if asked:
        found["ingredient_coverage"] = ingredient_coverage(asked, text)
        if len(asked) < MAX_PROMPT_INGREDIENTS:  # a longer list was truncated
            found["hallucinated_ingredients"] = hallucinated_ingredients(asked, recipe)
    found |= {
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
    scores = {name: score for name, score in found.items() if score is not None}
    n_parts = bool(recipe.ingredients) + bool(recipe.steps)
    return {"recipe_score": recipe_score(scores, whole=n_parts / 2), **scores}


def recipe_score(scores: Mapping[str, float], *, whole: float = 1.0) -> float:
    """One number in [0, 1] to rank recipes by, for good form cannot make up for a low factor.

    The mean of the scores, hallucinated ingredients counted as 1 minus theirs, times `variety`,
    times (1 + `title_kept`) / 2, times `whole`: the share of the two parts that the text has.
    """
    parts = [
        1.0 - score if name == "hallucinated_ingredients" else score
        for name, score in scores.items()
        if name not in _APART
    ]
    mean = sum(parts) / len(parts)
    factor = scores.get("variety", 1.0) * (1.0 + scores.get("title_kept", 1.0)) / 2.0
    return mean * factor * whole


def hint(score: float) -> str:
    """A sentence about texts of this mean recipe score and what to do; "" if they are not poor."""
    if score >= POOR:
        return ""
    return (
        f"The texts are still poor: their recipe score is {score:.2f} of 1; recipes that people "
        "wrote score about 0.9. Train longer, on more recipes, or start from a pretrained model "
        "(model.start_from), and read a few texts before you trust any single score."
    )


def title_of(prompt: str) -> str:
    """The dish that a prompt of `write_prompt` or one of `REQUESTS` names; "" if none is found."""
    request = prompt.strip()
    if request.startswith(ASKS_FOR):
        return request.removeprefix(ASKS_FOR).partition(WITH_INGREDIENTS)[0].strip()
    for opening, ending in _AROUND_TITLES:
        _, found, rest = request.partition(opening)
        title, ended, _ = rest.partition(ending)
        if found and ended:
            return title.strip()
    return ""


def asked_ingredients(prompt: str) -> list[str]:
    """The ingredient names in a prompt of `write_prompt`."""
    _, _, listed = prompt.partition(WITH_INGREDIENTS)
    return [name.strip() for name in listed.split(",") if name.strip()]


MIN_CHARS = 100
MAX_CHARS = 2000


def evaluate_recipe(text: str, recipe: ParsedRecipe) -> dict[str, float]:
    """All five scores of a recipe's text without its title; `recipe`: the same, parsed."""
    is_long_enough = MIN_CHARS <= len(text.strip()) <= MAX_CHARS
    parts = 33 * bool(recipe.ingredients) + 33 * bool(recipe.steps) + 34 * is_long_enough
    headers = recipe.has_ingredients_header + recipe.has_instructions_header
    scores = {
        "ingredient_coherence": share(map(has_quantity, recipe.ingredients)),
        "instruction_quality": share(map(has_action_verb, recipe.steps)),
        "completeness": parts / 100,
        "format_correctness": headers / 2,
    }
    return scores | {"form": sum(scores.values()) / 4}


FREE_SHARE: Final = 0.3  # share that may repeat, as salt does in a cake with its frosting
RUN_WORDS: Final = 4  # words of a sequence, as in the metric `repetition`


def variety(recipe: ParsedRecipe) -> float:
    """The least share of different ingredients, steps and sequences; `FREE_SHARE` may repeat."""
    words = [word for text in (*recipe.ingredients, *recipe.steps) for word in words_of(text)]
    runs = list(zip(*(words[at:] for at in range(RUN_WORDS)), strict=False))
    shares = (
        share_different([ingredient_name(line).casefold() for line in recipe.ingredients]),
        share_different([" ".join(words_of(step)) for step in recipe.steps]),
        share_different(runs),
    )
    return min(1.0, min(shares) / (1.0 - FREE_SHARE))


_SENTENCE_END: Final = re.compile(r"[.!?;](?=\s)")


def sentences_once(recipe: ParsedRecipe) -> float | None:
    """Share of different sentences among those of `RUN_WORDS` words or more; None without any.

    A single sentence said again, within one step or in two, is too little for `variety` to fall.
    """
    said = [s.lower().split() for step in recipe.steps for s in _SENTENCE_END.split(step)]
    sentences = [" ".join(words).rstrip(".!") for words in said if len(words) >= RUN_WORDS]
    return share_different(sentences) if sentences else None


STAPLES: Final = frozenset({"water", "salt", "pepper"})  # head nouns never hallucinated

_COLLECTIVE: Final = re.compile(
    r"\b(?:all|remaining|other|rest of|dry|wet)\b(?: \w+){0,2} ingredients\b|\beverything\b"
    r"|\bingredients (?:in|into|together)\b"
)
_NUMBERED: Final = re.compile(r"\n[^\S\n]*+(\d{1,3})[.)](?=\s)")
_ENDED: Final = (".", "!", "?", ")", '"', "'", "”", "…")  # fmt: skip


def ingredient_coverage(ingredients: Sequence[str], text: str) -> float:
    """Share of the requested names or lines whose head noun occurs, in any number; 1.0 of none."""
    n_missed = len(missed_ingredients(ingredients, text))
    return (len(ingredients) - n_missed) / len(ingredients) if ingredients else 1.0


def missed_ingredients(ingredients: Sequence[str], text: str) -> list[str]:
    """The requested ingredients whose head noun does not occur in the text."""
    words = set(words_of(text))
    return [line for line in ingredients if forms_in_line(line).isdisjoint(words)]


def unlisted_ingredients(ingredients: Sequence[str], recipe: ParsedRecipe) -> list[str]:
    """The requested ingredients that the steps name and the ingredient list does not."""
    unlisted = missed_ingredients(ingredients, "\n".join(recipe.ingredients))
    unused = missed_ingredients(unlisted, "\n".join(recipe.steps))
    return [line for line in unlisted if line not in unused]


def hallucinated_ingredients(asked: Sequence[str], recipe: ParsedRecipe) -> float | None:
    """Share of listed ingredients whose head noun is no word of a requested name; None of none."""
    if not recipe.ingredients:
        return None
    known = STAPLES | {stem(word) for name in asked for word in words_of(name)}
    lines = recipe.ingredients
    return sum(head_of_line(line) not in known for line in lines) / len(lines)


def ingredients_used(recipe: ParsedRecipe) -> float | None:
    """Share of the ingredients that a step mentions, "everything" each; None if none is listed."""
    text = " ".join(recipe.steps)
    if not recipe.ingredients or _COLLECTIVE.search(text.lower()):
        return 1.0 if recipe.ingredients else None
    return ingredient_coverage(recipe.ingredients, text)


def structure_score(text: str, recipe: ParsedRecipe) -> float:
    """Share of six things a well-formed recipe has; see the comments."""
    if not recipe.ingredients or not recipe.steps:
        return 0.0
    numbers = [int(n) for n in _NUMBERED.findall("\n" + text)]
    folded = text.lower()
    lines = "\n".join((*recipe.ingredients, *recipe.steps)).lower().split("\n")
    held = (
        0 <= folded.find("ingredients") < max(folded.rfind("instructions"), folded.rfind("steps")),
        len(recipe.ingredients) > 1,
        len(recipe.steps) > 1,
        numbers == list(range(1, len(recipe.steps) + 1)),  # numbered from 1, none left out
        len(set(lines)) == len(lines),  # no repetition
        text.rstrip().endswith(_ENDED),  # not cut off
    )
    return sum(held) / len(held)


_NAMES_DISHES: Final = frozenset(
    """
    berry biscuit bread bun burger butter cake candy caramel cereal cheese chili chip chutney coffee
    cookie corn cracker cream cup curry custard dip dog dressing drink egg finger fruit gravy green
    guacamole herb hot hummus ice icing jam jelly juice kimchi lasagna leaf loaf marinade milk mock
    mole noodle nut pastry pesto pie pizza pot pound punch relish rib roll salad salsa sauce savory
    sherbet soup spaghetti spice spread steak stew sweet tea toast tortilla vegetable vinaigrette
    water wing
    """.split()  # noqa: SIM905
)  # words of the table that often name a dish, or a kind, instead of a food: "coffee cake"
UNLISTED: Final = frozenset(
    """
    broth butter flour garlic herb ice juice liquid oil onion pepper salt sauce spice stock sugar
    vegetable water wine
    """.split()  # noqa: SIM905
)  # foods that steps may use without listing them, and words for what they make of others


def title_kept(title: str, recipe: ParsedRecipe) -> float | None:
    """Share of the title's foods, before the dish or after "with", that occur; None without any."""
    wanted = foods_of_title(title)
    if not wanted:
        return None
    there = _listed(recipe) | {stem(word) for step in recipe.steps for word in words_of(step)}
    return len(wanted & there) / len(wanted)


@lru_cache(maxsize=1 << 14)
def foods_of_title(title: str) -> frozenset[str]:
    """Words of foods that a dish of this title holds."""
    first, *others = (words_of(part) for part in parts_of_title(title))
    named = {stem(word) for word in (*first[:-1], *(word for part in others for word in part))}
    return frozenset(word for word in named - _NAMES_DISHES if _is_food(word))


def steps_listed(recipe: ParsedRecipe) -> float | None:
    """Share of the foods in the steps that are listed; None if the steps name none."""
    listed = _listed(recipe)
    named = {stem(word) for step in recipe.steps for word in words_of(step)}
    unlisted = named - listed - UNLISTED - _NAMES_DISHES
    foods = (named & listed) | set(filter(_is_food, unlisted))
    return len(foods & listed) / len(foods) if foods else None


def _listed(recipe: ParsedRecipe) -> set[str]:
    """Words of the listed ingredients, and of every name of their foods."""
    listed: set[str] = set()
    for line in recipe.ingredients:
        listed.update(map(stem, words_of(line)))
        food = find_food(ingredient_name(line))
        if food is not None:  # "spaghetti" is listed for "drain the pasta"
            listed.update(stem(word) for name in food.names for word in words_of(name))
    return listed


@lru_cache(maxsize=1 << 15)
def _is_food(word: str) -> bool:
    return len(word) > 2 and find_food(word) is not None
