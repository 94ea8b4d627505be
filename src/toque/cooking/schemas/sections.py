"""Section names and equipment among scraped ingredients: they are removed and counted by reason.

A prompt would request "Special equipment: a thermometer", "Garnish: lemon wedges" and "FILLING" as
foods. Every pattern is anchored. A record never loses its last ingredient.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Final

from toque.cooking.ingredients.names import head_noun, ingredient_name, stem
from toque.cooking.labels.foods import find_food
from toque.cooking.normalised_words import words_of
from toque.cooking.schemas.credits import is_credit, is_note, is_shopping_note
from toque.cooking.schemas.headings import PART_NOUNS

SECTIONS: Final = "section names among the ingredients removed"
BEFORE_FOOD: Final = "section names before an ingredient removed"
EQUIPMENT: Final = "equipment among the ingredients removed"
SHOPPING: Final = "shopping notes among the ingredients removed"
CREDITS: Final = "credits among the ingredients removed"
NOTES: Final = "notes among the ingredients removed"

# Maximum characters of a tool; longer lines are misplaced steps.
_MOST_CHARS: Final = 90
_MAX_HEADING_CHARS: Final = 40
_MIN_MEASURED: Final = 3  # minimum lines with a number in a list with headings
_MIN_CAPITALS: Final = 5  # minimum letters of a heading in capitals: "EVOO" is oil
_MIN_DISH_WORDS: Final = 3  # minimum words of a line that repeats words of the title
# Parts of a dish in headings of ingredients or steps.
SECTION_NOUNS: Final = PART_NOUNS | frozenset(
    "crumble decoration fillings garnishes layer presentation ragout rub sauces toppings".split()  # noqa: SIM905
)
# A line that names no food, even if no other line has an amount.
_ALWAYS: Final = re.compile(
    r"(?:(?:optional|suggested|possible|additional|other|serving|dry|wet|main|mix) ){0,3}"
    r"(?:garnish(?:es)?|accompaniments?|decorations?|toppings|ingredients|add-?ins"
    r"|mix-?ins|options|serve with .{2,60}|(?:to|for) (?:serve|serving|garnish|finish|assemble))"
    r"(?: (?:ingredients|options))?(?: if desired| \(optional\)|, optional)?\W*",
    re.IGNORECASE,
)
_PREFIX: Final = re.compile(
    r"(?:(?:optional|suggested|serving) )?(?:garnish(?:es)?|accompaniments?|decorations?|toppings?"
    r"|optioneel|optional|facultatif|facultativo|opcional|for serving|to serve|for garnish"
    r"|to garnish|serving suggestions?)"
    r"(?: if desired| \(optional\))?(?: ?:| -) ?(?=[\w(])",
    re.IGNORECASE,
)
_PART_PREFIX: Final = re.compile(r"([A-Za-z][A-Za-z' -]{2,40}): ?(?=\d|[½¼¾⅓⅔⅛])")
_TOOLS: Final = re.compile(
    r"(?:special |optional |additional |suggested |recommended |kitchen ){0,2}"
    r"(?:equipment|tools|utensils|supplies|accesorios|utensilios|zubehör)"
    r"(?: needed| required| \(optional\))? ?(?::|-|\Z)",
    re.IGNORECASE,
)

# Last words of inedible things.
_SURELY: Final = frozenset(
    """
    blender charcoal cheesecloth colander foil grinder knife mandolin mandoline mixer mortar
    parchment peeler pestle pushpin ramekin ricer saucepan scraper shaker sieve skillet slicer
    soupspoon spatula stirrer strainer thermometer toothpick torch twine umbrella whisk wok zester
    """.split()  # noqa: SIM905
)
# Last words of inedible things unless a food is named: "rice paper", "chicken skewers"
_WITHOUT_FOOD: Final = frozenset(
    {
        "cutter",
        "liner",
        "machine",
        "maker",
        "mold",
        "mould",
        "paper",
        "skewer",
        "string",
    }
)
_PAIRS: Final[dict[str, frozenset[str]]] = {
    noun: frozenset(words.split())
    for noun, words in {
        "bag": "brown freezer oven paper pastry piping plastic resealable roasting storage top zip "
        "ziploc ziplock",
        "basket": "fryer frying grilling steamer",
        "bowl": "large medium mixing salad serving shallow small",
        "brush": "basting pastry",
        "chip": "applewood cherrywood hickory mesquite wood",
        "cooker": "pressure slow rice",
        "cup": "baking muffin paper liner cupcake",
        "cutter": "biscuit cookie",
        "dish": "baking casserole gratin serving",
        "glove": "latex plastic rubber",
        "jar": "canning glass mason quart pint",
        "lid": "canning jar",
        "liner": "cupcake muffin paper",
        "mill": "food pepper spice",
        "pan": "aluminum baking bundt cake frying grill loaf muffin nonstick pie roasting sauce"
        " sheet springform tart tube",
        "pick": "cocktail decorative",
        "pin": "rolling",
        "plank": "cedar wood wooden",
        "plate": "dinner pie serving",
        "pot": "heavy large soup stock",
        "processor": "food",
        "rack": "cooling roasting wire",
        "sheet": "baking cookie",
        "stick": "craft lollipop pop popsicle wooden",
        "tin": "cake loaf muffin tart",
    }.items()
}
_TOOL_WORDS: Final = frozenset(
    form
    for noun in (_SURELY | _WITHOUT_FOOD | _PAIRS.keys())
    for form in (noun, noun + "s", noun + "es", noun[:-1] + "ves", noun[:-2] + "ves")
)


def without_sections(
    lines: tuple[str, ...], notes: Counter[str], *, title: str = "", steps: str = ""
) -> tuple[str, ...]:
    """Remove headings and equipment from clean ingredient lines and count them in `notes`.

    A line is also a heading if the title has every word of it, or if the text of the `steps`
    contains the line as a heading.
    """
    if not lines:
        return lines
    removal_counts: Counter[str] = Counter()
    food_lines: list[str] = []
    is_measured = sum(any(map(str.isdigit, line)) for line in lines) >= _MIN_MEASURED
    in_capitals = 2 * sum(map(str.isupper, lines)) > len(lines)
    title_stems = frozenset(map(stem, words_of(title)))

    among_tools = False  # true below a line such as "Equipment:"
    for line, following in zip(lines, (*lines[1:], ""), strict=True):
        if not among_tools and _is_plain(line):  # most lines, and many of them repeat
            food_lines.append(line)
            continue

        is_tool = _TOOLS.match(line) is not None or _is_tool(line)
        if is_tool or (among_tools and find_food(ingredient_name(line)) is None):
            among_tools |= _TOOLS.fullmatch(line) is not None
            removal_counts[EQUIPMENT] += 1
            continue

        is_heading = _ALWAYS.fullmatch(line) is not None
        # Without amounts, every line may look like a heading.
        if following and is_measured and not is_heading:
            is_heading = _is_heading(line, title_stems, steps, in_capitals=in_capitals)
        if is_heading:
            among_tools = False
            removal_counts[SECTIONS] += 1
        elif why := _why_removed(line):
            removal_counts[why] += 1
        else:
            among_tools = False
            food_lines += _without_prefix(line, removal_counts)

    if not food_lines:
        return lines
    notes.update(removal_counts)
    return tuple(food_lines)


def _is_heading(
    line: str, title_stems: frozenset[str], steps: str, *, in_capitals: bool
) -> bool:
    """Return whether a line without a number only names the dish or a part of the dish.

    If most lines are `in_capitals`, capitals do not mark a heading.
    """
    if any(map(str.isdigit, line)):
        return False
    if (
        " " in line and f"{line}:" in steps
    ):  # "Pie crust", and a step "Pie crust: Mix ..."
        return True
    words = words_of(line)
    if not words or len(line) > _MAX_HEADING_CHARS:
        return False
    names_dish = title_stems.issuperset(map(stem, words))
    if names_dish and len(words) >= _MIN_DISH_WORDS:  # "Peach cream tart"
        return True
    if len(words) == 1 and words[0] in SECTION_NOUNS:  # "Filling"
        return line[:1].isupper()
    # "CHEESE FILLING" and "GRANDMA'S", not "LEMON SUGAR" or "EVOO"
    if in_capitals or not line.isupper() or sum(map(len, words)) < _MIN_CAPITALS:
        return False
    return names_dish or words[-1] in SECTION_NOUNS or find_food(line) is None


@lru_cache(maxsize=1 << 15)
def _is_plain(line: str) -> bool:
    """Return whether a line begins with a number, is not a tool, and has no prefix or note."""
    if not line[:1].isdigit() or _TOOLS.match(line) or _ALWAYS.fullmatch(line):
        return False
    has_prefix = _PREFIX.match(line) or _PART_PREFIX.match(line)
    return not (has_prefix or _is_tool(line) or _why_removed(line))


@lru_cache(maxsize=1 << 15)
def _why_removed(line: str) -> str:
    """Return the note on a line that is not an ingredient, or "" for an ingredient."""
    if is_shopping_note(line):
        return SHOPPING
    if is_credit(line):
        return CREDITS
    return NOTES if is_note(line) else ""


@lru_cache(maxsize=1 << 15)
def _is_tool(line: str) -> bool:
    """Return whether a line names a tool, based on the head noun or last word of its name."""
    # Few lines contain such a word. Parsing all lines took a tenth of the time to read a recipe.
    if len(line) > _MOST_CHARS or _TOOL_WORDS.isdisjoint(words_of(line)):
        return False
    name = ingredient_name(line)
    head = head_noun(name)
    words = [stem(word) for word in words_of(name)]
    # "a sharp knife" and "a 9-inch cake pan"
    if head in _SURELY or _is_tool_pair(words, head):
        return True
    # "kitchen string"; in "wooden or metal skewers" only the last word names the tool.
    ends = {head, *words[-1:]}
    return not ends.isdisjoint(_WITHOUT_FOOD | _SURELY) and find_food(name) is None


def _is_tool_pair(words: list[str], head: str) -> bool:
    """Return whether a head noun and the word before it name a tool, such as "muffin tin"."""
    before_head = words[: words.index(head)] if head in words else []
    return bool(before_head) and before_head[-1] in _PAIRS.get(head, ())


def _without_prefix(line: str, removal_counts: Counter[str]) -> list[str]:
    """Return the foods of a line after a prefix such as "Garnish:", and count the prefix."""
    prefix = _PREFIX.match(line)
    part = _PART_PREFIX.match(line)
    if prefix:
        foods = [text.strip() for text in line[prefix.end() :].split(";")]
        foods = [food for food in foods if food]
    elif part and words_of(part[1])[-1] in SECTION_NOUNS:
        foods = [line[part.end() :]]
    else:
        return [line]
    removal_counts[BEFORE_FOOD] += 1
    return foods
