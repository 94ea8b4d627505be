"""Scores of the times that steps say and of the oven they heat."""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Final

from toque.cooking.ingredients.names import stem
from toque.cooking.plausible_amounts import sane_times
from toque.cooking.recipe import ParsedRecipe
from toque.cooking.text_keys import parts_of_title, words_of

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
    `OVEN_CELSIUS` or `OVEN_FAHRENHEIT` (in either, where no unit is named), times as in
    `plausible_amounts`.
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
        held += sane_times(step)
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
    dish = parts_of_title(title.replace("-", " "))[0]  # "Beef Stir-Fry"
    words = [stem(word) for word in words_of(dish) if not _NUMERAL.fullmatch(word)]
    if not recipe.steps or _NO_OVEN.isdisjoint({*words[-1:], "-".join(words[-2:])}):
        return None
    return float(not any(map(_IN_OVEN.search, recipe.steps)))
