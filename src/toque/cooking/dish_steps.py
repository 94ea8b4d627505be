"""Scores of how the steps of a recipe fit the dish in its title."""

from __future__ import annotations

import re
from typing import Final

from toque.cooking.ingredients.names import stem
from toque.cooking.labels.features import line_facts
from toque.cooking.normalised_words import parts_of_title, words_of
from toque.cooking.recipe import ParsedRecipe

_NUMERAL: Final = re.compile(r"[ivx]+")  # "Carrot Soup II"
_STEP_WORDS: Final = {
    dish: frozenset(words.split())
    for dish, words in {
        "ball": "ball roll",
        "bar": "bar cut pan square",
        "biscuit": "biscuit dough drop",
        "bread": "batter bread dough loaf",
        "browny": "bake pan",
        "burger": "burger patty",
        "burrito": "tortilla",
        "cake": "batter cake pan",
        "casserole": "bake casserole dish",
        "cheesecake": "batter crust filling pan springform",
        "chowder": "boil pot saucepan simmer",
        "cocktail": "glass ice pitcher shake shaker",
        "cooky": "sheet",
        "crepe": "batter crepe skillet",
        "crisp": "bake",
        "cupcake": "cup cupcake liner muffin",
        "dip": "blend combine dip mix process stir",
        "donut": "dough fry",
        "dressing": "blend combine dressing mix shake stir whisk",
        "dumpling": "dough drop dumpling fill",
        "enchilada": "tortilla",
        "frosting": "beat cream",
        "fudge": "boil pan square",
        "kabob": "skewer",
        "kebab": "skewer",
        "lasagna": "layer noodle",
        "meatball": "ball meatball",
        "meatloaf": "loaf pan",
        "muffin": "muffin",
        "omelet": "egg",
        "pancake": "batter griddle pancake skillet",
        "pie": "crust pastry pie",
        "pizza": "crust dough pizza",
        "pudding": "pudding",
        "punch": "bowl ice pitcher punch",
        "quesadilla": "tortilla",
        "ravioli": "ravioli",
        "roll": "dough roll",
        "salad": "bowl combine mix salad toss",
        "salsa": "combine mix salsa stir toss",
        "sandwich": "bread bun roll sandwich slice",
        "sauce": "sauce stir whisk",
        "scone": "dough scone",
        "skewer": "skewer",
        "smoothie": "blend blender",
        "soup": "boil broth pot saucepan simmer soup",
        "steak": "grill skillet steak",
        "stew": "cooker pot simmer stew",
        "stuffing": "bread stuffing",
        "taco": "shell taco tortilla",
        "tart": "crust pastry shell tart",
        "toast": "bread toast",
        "truffle": "ball",
        "waffle": "iron waffle",
        "wrap": "tortilla wrap",
    }.items()
}
"""Stems of which the steps of a dish contain at least one. 34,000 recipes were counted: nearly all
recipes of a dish contain one, and few other recipes do.
"""
_METHODS: Final = {
    "baked": re.compile(r"\b(?:bak|oven)"),
    "braised": re.compile(r"\b(?:brais|simmer|oven|cover|cook)"),
    "creamed": re.compile(r"\bcream"),
    "fried": re.compile(r"\b(?:fry|fri|oil|skillet|wok)"),
    "glazed": re.compile(r"\b(?:glaz|brush)"),
    "grilled": re.compile(r"\b(?:grill|broil|charcoal)"),
    "mashed": re.compile(r"\bmash"),
    "poached": re.compile(r"\b(?:poach|simmer)"),
    "roasted": re.compile(r"\b(?:roast|oven)"),
    "sauteed": re.compile(r"\b(?:saut|skillet|pan)"),
    "smoked": re.compile(r"\bsmok"),
    "stuffed": re.compile(r"\b(?:stuff|fill|spoon)"),
}
"""Words of the steps for each method in a title. A smoked food may also be an ingredient."""
_NEEDS_HEAT: Final = re.compile(
    r"\b(?:beef|chicken|clam|egg noodle|fish|lamb|mussel|pasta|pork|potato|rice|salmon|sausage"
    r"|shrimp|turkey|veal)\b"
)
_BAKED: Final = frozenset(
    """
    bar biscuit bread browny cake casserole cobbler cooky crisp cupcake donut lasagna loaf meatball
    meatloaf muffin pancake pizza roast scone souffle waffle
    """.split()  # noqa: SIM905
)
_CHILLS: Final = re.compile(r"\b(?:chill|freez|refrigerat)")
_BOUGHT_COOKED: Final = re.compile(
    r"\b(?:cooked|canned|can|smoked|rotisserie|leftover|deli)\b"
)
_HEATS: Final = re.compile(
    r"\b(?:cook|bak|fry|fri|heat|hot|simmer|boil|roast|broil|grill|brown|saut|microwav|steam|oven"
    r"|toast|poach|sear|smok|warm)"
)


def dish_of_title(title: str) -> str:
    """Return the stem of the last word of a title's dish: "cooky" of "Oat Cookies with Nuts"."""
    dish = parts_of_title(title.replace("-", " "))[0]
    words = [stem(word) for word in words_of(dish) if not _NUMERAL.fullmatch(word)]
    return words[-1] if words else ""


def dish_made(title: str, recipe: ParsedRecipe) -> float | None:
    """Score whether the steps make the dish in the title by the method in the title.

    1.0 if they contain a word of each, 0.5 for one of two, 0.0 for none. None if the title names no
    known dish or method.
    """
    text = " ".join(recipe.steps).lower()
    stems = {stem(word) for word in words_of(text)}
    verdicts = []
    if words := _STEP_WORDS.get(dish_of_title(title)):
        verdicts.append(not words.isdisjoint(stems))
    in_list = set(words_of(" ".join(recipe.ingredients)))
    methods = (_METHODS.keys() & set(words_of(title))) - in_list
    verdicts += [_METHODS[method].search(text) is not None for method in methods]
    return sum(verdicts) / len(verdicts) if verdicts else None


def food_cooked(title: str, recipe: ParsedRecipe) -> float | None:
    """Score 0.0 if the steps heat nothing although they must, else 1.0.

    They must if the dish is baked, or if the recipe lists raw meat, fish, pasta, rice or potatoes.
    None for any other recipe, and for one that is chilled instead.
    """
    in_list = " ".join(recipe.ingredients).lower()
    foods = [line_facts(line).food for line in recipe.ingredients]
    is_raw = not _BOUGHT_COOKED.search(in_list) and any(
        food and _NEEDS_HEAT.search(food.name) for food in foods
    )
    text = " ".join(recipe.steps).lower()
    is_baked = dish_of_title(title) in _BAKED and not _CHILLS.search(text)
    if not (is_raw or is_baked):
        return None
    return float(_HEATS.search(text) is not None)
