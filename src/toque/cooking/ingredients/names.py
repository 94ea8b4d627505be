"""Ingredient names without commas, head nouns, and a check for quantities."""

from __future__ import annotations

import re
from functools import lru_cache

from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.parser import parse_line
from toque.cooking.ingredients.segments import is_quality
from toque.cooking.ingredients.vocabulary import ADJECTIVES, PREPARED, SPELLINGS
from toque.cooking.normalised_words import ACTION_VERBS

_AT_WILL = re.compile(r"\b(?:to taste|as needed|as required)\b", re.IGNORECASE)
_JOINING = re.compile(r"\b(?:of|with|in|or|from)\b")
_JOINS = re.compile(r"(?:or|and|and/or) ")
_LISTED = re.compile(r"(?:\A| )and ", re.IGNORECASE)
_NO_LIST = re.compile(r"\bor\b|(?<=[a-z])ed\b", re.IGNORECASE)  # "corn, husks removed"
_WORD = re.compile(r"[^\W\d_]{2,}")
# "Fuji, Gala, or Honeycrisp apples"
_CHOICE = re.compile(
    r"(?:,[^,()]{2,30}){0,3},? or (?P<same>other )?(?P<other>[^,()]{3,60}?) ?(?= or |[,(]|\Z)"
)
_NO_FOODS = frozenset({"homemade", "prepared", "purchased", "store-bought"})
# The end of a name before a remark.
_SENTENCE = re.compile(r"(?<=[a-z]{3})[.!?] (?=[A-Z])")
_SIGNS = " .;:/<>*_#"
_NOT_IN_NAMES = re.compile(
    r"[\d%()\[\]{}½¼¾⅓⅔⅛⅜⅝⅞\"“”@?|~…=+\u2190-\u2bff\U0001f000-\U0001faff]"
)
# An adverb without its participle, or a unit that lost the space after it.
_NO_NAME = re.compile(
    r"(?:co[a-z]{1,3}se|fine|fresh|thin|thick|rough|light|firm|tight|loose)ly "
    r"(?![a-z]+(?:ed|en|ing)\b)"
    r"|(?:cups?|recipes?|teaspoons?|tablespoons?)(?!s?\b|cake|ful)[^\W\d_]"
)
_DASH = re.compile(r"- (?!(?:and|or|oder|to)\b)|''")
_OPEN_REMARKS = (
    " to ", " for ", " of ", " or ", " depending", " not", " per ", " gosto", " gusto", " goût",
    " smaak", " Geschmack",
)  # fmt: skip
_ADVERB = re.compile(r"(?!bar|jel|par|gado|treva)[a-z]{2,}ly")
MAX_NAME_WORDS = 7  # maximum number of words in a food's name in a prompt
# Units that also begin the name of a food: "rib eye", "cube steak", "leaf lettuce"
_UNIT_OR_FOOD = frozenset(
    "ball chunk clove cloves cube leaf pot rib ribs square stick strip".split()  # noqa: SIM905
)
_FOOD_OPENINGS = frozenset({"bottle gourd", "part skim", "pound cake"})
# Words of a remark about an ingredient. No food's name contains them.
_SENTENCE_WORDS = frozenset(
    """
    any anything are available be choice click could desired each enough favorite favourite
    following for has have here include includes is kind made may might need needs preferred
    reserved should similar something that to use used want was were whatever will would you you'll
    your yourself
    """.split()  # noqa: SIM905
)
# First words of a remark. No food's name begins with them.
_OPENINGS = frozenset(
    """
    about additional amount and any as assembly at by desired enough for from give if ingredients
    into instead my note of on one optionally or other pot remaining some special the through tip to
    whatever until with without your
    """.split()  # noqa: SIM905
)
# A measure that the parser leaves at the start of a name.
_MEASURE = re.compile(
    r"(?:(?:(?:a )?little bit|(?:good )?shakes?|glugs?|sq\.?|bowls?|rounds"
    r"|branch(?:es)?|bushels?|capfuls?|couple"
    r"|enough|fluid|hint|jiggers?|links?"
    r"|little(?! gem| neck| smok)|metric cups?|pecks?|pony|ponies|shots?"
    r"|(?:soup )?spoon(?:ful)?s?|thumb|twists?|wheels?|your fav(?:ou?rite)?"
    r"|any flavou?r)(?: of)? )++(?=[^\W\d_])",
    re.IGNORECASE,
)
# A remark after a name that the parser leaves there.
_PURPOSE = re.compile(
    r"(?<![Rr]eady) (?:(?:to|for) (?=[a-z])"
    r"|per (?:serving|person)\b|(?:a gosto|al gusto|au goût|naar smaak|nach Geschmack)\Z"
    r"|(?:of (?:your )?choice|depending|or (?:any|similar|something))\b|not\Z)"
)
_ORDERED = frozenset(
    "a all an in into it the to until with".split()  # noqa: SIM905
)
"""Words after a verb in a step: "Grind the spices"."""
_NO_ENDINGS = frozenset(
    """
    a add-ins and combined de di en fitted garnish in lid lids no of or pinch plus removed reserved
    toppings type typ van von with
    """.split()  # noqa: SIM905
)
# Last words of inedible things.
_TOOLS = frozenset(
    """
    bowl briquettes charcoal chopsticks cutter dish foil freezer grill jars machine nail oven pan
    pans parchment picks platter pot rack skewers skillet sticks straws string thermometer thermos
    toothpicks
    """.split()  # noqa: SIM905
)
_EDIBLE_TOOLS = frozenset(
    """
    bread candy carrot celery cheese chocolate cinnamon crab fish mozzarella peppermint pretzel
    """.split()  # noqa: SIM905
)
"""Words before a tool that make it a food: "cinnamon sticks"."""


@lru_cache(maxsize=1 << 16)
def ingredient_name(line: str) -> str:
    """Return the food of an ingredient line, without quantity, unit, preparation or commas.

    >>> ingredient_name("1 Turkish or 1/2 California bay leaf")
    'Turkish bay leaf'
    """
    name = one_name(parse_line(line).name)
    if " or " in line and " " not in name:
        name = _with_noun_of_choice(name, line)
    if measure := _MEASURE.match(name):
        name = name[measure.end() :]
    if any(map(name.__contains__, _OPEN_REMARKS)):
        name = _PURPOSE.split(name, maxsplit=1)[0]
    if ". " in name or "! " in name or "? " in name:
        return _SENTENCE.split(name, maxsplit=1)[0].strip(_SIGNS) or name
    return name.strip(_SIGNS) or name


def is_clean_name(name: str) -> bool:
    """Check that a name is only a food, without an amount, a unit or a sentence.

    >>> is_clean_name("olive oil"), is_clean_name("Other seasonings may include pepper")
    (True, False)
    """
    words = name.casefold().split()
    if not words or len(words) > MAX_NAME_WORDS or _NOT_IN_NAMES.search(name):
        return False
    if name[-1] == "!" or _NO_NAME.match(name):
        return False
    if not name.isalpha() and _DASH.search(name):
        return False
    first, last = words[0], words[-1]
    is_unit = first in SPELLINGS and first not in _UNIT_OR_FOOD
    if is_unit and " ".join(words[:2]) not in _FOOD_OPENINGS:
        return False
    if first in PREPARED and words[1:2] in (["and"], ["or"]):
        return False  # "sliced and almonds"
    if first in _OPENINGS or last in _NO_ENDINGS:
        return False
    if first in ACTION_VERBS and not _ORDERED.isdisjoint(words[1:2]):
        return False  # "Grind the spices"
    if last in _TOOLS and _EDIBLE_TOOLS.isdisjoint(words):
        return False
    if all(map(ADJECTIVES.__contains__, words)):
        return False  # "boneless"
    if len(words) == 1 and _ADVERB.fullmatch(first):
        return False  # "optionally"
    return _SENTENCE_WORDS.isdisjoint(words[1:])


def _with_noun_of_choice(name: str, line: str) -> str:
    """Add the noun after the alternative to a name of one word: "Turkish or ... bay leaf"."""
    start = line.find(name)
    choice = _CHOICE.match(line, start + len(name))
    if choice is None or (start == 0 and not choice["same"]):
        return name
    if is_quality(name) or name in _NO_FOODS:  # "fresh or 1 pound frozen rhubarb"
        return one_name(parse_line(line[choice.start("other") :]).name)
    *before, last = one_name(parse_line(choice["other"]).name).split()
    if not name[0].isupper() or not before or not last.islower():
        return name
    noun = [last]
    capitalised = [n for n, word in enumerate(before) if word[0].isupper()]
    if capitalised:  # "bay leaf" of "California bay leaf"
        noun = [*before[capitalised[-1] + 1 :], last]
    return f"{name} {' '.join(noun)}"


def one_name(name: str) -> str:
    """Return a name without commas: the first food of a choice, every food of a list."""
    if "," not in name:
        return name
    parts = name.split(",")
    foods = [p.strip() for p in parts if not all(map(is_quality, p.lower().split()))]
    _, _, rest = name.partition(",")
    if len(foods) > 1 and _LISTED.search(parts[-1]) and not _NO_LIST.search(rest):
        return " and ".join(food.removeprefix("and ") for food in foods)
    candidates = (*foods, parts[-1].strip(), name.replace(",", " ").strip())
    food = next(filter(None, candidates), "")
    joining = _JOINS.match(food)
    return food[joining.end() :] if joining else food


@lru_cache(maxsize=1 << 16)
def head_of_line(line: str) -> str:
    """Return the head noun of an ingredient line's food, singular and in lower case."""
    return head_noun(ingredient_name(line))


@lru_cache(maxsize=1 << 15)
def head_noun(name: str) -> str:
    """Return the head noun of an ingredient's name, singular and in lower case."""
    words = _WORD.findall(_JOINING.split(name.casefold(), maxsplit=1)[0])
    words = words or _WORD.findall(name.casefold())
    return stem(words[-1]) if words else ""


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Return the singular of an English noun in lower case, accurate enough to compare texts."""
    if len(word) < 4 or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-3] + "y"
    if word.endswith(("eaves", "oaves", "alves", "elves")):
        return word[:-3] + "f"
    if word.endswith(("oes", "ches", "shes", "sses", "xes")):
        return word[:-2]
    return word.removesuffix("s")


@lru_cache(maxsize=1 << 14)
def forms(noun: str) -> frozenset[str]:
    """Return all words that have this singular noun as their `stem`."""
    # The inverse of each rule of `stem`.
    candidates = {noun, noun + "s", noun + "es", noun[:-1] + "ies", noun[:-1] + "ves"}
    return frozenset(word for word in candidates if stem(word) == noun)


@lru_cache(maxsize=1 << 16)
def forms_in_line(line: str) -> frozenset[str]:
    """Return all forms of the head noun of an ingredient line's food."""
    return forms(head_of_line(line))


@lru_cache(maxsize=1 << 16)
def has_quantity(line: str) -> bool:
    """Check for an amount (a number, a fraction, "a pinch of" or "to taste") of a named food."""
    parsed = parse_line(line)
    if not (parsed.amounts or _AT_WILL.search(line)):
        return False
    return any(word not in WORDS for word in _WORD.findall(parsed.name.casefold()))
