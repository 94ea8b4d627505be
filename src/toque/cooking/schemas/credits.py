"""Credits, notices and headings among scraped steps: removed, each counted with its reason.

"Photograph by ...", "Adapted from ...", "Recipe courtesy of ...", "Healthy Dish of the Day",
"Watch Now", nutrition facts and "*Available at Asian markets" are what a page prints beside its
steps. Every pattern is anchored at the beginning of a line and every repetition in it is bounded.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Final

from toque.cooking.action_verbs import VERB_FORMS, has_action_verb
from toque.cooking.text_keys import words_of

CREDITS: Final = "credits among the steps removed"
NOTICES: Final = "notices of the page among the steps removed"
NUTRITION: Final = "nutrition facts among the steps removed"
SHOPPING: Final = "shopping notes among the steps removed"
HEADINGS: Final = "step lines that only say Step 1, Method or the like"
PARTS: Final = "section names joined to their step"

MOST_CHARS: Final = 300
"""Longest credit or note; a longer line is left alone."""
_OPEN: Final = r"[\W_]{0,4}"
_CREDIT: Final = re.compile(
    rf"{_OPEN}(?:notes?: )?(?:"
    r"(?:photo(?:s|graphs?|graphy)?|images?|pictures?|illustrations?|text|video)"
    r"(?: and (?:recipe|photos?|photographs?|text|styling))?"
    r"(?: credits?\b| courtesy\b|s? copyright\b| by\b|s? ?:| ?©)"
    r"|(?:food |prop |set )?(?:styling|stylists?|styled) ?(?:by\b|:)"
    r"|recipes? (?:courtesy|credits?|source|by|from|copyright|adapted|reprinted|excerpted|inspired"
    r"|created|contributed|submitted|provided|developed|shared|posted|©)\b(?! hand\b)"
    r"|(?:\w{1,20} ){0,3}adapted from\b"
    r"|(?:this |the |these )?(?:recipes? )?(?:is |was |were |has been )?"
    r"(?:slightly |loosely |freely |very )?"
    r"(?:adapted (?:slightly |loosely |with permission )?from|adapted by|reprinted (?:from|with|by)"
    r"|excerpted (?:from|with)|reproduced (?:from|with|by)|inspired by"
    r"|originally (?:published|printed|appeared))\b"
    r"|(?:this |the )recipe (?:\w{1,20} ){0,6}(?:courtesy|permission|adapted|reprinted|contributed"
    r"|submitted|provided|appeared|comes from|comes to us"
    r"|was (?:created|developed|given|written))\b"
    r"|courtesy (?:of\b|:)|(?-i:Courtesy [A-Z])"
    r"|from the (?:kitchens?|files?|recipe box|cookbook|book|blog|archives?|pages?) of\b"
    r"|from (?:the )?(?:cook)?book\b|(?:recipe )?source ?:|credits? ?:|(?:recipe )?author ?:"
    r"|copyright\b|©|\(c\) ?\d{4}|all rights reserved|published (?:by|in)\b"
    r"|printed (?:in|from|with permission)\b|(?:submitted|contributed|posted) by\b"
    r")",
    re.IGNORECASE,
)
_CREDIT_WORDS: Final = frozenset(
    """
    photo photos photograph photographs photography image images picture pictures illustration
    illustrations text video styling stylist stylists styled recipe recipes adapted reprinted
    excerpted reproduced inspired originally courtesy kitchen kitchens file files book cookbook
    blog archives pages source credit credits author copyright c rights published printed
    submitted contributed posted
    """.split()  # noqa: SIM905
)
_WITHIN: Final = re.compile(
    r"[.!?)\"”’] (?=(?:Photo(?:graph(?:s|y)?|s)? (?:by|courtesy|credit)"
    r"|Recipes? (?:courtesy|by|adapted|reprinted) |Adapted from |Reprinted (?:from|with) "
    r"|Excerpted from |Courtesy of |Copyright |©|From the (?:kitchen|book|cookbook) of ))"
)
"""The end of a sentence before a credit that goes on to the end of the step."""
_BUTTON: Final = re.compile(r"[.!?)] (?:Watch|WATCH) (?:Now|NOW|the video)\W*\Z")
_NOTICE: Final = re.compile(
    rf"{_OPEN}(?:(?:[\w'-]{{1,20}} ){{0,4}}(?:dish|recipe|meal|cocktail|dessert|drink|tip) of the "
    r"(?:day|week|month|year)\b.{0,40}"
    r"|watch (?:now|the video|this video|video|how to make.{0,80})|(?:print|save|rate|share|pin)"
    r"(?: this| the)? recipe|pin it|read more|view recipe|get (?:the|this) recipe|advertisement"
    r"|click here.{0,80}|your nightly specials|/?epi-\w+>?)[\W_]{0,4}",
    re.IGNORECASE,
)
_NOTICE_WORDS: Final = frozenset(
    "of watch print save rate share pin read view get advertisement click nightly epi".split()  # noqa: SIM905
)
_NUTRITION: Final = re.compile(
    rf"{_OPEN}(?:(?:one|each|per|a|1) serving(?: contains| provides| has)?\b|(?:the )?(?:skinny )?"
    r"nutrition(?:al)?(?: (?:info|information|facts|analysis|content|values?|data))?\b|amount per"
    r"|approximate (?:analysis|nutrition)|(?:about )?\d{2,4} (?:calories|kcal|cal)\b"
    r"|calories(?: per serving)? ?[:(=]? ?\d|per (?:cookie|slice|piece|muffin|portion)\b)",
    re.IGNORECASE,
)
_FIGURE: Final = re.compile(
    r"\d ?(?:g|mg|grams?|kcal|cal|calories|%)\b|(?:calories|cholesterol|sodium|fat) ?[:(]? ?\d",
    re.IGNORECASE,
)
_NUTRIENTS: Final = frozenset(
    "calories kcal cal fat protein sodium cholesterol carbohydrate carbs".split()  # noqa: SIM905
)
_FOR_SALE: Final = re.compile(
    r"\b(?:available|sold|found) (?:(?:only|widely|seasonally|online) )?"
    r"(?:at|in|from|by mail|online|through)\b",
    re.IGNORECASE,
)
_INFO: Final = re.compile(rf"{_OPEN}ingredient (?:info|tips?|notes?) ?:", re.IGNORECASE)
_OPENS_NOTE: Final = re.compile(rf"\*|{_OPEN}(?:available|sold|found) ", re.IGNORECASE)
_SALE_WORDS: Final = frozenset({"available", "sold", "found", "info", "tip"})
_BARE: Final = frozenset(
    """
    ingredients|ingredient|procedure|cooking directions|cooking instructions|cooking method|how to
    make|how to make it|how to prepare|how to cook|preparation method|preparation instructions
    |preparation steps|method of preparation|directions for preparation|zubereitung|préparation
    |preparación|preparazione|procedimento|procedimiento|bereiding|bereidingswijze|tillagning
    |modo de preparo|fremgangsmåde|przygotowanie|elaboración|instruções|instruktioner|realisation
    |réalisation|la préparation|la recette|so geht's|die zubereitung|let's cook|recipe
    """.replace("\n", " ")
    .replace("  ", "")
    .strip()
    .split("|")
)
"""Lines that only announce steps, beside those of `cleaning`."""
_PART_NOUNS: Final = frozenset(
    """
    assembly base batter brine cake cakes crepes crust custard dough dressing filling frosting
    garnish glaze icing marinade meatballs pastry sauce streusel stuffing topping vinaigrette
    """.split()  # noqa: SIM905
)
_FOR_THE: Final = re.compile(r"(?:for|to make) (?:the )?[a-z][a-z '&-]{2,32}", re.IGNORECASE)
_ANNOUNCED: Final = _BARE | {"directions", "instructions", "method", "preparation", "steps"}
_BARE_WORDS: Final = frozenset(word for bare in _ANNOUNCED for word in words_of(bare)[-1:])
_SUSPECTS: Final = _CREDIT_WORDS | _NOTICE_WORDS | _NUTRIENTS | _SALE_WORDS | _BARE_WORDS
_SHORT: Final = 40


def is_credit(line: str) -> bool:
    """Whether a whole line says who wrote, cooked or photographed something.

    >>> [is_credit(x) for x in ("Photograph by Ann Lee", "Adapt the heat to your oven.")]
    [True, False]
    """
    return len(line) <= MOST_CHARS and _CREDIT.match(line) is not None


def is_shopping_note(line: str, *, within: bool = False) -> bool:
    """Whether a whole line says where a food is sold: no food and no step of cooking.

    Args:
        line: of a recipe.
        within: "available at ..." may come after other words; where those may be a food with its
            amount, it must open the line.

    >>> is_shopping_note("*Available at Asian markets."), is_shopping_note("1 yuzu, sold in spring")
    (True, False)
    """
    if len(line) > MOST_CHARS:
        return False
    if _INFO.match(line):
        return True
    if _FOR_SALE.search(line) is None:
        return False
    return _OPENS_NOTE.match(line) is not None or (within and not has_action_verb(line))


def without_credits(steps: tuple[str, ...], notes: Counter[str]) -> tuple[str, ...]:
    """Clean steps without credits, notices and bare headings; `notes` counts what went.

    >>> notes = Counter()
    >>> without_credits(("Boil the peas. Photograph by Ann Lee", "Watch Now"), notes), notes.total()
    (('Boil the peas.',), 2)
    """
    short = any(len(step) <= _SHORT and step[-1:].isalpha() for step in steps)
    if not short and _SUSPECTS.isdisjoint(words_of("\n".join(steps))):
        return steps
    kept: list[str] = []
    heading = ""
    for step, following in zip(steps, (*steps[1:], ""), strict=True):
        why = _why_removed(step)
        if why:
            notes[why] += 1
            continue
        if following and _is_part(step):
            heading += f"{step}: "
            notes[PARTS] += 1
            continue
        kept.append(heading + _without_end(_without_announcement(step, notes), notes))
        heading = ""
    if heading:
        kept.append(heading.rstrip(": "))
    return tuple(kept)


def _why_removed(step: str) -> str:
    """The reason to remove a whole step, or ""."""
    if len(step) > MOST_CHARS:
        return ""
    words = set(words_of(step))
    if len(step) <= _SHORT and step.strip(" :.*_#-=").casefold() in _BARE:
        return HEADINGS
    if not words.isdisjoint(_CREDIT_WORDS) and _CREDIT.match(step):
        return CREDITS
    if not words.isdisjoint(_NOTICE_WORDS) and _NOTICE.fullmatch(step):
        return NOTICES
    if not words.isdisjoint(_NUTRIENTS) and _NUTRITION.match(step) and _FIGURE.search(step):
        return NUTRITION
    if not words.isdisjoint(_SALE_WORDS) and is_shopping_note(step, within=True):
        return SHOPPING
    return ""


def _without_announcement(step: str, notes: Counter[str]) -> str:
    """A step without "Directions:" before it."""
    head, colon, rest = step[: _SHORT + 1].partition(":")
    if not (colon and rest.strip()) or head.strip(" .*_#-=").casefold() not in _ANNOUNCED:
        return step
    notes[HEADINGS] += 1
    return step[len(head) + 1 :].lstrip(" *_")


def _without_end(step: str, notes: Counter[str]) -> str:
    """A step without a credit or a button that ends it."""
    button = _BUTTON.search(step, max(0, len(step) - _SHORT))
    if button:
        notes[NOTICES] += 1
        return step[: button.start() + 1]
    match = _WITHIN.search(step, max(0, len(step) - MOST_CHARS))
    if match is None:
        return step
    notes[CREDITS] += 1
    return step[: match.start() + 1]


def _is_part(step: str) -> bool:
    """Whether a step only names the part of the dish that the next ones make.

    >>> [_is_part(x) for x in ("Lemon Glaze", "For the sauce", "Make the sauce", "Add dressing.")]
    [True, True, False, False]
    """
    if len(step) > _SHORT or not step[-1:].isalpha() or any(map(str.isdigit, step)):
        return False
    *before, last = words_of(step) or [""]
    if _FOR_THE.fullmatch(step):
        return last in _PART_NOUNS or (step[:8].casefold() == "for the " and len(before) <= 4)
    return last in _PART_NOUNS and len(before) <= 2 and VERB_FORMS.isdisjoint(before)
