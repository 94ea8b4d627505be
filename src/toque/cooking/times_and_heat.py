"""Scores of times, temperatures and the use of an oven in the steps of a recipe."""

from __future__ import annotations

import re
from itertools import zip_longest

from toque.cooking.ingredients.names import stem
from toque.cooking.normalised_words import parts_of_title, words_of
from toque.cooking.plausible_amounts import check_times
from toque.cooking.recipe import ParsedRecipe

OVEN_CELSIUS = (50.0, 300.0)
"""Plausible oven temperatures in degrees Celsius."""
OVEN_FAHRENHEIT = (120.0, 575.0)
"""Plausible oven temperatures in degrees Fahrenheit."""

# Matches "simmer the beans", but not "a baking sheet" or "bring to a boil"
_TAKES_TIME = re.compile(
    r"(?:^|[.;:,!)]\s*+|\b(?:and|then|or|let)\s++)(?:bake|roast|simmer|boil|braise|poach|steam"
    r"|chill|refrigerate|freeze|marinate|broil|microwave|soak)\b",
    re.IGNORECASE,
)
_SAYS_WHEN = re.compile(
    r"(?:\b|(?<=\d))(?:minutes?|mins?|hours?|hrs?|seconds?|secs?|days?|weeks?|moments?)\b"
    r"|\b(?:overnight|night|until|till|immediately|when|while|before|if|ready|done|needed|desired"
    r"|use|serving|package|box|label|directed|directions)\b",
    re.IGNORECASE,
)
"""Times, and other descriptions of a duration: "until", "overnight", "as directed"."""
_IN_OVEN = re.compile(
    r"(?<!microwave )(?<!dutch )(?<!toaster )\boven\b|(?:^|[.;:,!)]\s*+|\b(?:and|then)\s++)bake\b",
    re.IGNORECASE,
)
_HEAT = re.compile(
    r"(?<!\d)(\d++)(?:\s?(?:°|º|degrees?\b|deg\b)\s?([fc])?|\s?([fc])\b)"
    r"|\b(?:oven|bake|roast|preheat)\b[^.;\d]{0,40}?\b(?:to|at|oven) (\d{3})"
    r"(?!\d| ?[°ºdmg]| ?[fc]\b)",  # "bake at 350"
    re.IGNORECASE,
)
_OTHER_HEAT = re.compile(
    r"\bbroil|\bgas mark\b|\bas directed\b|\bdirections\b|\binstructions\b|\bpackage\b|\bbox\b"
    r"|\b(?:moderate|hot|slow|warm|low|cool|medium|high)\b(?: \w+)? oven",
    re.IGNORECASE,
)
"""Oven temperatures without a number."""


def times_and_heat(recipe: ParsedRecipe) -> float | None:
    """Compute the fraction of present and plausible times and temperatures, or None without any.

    A step that bakes, simmers, chills and so on needs a duration, in the step or in the next step.
    A recipe with an oven needs a temperature. Every oven temperature must be within `OVEN_CELSIUS`
    or `OVEN_FAHRENHEIT` (in one of them if it has no unit). Every time must be plausible as in
    `plausible_amounts`.
    """
    verdicts: list[bool] = []
    needs_heat = has_heat = False
    for step, next_step in zip_longest(recipe.steps, recipe.steps[1:], fillvalue=""):
        if _TAKES_TIME.search(step):
            verdicts.append(_SAYS_WHEN.search(f"{step} {next_step}") is not None)
        heats = _HEAT.findall(step)
        has_heat |= bool(heats) or _OTHER_HEAT.search(step) is not None
        if _IN_OVEN.search(step):
            needs_heat = True
            verdicts += [_fits_oven(*heat) for heat in heats]
        verdicts += check_times(step)
    if needs_heat:
        verdicts.append(has_heat)
    return sum(verdicts) / len(verdicts) if verdicts else None


def _fits_oven(degrees: str, sign: str, letter: str, bare_number: str) -> bool:
    """Check a temperature, given by the groups of `_HEAT`. Without a unit, both scales count."""
    scale = (sign or letter).lower()
    low = OVEN_FAHRENHEIT[0] if scale == "f" else OVEN_CELSIUS[0]
    high = OVEN_CELSIUS[1] if scale == "c" else OVEN_FAHRENHEIT[1]
    return low <= float(degrees or bare_number) <= high


_NUMERAL = re.compile(r"[ivx]+")  # "Carrot Soup II"
_NO_OVEN = frozenset(
    """
    bisque brine ceviche chili chowder chutney cocktail coleslaw cooler curry daiquiri drink eggnog
    fizz frosting fudge gazpacho goulash granita gravy guacamole gumbo icing jam jelly juice julep
    latte lemonade limeade linguine liqueur margarita marinade martini mayonnaise mein milkshake
    mojito noodle pickle popsicle preserve punch relish rub salad salsa sangria sauce seasoning
    shake sherbet shot slaw slush slushy smoothie sorbet soup spritzer stir-fry stroganoff syrup
    tabbouleh tea vinaigrette fried-rice hot-chocolate ice-cream whipped-cream
    """.split()  # noqa: SIM905
)
"""Dishes that usually need no oven. Of 12,014 such dishes among 68,004 recipes, 5 % need an oven;
of soups and salads, 8 %.
"""


def oven_fits(title: str, recipe: ParsedRecipe) -> float | None:
    """Score the use of an oven: 0.0 if a dish of `_NO_OVEN` uses one, else 1.0.

    None for any other dish. The dish is the end of the title, or of its part before "with" or "in".
    """
    dish = parts_of_title(title.replace("-", " "))[0]  # "Beef Stir-Fry"
    words = [stem(word) for word in words_of(dish) if not _NUMERAL.fullmatch(word)]
    if not recipe.steps or _NO_OVEN.isdisjoint({*words[-1:], "-".join(words[-2:])}):
        return None
    return float(not any(map(_IN_OVEN.search, recipe.steps)))
