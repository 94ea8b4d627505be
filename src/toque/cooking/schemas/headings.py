"""Headings and lists among scraped steps: they are joined to their steps and counted.

A page has "For the salsa" or "Knead the dough" on a separate line, or a list of foods among
its steps. A model would learn them as steps.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from typing import Final

from toque.cooking.normalised_words import ACTION_VERBS, VERB_FORMS, words_of
from toque.cooking.schemas.repairs import only_measures

HEADINGS: Final = "step lines that only say Step 1, Method or the like"
PARTS: Final = "section names joined to their step"
INGREDIENTS: Final = "lists of ingredients among the steps removed"
LISTS: Final = "lists of foods among the steps joined to one step"

# Lines that only announce steps, in addition to the lines in `cleaning`.
_BARE_LINES: Final = """
    ingredients|ingredient|procedure|cooking directions|cooking instructions|cooking method
    |how to make|how to make it|how to prepare|how to cook|preparation method
    |preparation instructions|preparation steps|method of preparation|directions for preparation
    |zubereitung|postup|préparation|preparación|preparazione|procedimento|procedimiento|bereiding
    |bereidingswijze|tillagning|modo de preparo|fremgangsmåde|przygotowanie|elaboración|instruções
    |instruktioner|realisation|réalisation|la préparation|la recette|so geht's|die zubereitung
    |let's cook|recipe|before you start|before you begin|let's get started|let's do this|notes|tips
"""
_BARE: Final = frozenset(line.strip() for line in _BARE_LINES.split("|"))
PART_NOUNS: Final = frozenset(
    """
    assembly base batter brine cake cakes crepes crust custard dough dressing filling frosting
    garnish glaze icing marinade meatballs pastry sauce streusel stuffing topping vinaigrette
    """.split()  # noqa: SIM905
)
_FOR_THE: Final = re.compile(
    r"(?:for|to make) (?:the )?[a-z][a-z '&-]{2,32}", re.IGNORECASE
)
_ANNOUNCED: Final = _BARE | {
    "directions",
    "instructions",
    "method",
    "preparation",
    "steps",
}
_BRACKET: Final = re.compile(r" \([^()]{1,40}\)\Z")
_INGREDIENTS: Final = re.compile(r"\W*ingredients?\W*", re.IGNORECASE)
# Maximum characters of a heading, unless a heading precedes every paragraph.
_SHORT: Final = 40
_MAX_WORDS: Final = 5  # maximum words of such a heading
_MAX_WORDS_OF_PARAGRAPH: Final = 16  # if a heading precedes every paragraph
_MAX_PART_WORDS: Final = 3  # "cream cheese frosting"
# Minimum share of longer lines with a full stop, see `_find_headings`
_MIN_STOPS: Final = 0.75
_STOPS: Final = frozenset('.!?)]…"”')
_SENTENCE_ENDS: Final = frozenset(".!?")
_DIGIT: Final = re.compile(r"\d(?!(?:st|nd|rd|th) )")
# Capitalised words after the last sentence of a step.
_AT_END: Final = re.compile(
    r"(?:(?<=[a-z]{3}[.!])|(?<=\.\)))"
    r" ([A-ZÀ-Þ][\w'’&-]*(?: (?:[A-ZÀ-Þ][\w'’&-]*|and|with|for|the|of|in)){0,5})\Z"
)
_MIN_WORD_CHARS: Final = 4  # minimum characters of the longest word of such a heading
_ADVERTS: Final = frozenset(
    {"advertisement", "anzeige", "publicidad", "publicité", "pubblicità", "werbung"}
)
# The name of a link: "heating-oil"
_SLUG: Final = re.compile(r"[a-z]{4,20}(?:-[a-z]{2,20}){0,2}")
_MAKES: Final = frozenset({"assemble", "make", "prepare"})
_ITEM: Final = re.compile(
    r"(?:\d[\d/ .,–-]*|[½¼¾⅓⅔⅛]|an? |(?:cups?|tsps?|tbsps?|tablespoons?|teaspoons?|pinch) )"
    r"(?=\S).{2,60}|[a-zß-öø-ÿ][^.!?:;]{2,30}",
    re.IGNORECASE,
)
_TELLS: Final = re.compile(
    r"\b(?:at|for|if|into|minutes?|mins?|hours?|is|degrees?|on|over|the|them|then|to|until|with|you)\b|°",
    re.IGNORECASE,
)


def with_headings_joined(
    steps: tuple[str, ...], notes: Counter[str]
) -> tuple[str, ...]:
    """Join lines that only introduce a step or name a food to their steps. `notes` counts them."""
    steps = _with_headings_parted(_with_lists_joined(steps, notes), notes)
    joined_steps: list[str] = []
    heading = ""
    for step, is_heading in zip(steps, _find_headings(steps), strict=True):
        is_link = is_heading and _SLUG.fullmatch(step) is not None
        if is_link or _is_bare(step):
            notes[HEADINGS] += 1
        elif is_heading:
            heading += f"{step}: "
            notes[PARTS] += 1
        else:
            instructions = _without_announcement(step, notes)
            joined_steps.append(with_heading(heading, instructions))
            heading = ""
    if heading:
        joined_steps.append(heading.rstrip(": "))
    return tuple(joined_steps)


def _is_bare(step: str) -> bool:
    """Return whether a line only announces steps, e.g. "Procedure:"."""
    return len(step) <= _SHORT and step.strip(" :.*_#-=").casefold() in _BARE


def _without_announcement(step: str, notes: Counter[str]) -> str:
    """Remove a word such as "Method:" from the beginning of a step."""
    head, colon, rest = step[: _SHORT + 1].partition(":")
    is_announced = head.strip(" .*_#-=").casefold() in _ANNOUNCED
    if not (is_announced and colon and rest.strip()):
        return step
    notes[HEADINGS] += 1
    return step[len(head) + 1 :].lstrip(" *_")


def with_heading(heading: str, step: str) -> str:
    """Write a heading before a step, unless the step already begins with it.

    >>> with_heading("For the dough: ", "For the dough : mix the flour and water.")
    'For the dough : mix the flour and water.'
    """
    name = heading.rstrip(": ").casefold()
    rest = step[len(name) :].lstrip()
    is_repeated = rest.startswith(":") and step.casefold().startswith(name)
    return step if name and is_repeated else heading + step


def _with_headings_parted(
    steps: tuple[str, ...], notes: Counter[str]
) -> tuple[str, ...]:
    """Move each heading from the end of a step to the beginning of the next step."""
    if all(step[-1:] in _STOPS for step in steps):
        return steps
    parted: list[str] = []
    heading = ""
    for step, following in zip(steps, (*steps[1:], ""), strict=True):
        line = heading + step
        heading = ""
        if words := _words_at_end(step):
            if words.casefold() in _ADVERTS:
                line = line.removesuffix(f" {words}")
                notes[HEADINGS] += 1
            elif following and _heads_part(words):
                line = line.removesuffix(f" {words}")
                heading = f"{words}: "
                notes[PARTS] += 1
        parted.append(line)
    return tuple(parted)


def _words_at_end(step: str) -> str:
    """Return the capitalised words after the last sentence of a step, or ""."""
    if step[-1:] in _STOPS:
        return ""
    match = _AT_END.search(step, max(0, len(step) - 2 * _SHORT))
    return match[1] if match else ""


def _heads_part(words: str) -> bool:
    """Return whether words after the last sentence of a step name the product of the next step."""
    names = words_of(words)
    if max(map(len, names)) < _MIN_WORD_CHARS:
        return False
    return names[-1] in PART_NOUNS or VERB_FORMS.isdisjoint(names)


def _find_headings(steps: tuple[str, ...]) -> list[bool]:
    """Return True for each line that is a heading of the next line."""
    if all(step[-1:] in _SENTENCE_ENDS for step in steps):
        return [False for _ in steps]
    max_chars = _max_heading_chars(steps)
    stops = [step[-1:] in _STOPS for step in steps if len(step) > max_chars]
    all_stop = all(stops)
    most_stop = bool(stops) and sum(stops) >= _MIN_STOPS * len(stops)

    headings: list[bool] = []
    for step, following in pairwise((*steps, "")):
        is_heading = bool(following) and (
            _is_part(step)
            or (all_stop and _is_heading(step, following, max_chars))
            or (most_stop and _is_name_of_part(step, following))
        )
        headings.append(is_heading)
    return headings


def _max_heading_chars(steps: tuple[str, ...]) -> int:
    """Return the maximum characters of a heading. A heading before every paragraph may be long."""
    n_stops = sum(step[-1:] in _STOPS for step in steps)
    n_headings = len(steps) - n_stops
    if not 3 <= n_headings <= 2 * n_stops or steps[-1][-1:] not in _STOPS:
        return _SHORT

    n_in_a_row = 0  # lines without a full stop
    for step, following in pairwise(steps):
        n_in_a_row = 0 if step[-1:] in _STOPS else n_in_a_row + 1
        # Three lines in a row are a list. A heading is shorter than its paragraph.
        is_as_long = following[-1:] in _STOPS and len(step) >= len(following)
        if n_in_a_row == 3 or (n_in_a_row and is_as_long):
            return _SHORT
    return 2 * _SHORT


def _is_heading(step: str, following: str, max_chars: int) -> bool:
    """Return whether a few words without a full stop introduce a step, if long steps have one."""
    max_words = _MAX_WORDS if max_chars == _SHORT else _MAX_WORDS_OF_PARAGRAPH
    if len(step) > max_chars or len(step.split()) > max_words:
        return False
    if not step[:1].isupper() or not step[-1:].isalpha() or _DIGIT.search(step):
        return False
    # A short line after a short line may be an item of a list.
    return max_chars > _SHORT or len(following) > _SHORT or following[-1:] in ".!?"


def _is_name_of_part(step: str, following: str) -> bool:
    """Return whether a line names the product of the next line, which is a longer sentence."""
    is_sentence = following[-1] in _STOPS and following[:1].isupper()
    if not is_sentence or len(following) <= len(step):
        return False
    if _SLUG.fullmatch(step):
        return True
    return _has_shape_of_name(step) and _names_product(step)


def _has_shape_of_name(step: str) -> bool:
    """Return whether a line is a few words from a capital to a letter."""
    is_name = step[:1].isupper() and step[-1:].isalpha()
    return is_name and len(step) <= _SHORT and len(words_of(step)) <= _MAX_WORDS


def _names_product(step: str) -> bool:
    """Return whether the words of a short line name a product or announce steps."""
    words = words_of(step)
    if words[-1] in _ANNOUNCED:  # "Baking instructions"
        return True
    if _DIGIT.search(step) or only_measures(words[0]):  # "Oven at 350F", "Cup of water"
        return False
    if (
        words[0] in ACTION_VERBS
    ):  # "Make onion rings" and "Roll pastry", not "Bake rolls"
        return words[0] in _MAKES or words[-1] in PART_NOUNS
    return VERB_FORMS.isdisjoint(words[1:])  # "Onion rings", not "Then bake"


def _is_part(step: str) -> bool:
    """Return whether a step only names the part of the dish that the next steps make."""
    name = _BRACKET.sub("", step)
    if len(name) > _SHORT or not name[-1:].isalpha() or _DIGIT.search(name):
        return False
    words = words_of(name)
    has_noun = words[-1] in PART_NOUNS
    if _FOR_THE.fullmatch(name):  # "To make icing" and "For the roast beef"
        is_for_the = name[:8].casefold() == "for the "
        return has_noun or (is_for_the and len(words) <= _MAX_WORDS)
    # "Cream cheese frosting", not "Spread the frosting"
    is_short = len(words) <= _MAX_PART_WORDS
    return has_noun and is_short and VERB_FORMS.isdisjoint(words[:-1])


def _with_lists_joined(steps: tuple[str, ...], notes: Counter[str]) -> tuple[str, ...]:
    """Join two or more foods on separate lines to the step before them."""
    n_stops = sum(step[-1:] in _STOPS for step in steps)
    # Steps without full stops look like foods.
    if not 0 < n_stops < len(steps) - 1 or not steps[0][:1].isupper():
        return steps
    joined_steps: list[str] = []
    foods: list[str] = []
    for step in steps:
        if step and _names_food(step):
            foods.append(step)
            continue
        _append_foods(joined_steps, foods, notes)
        foods = []
        if step:
            joined_steps.append(step)
    _append_foods(joined_steps, foods, notes)
    return tuple(joined_steps)


def _append_foods(steps: list[str], foods: list[str], notes: Counter[str]) -> None:
    """Append several foods to the last step if it has no full stop, or as a new step."""
    if foods and _INGREDIENTS.fullmatch(foods[0]):
        notes[INGREDIENTS] += 1  # the recipe's ingredients, which a prompt already has
        return
    if len(foods) < 2:
        steps += foods
        return
    notes[LISTS] += 1
    line = "; ".join(foods)
    if steps and steps[-1][-1] not in _STOPS:
        before = steps.pop()
        mark = "; " if ":" in before.rstrip(": ") else ": "
        line = f"{before.rstrip(':;, ')}{mark}{line}"
    steps.append(line)


def _names_food(step: str) -> bool:
    """Return whether a line among steps is an item of a list of foods."""
    if step[-1] in _STOPS or _ITEM.fullmatch(step) is None or _TELLS.search(step):
        return False
    words = words_of(step)
    return bool(words) and words[0] not in ACTION_VERBS
