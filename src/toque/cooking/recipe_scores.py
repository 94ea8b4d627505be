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
from itertools import zip_longest
from typing import Final

from toque.cooking.ingredients.names import (
    forms_in_line,
    has_quantity,
    head_of_line,
    ingredient_name,
    stem,
)
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.vocabulary import UNITS
from toque.cooking.labels.foods import find_food
from toque.cooking.prompts import (
    ASKS_FOR,
    MAX_PROMPT_INGREDIENTS,
    REQUESTS,
    WITH_INGREDIENTS,
    asks_for_a_recipe,
)
from toque.cooking.recipe import ParsedRecipe, parse_text
from toque.cooking.text_keys import has_action_verb, share, share_different, words_of

_FIELD: Final = re.compile(r"\{\w+\}")
_AROUND_TITLES: Final = sorted(
    (
        (_FIELD.split(before)[-1], _FIELD.split(after)[0])
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


def text_metrics(prompt: str, text: str) -> dict[str, float]:
    """Every recipe score of a text, `recipe_score` first; empty if no recipe was asked for."""
    if not asks_for_a_recipe(prompt):
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

MOST: Final[dict[str, float]] = {
    "mass": 10_000.0,  # grams
    "volume": 10_000.0,  # millilitres
    "length": 100.0,  # centimetres
    "count": 100.0,
}  # largest plausible amounts of one ingredient; chosen by hand
MOST_OF_A_SPOON: Final = 24.0  # largest plausible number of tea- or tablespoons
MOST_OF_A_STRONG_ONE: Final = 60.0
"""Millilitres (a quarter of a cup) of a leavening, an extract or a ground spice.

Of 13,953 such lines in 20,000 recipes of allrecipes and epicurious 16 hold more.
"""
_STRONG: Final = re.compile(
    r"\bbaking (?:soda|powder)\b|\bcream of tartar\b|\b(?:onion|garlic) powder\b"
    r"|\b(?:vanilla|almond|lemon|orange|peppermint|rum) (?:extract|essence)\b|\bsaffron\b"
    r"|\bground (?:cinnamon|nutmeg|allspice|cloves?|cardamom|ginger|cumin|coriander|turmeric|mace"
    r"|anise|sage)\b|\bcayenne(?! pepper sauce| sauce)\b|\bnutmeg\b|\bcinnamon$",
    re.IGNORECASE,
)
DEGREES: Final = (30.0, 600.0)
MINUTES: Final = (0.0, 3 * 24 * 60.0)  # plausible temperatures and times in steps

# A line without a number of two digits, a lone zero or the name of a large number is plausible,
# unless it names something strong: every other bound above is over nine.
_MAY_BE_MANY: Final = re.compile(
    r"\d\d|(?<![\d.,/])0(?![\d.,/])|\bhundred|\bthousand|\bmillion|\bdozen", re.IGNORECASE
)
_MEASURE: Final = re.compile(
    r"(\d(?<!\d\d)\d*+(?:\.\d++)?+)\s*+(°|degrees?\b|minutes?\b|mins?\b|hours?\b|hrs?\b)",
    re.IGNORECASE,
)
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


def quantity_sanity(recipe: ParsedRecipe) -> float | None:
    """Share of plausible amounts, temperatures and times; None without any."""
    sane = [_is_sane(line) for line in recipe.ingredients]
    for step in recipe.steps:
        for digits, unit in _MEASURE.findall(step):
            if _is_time(unit):
                sane.append(_is_sane_time(digits, unit))
            else:
                sane.append(DEGREES[0] <= float(digits) <= DEGREES[1])
    return sum(sane) / len(sane) if sane else None


def _is_time(unit: str) -> bool:
    return unit[0] in "mMhH"


def _is_sane_time(digits: str, unit: str) -> bool:
    return MINUTES[0] < float(digits) * (60.0 if unit[0] in "hH" else 1.0) <= MINUTES[1]


@lru_cache(maxsize=1 << 16)
def _is_sane(line: str) -> bool:
    strong = _STRONG.search(line) is not None
    if not (strong or _MAY_BE_MANY.search(line)):
        return True
    for amount in parse_line(line).amounts:
        if amount.quantity is None:
            continue
        high, unit = amount.quantity[1], UNITS.get(amount.unit or "")
        if high <= 0.0:
            return False
        kind = unit.kind if unit is not None else "count"
        most, size = MOST[kind], unit.size if unit is not None and kind != "count" else 1.0
        if strong and kind == "volume":
            most = MOST_OF_A_STRONG_ONE
        elif unit is not None and unit.name in {"teaspoon", "tablespoon"}:
            most, size = MOST_OF_A_SPOON, 1.0
        if high * size > most:
            return False
    return True


OVEN_CELSIUS: Final = (50.0, 300.0)
OVEN_FAHRENHEIT: Final = (120.0, 575.0)  # bounds of what an oven is set to

_TAKES_TIME: Final = re.compile(
    r"(?:^|[.;:,!)]\s*+|\b(?:and|then|or|let)\s++)(?:bake|roast|simmer|boil|braise|poach|steam"
    r"|chill|refrigerate|freeze|marinate|broil|microwave|soak)\b",
    re.IGNORECASE,
)  # "simmer the beans", but neither "a baking sheet" nor "bring to a boil"
_SAYS_WHEN: Final = re.compile(
    r"(?:\b|(?<=\d))(?:minutes?|mins?|hours?|hrs?|seconds?|secs?|days?|weeks?|moments?)\b"
    r"|\b(?:overnight|night|until|till|immediately|when|while|before|if|ready|done|needed|desired"
    r"|use|serving|package|box|label|directed|directions)\b",
    re.IGNORECASE,
)  # times, and words that say until when or where it is written
_IN_OVEN: Final = re.compile(
    r"(?<!microwave )(?<!dutch )(?<!toaster )\boven\b|(?:^|[.;:,!)]\s*+|\b(?:and|then)\s++)bake\b",
    re.IGNORECASE,
)
_HEAT: Final = re.compile(
    r"(?<!\d)(\d++)(?:\s?(?:°|º|degrees?\b|deg\b)\s?([fc])?|\s?([fc])\b)"
    r"|\b(?:oven|bake|roast|preheat)\b[^.;\d]{0,40}?\b(?:to|at|oven) (\d{3})"
    r"(?!\d| ?[°ºdmg]| ?[fc]\b)",  # "bake at 350"
    re.IGNORECASE,
)
_OTHER_HEAT: Final = re.compile(
    r"\bbroil|\bgas mark\b|\bas directed\b|\bdirections\b|\binstructions\b|\bpackage\b|\bbox\b"
    r"|\b(?:moderate|hot|slow|warm|low|cool|medium|high)\b(?: \w+)? oven",
    re.IGNORECASE,
)  # heat of an oven in words


def times_and_heat(recipe: ParsedRecipe) -> float | None:
    """Share of times and temperatures that are there and sane; None where none is needed or said.

    A step that bakes, simmers, chills ... needs a time, or says until when; the step after it may
    say so. A recipe with an oven needs its heat. What is said must be sane: an oven's heat within
    `OVEN_CELSIUS` or `OVEN_FAHRENHEIT` (in either, where no unit is named), times in `MINUTES`.
    """
    held: list[bool] = []
    needs_heat = states_heat = False
    for step, after in zip_longest(recipe.steps, recipe.steps[1:], fillvalue=""):
        if _TAKES_TIME.search(step):
            held.append(_SAYS_WHEN.search(f"{step} {after}") is not None)
        in_oven = _IN_OVEN.search(step) is not None
        needs_heat |= in_oven
        states_heat |= _OTHER_HEAT.search(step) is not None
        for degrees, sign, letter, bare in _HEAT.findall(step):
            states_heat = True
            scale = (sign or letter).lower()
            low = OVEN_FAHRENHEIT[0] if scale == "f" else OVEN_CELSIUS[0]
            high = OVEN_CELSIUS[1] if scale == "c" else OVEN_FAHRENHEIT[1]
            held += [low <= float(degrees or bare) <= high] if in_oven else []
        held += [_is_sane_time(*found) for found in _MEASURE.findall(step) if _is_time(found[1])]
    held += [states_heat] if needs_heat else []
    return sum(held) / len(held) if held else None


_NUMERAL: Final = re.compile(r"[ivx]+")  # "Carrot Soup II"
_NO_OVEN: Final = frozenset(
    """
    bisque brine ceviche chili chowder chutney cocktail coleslaw cooler curry daiquiri drink eggnog
    fizz frosting fudge gazpacho goulash granita gravy guacamole gumbo icing jam jelly juice julep
    latte lemonade limeade linguine liqueur margarita marinade martini mayonnaise mein milkshake
    mojito noodle pickle popsicle preserve punch relish rub salad salsa sangria sauce seasoning
    shake sherbet shot slaw slush slushy smoothie sorbet soup spritzer stir-fry stroganoff syrup
    tabbouleh tea vinaigrette fried-rice hot-chocolate ice-cream whipped-cream
    """.split()  # noqa: SIM905
)
"""Dishes that are made without an oven: of 12,014 such recipes among 68,004 5 % heat one, soups and
salads most often, 8 %."""


def oven_fits(title: str, recipe: ParsedRecipe) -> float | None:
    """1.0 if a dish that is made without an oven heats none, 0.0 if it does; None for others.

    The dish is the last word or two of the title, or of its part before "with", "in" and the like.
    """
    dish = _PARTING.split(title.replace("-", " "))[0]  # "Beef Stir-Fry"
    words = [stem(word) for word in words_of(dish) if not _NUMERAL.fullmatch(word)]
    if not recipe.steps or _NO_OVEN.isdisjoint({*words[-1:], "-".join(words[-2:])}):
        return None
    return float(not any(map(_IN_OVEN.search, recipe.steps)))


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


_PARTING: Final = re.compile(r"\b(?:with|and|in|on|over|of|for|from)\b|[&,:;(/-]", re.IGNORECASE)
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
    first, *others = (words_of(part) for part in _PARTING.split(title))
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
