"""Headings and lists among scraped steps. They are joined to their steps and counted.

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
LISTS: Final = "lists of foods among the steps joined to one step"

_BARE: Final = frozenset(
    """
    ingredients|ingredient|procedure|cooking directions|cooking instructions|cooking method
    |how to make|how to make it|how to prepare|how to cook|preparation method
    |preparation instructions|preparation steps|method of preparation|directions for preparation
    |zubereitung|postup|préparation|preparación|preparazione|procedimento|procedimiento|bereiding
    |bereidingswijze|tillagning|modo de preparo|fremgangsmåde|przygotowanie|elaboración|instruções
    |instruktioner|realisation|réalisation|la préparation|la recette|so geht's|die zubereitung
    |let's cook|recipe|before you start|before you begin|let's get started|let's do this|notes|tips
    """.replace("\n", " ")
    .replace("  ", "")
    .strip()
    .split("|")
)  # lines that only announce steps, in addition to the lines in `cleaning`
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
# Maximum characters of a heading, unless a heading precedes every paragraph.
_SHORT: Final = 40
_MIN_STOPS: Final = 0.75  # minimum share of longer lines with a full stop, see `_heads`
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
    joined_steps: list[str] = []
    heading = ""
    steps = _with_headings_parted(_with_lists_joined(steps, notes), notes)
    heads = _heads(steps)
    for step, is_head in zip(steps, heads, strict=True):
        if len(step) <= _SHORT and step.strip(" :.*_#-=").casefold() in _BARE:
            notes[HEADINGS] += 1
            continue
        if is_head:
            slug = _SLUG.fullmatch(step)
            heading += "" if slug else f"{step}: "
            notes[HEADINGS if slug else PARTS] += 1
            continue
        head, colon, rest = step[: _SHORT + 1].partition(":")
        if colon and rest.strip() and head.strip(" .*_#-=").casefold() in _ANNOUNCED:
            notes[HEADINGS] += 1
            step = step[len(head) + 1 :].lstrip(" *_")  # noqa: PLW2901
        joined_steps.append(with_heading(heading, step))
        heading = ""
    if heading:
        joined_steps.append(heading.rstrip(": "))
    return tuple(joined_steps)


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
    for n, step in enumerate(steps, start=1):
        line = heading + step
        heading = ""
        if step[-1:] not in _STOPS and (
            words := _AT_END.search(step, max(0, len(step) - 2 * _SHORT))
        ):
            is_advert = words[1].casefold() in _ADVERTS
            if is_advert or (n < len(steps) and _heads_part(words[1])):
                line = line[: len(line) - len(words[0])]
                heading = "" if is_advert else f"{words[1]}: "
                notes[HEADINGS if is_advert else PARTS] += 1
        parted.append(line)
    return tuple(parted)


def _heads_part(words: str) -> bool:
    """Return whether words after the last sentence of a step name the product of the next step."""
    names = words_of(words)
    if max(map(len, names)) < _MIN_WORD_CHARS:
        return False
    return names[-1] in PART_NOUNS or VERB_FORMS.isdisjoint(names)


def _heads(steps: tuple[str, ...]) -> list[bool]:
    """Return True for each line that is a heading of the next line."""
    ends = "".join(".-"[step[-1:] not in _STOPS] for step in steps)
    if all(step[-1:] in _SENTENCE_ENDS for step in steps):
        return [False] * len(steps)
    # A heading before every paragraph may be longer.
    max_chars = 2 * _SHORT if 3 <= ends.count("-") <= 2 * ends.count(".") else _SHORT
    # A step without a full stop is not a heading if the next step has one and is not longer.
    even = any(
        ends[i : i + 2] == "-." and len(a) >= len(b)
        for i, (a, b) in enumerate(pairwise(steps))
    )
    if "---" in ends or ends[-1] == "-" or even:
        max_chars = _SHORT
    stops = [
        end == "."
        for step, end in zip(steps, ends, strict=True)
        if len(step) > max_chars
    ]
    every = all(stops)
    mostly = bool(stops) and sum(stops) >= _MIN_STOPS * len(stops)
    return [
        bool(following)
        and (
            _is_part(step)
            or (every and _is_heading(step, following, max_chars))
            or (
                mostly and following[-1] in _STOPS and _is_name_of_part(step, following)
            )
        )
        for step, following in zip(steps, (*steps[1:], ""), strict=True)
    ]


def _is_heading(step: str, following: str, max_chars: int) -> bool:
    """Return whether a few words without a full stop introduce a step, if long steps have one."""
    max_words = max_chars // 8 if max_chars == _SHORT else max_chars // 5
    short = len(step) <= max_chars and len(step.split()) <= max_words
    tells = max_chars > _SHORT or len(following) > _SHORT or following[-1:] in ".!?"
    return (
        short
        and tells
        and step[:1].isupper()
        and step[-1:].isalpha()
        and not _DIGIT.search(step)
    )


def _is_name_of_part(step: str, following: str) -> bool:
    """Return whether a line names the product of the next line, if most long steps have a stop."""
    if len(following) <= len(step) or not following[:1].isupper():
        return False
    if _SLUG.fullmatch(step):
        return True
    words = words_of(step)
    short = len(step) <= _SHORT and len(words) <= _SHORT // 8
    if not (words and short and step[:1].isupper() and step[-1:].isalpha()):
        return False
    if words[-1] in _ANNOUNCED:
        return True
    if _DIGIT.search(step) or only_measures(words[0]):
        return False
    if words[0] in ACTION_VERBS:
        return words[0] in _MAKES or words[-1] in PART_NOUNS
    return VERB_FORMS.isdisjoint(words[1:])


def _is_part(step: str) -> bool:
    """Return whether a step only names the part of the dish that the next steps make."""
    step = _BRACKET.sub("", step)
    if len(step) > _SHORT or not step[-1:].isalpha() or _DIGIT.search(step):
        return False
    *before, last = words_of(step) or [""]
    if _FOR_THE.fullmatch(step):
        return last in PART_NOUNS or (
            step[:8].casefold() == "for the " and len(before) <= 4
        )
    return last in PART_NOUNS and len(before) <= 2 and VERB_FORMS.isdisjoint(before)


def _with_lists_joined(steps: tuple[str, ...], notes: Counter[str]) -> tuple[str, ...]:
    """Join two or more foods on separate lines to the step before them."""
    n_stops = sum(step[-1:] in _STOPS for step in steps)
    if not 0 < n_stops < len(steps) - 1 or not steps[0][:1].isupper():
        return steps
    joined_steps: list[str] = []
    foods: list[str] = []
    for step in (*steps, ""):
        if step and _names_food(step):
            foods.append(step)
            continue
        if len(foods) > 1:
            notes[LISTS] += 1
            foods = ["; ".join(foods)]
            if joined_steps and joined_steps[-1][-1] not in _STOPS:
                mark = "; " if ":" in joined_steps[-1].rstrip(": ") else ": "
                foods = [f"{joined_steps.pop().rstrip(':;, ')}{mark}{foods[0]}"]
        joined_steps += foods
        foods = []
        joined_steps += [step] if step else []
    return tuple(joined_steps)


def _names_food(step: str) -> bool:
    """Return whether a line among steps is an item of a list of foods."""
    if step[-1] in _STOPS or _ITEM.fullmatch(step) is None or _TELLS.search(step):
        return False
    words = words_of(step)
    return bool(words) and words[0] not in ACTION_VERBS
