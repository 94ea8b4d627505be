"""Repairs of faults from the way a collection was scraped; each one is counted.

Repairs of characters and markup belong to `toque.cooking.schemas.cleaning` and come after these.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate

BOILERPLATE = frozenset(
    {
        "Add all ingredients to list",
        "Add all ingredients to shopping list",
        "Add ingredients to shopping list",
        "Add to shopping list",
        "ADVERTISEMENT",
        "Advertisement",
        "Watch Now",
        "Print Recipe",
        "Save Recipe",
    }
)
"""Buttons and notices of web pages that scrapers took for an ingredient or a step."""

MIN_DOUBLED_CHARS = 40
"""A shorter text may repeat itself on purpose ("Stir. Stir.")."""

MAX_STEPS = 200
"""Most steps compared, which takes quadratic time; longer texts are not recipes written twice."""
_ALIKE_CHARS = 24
_ENDS_SENTENCE = re.compile(r"[.!?:;)\]\"'’”…*]\s*\Z")
_GOES_ON = re.compile(r"\s*(?:[a-zß-öø-ÿ]|\d+(?![.)\d]))")
_LOST_SPACE = re.compile(r"[\W_]+")
_SPACED_MARK = re.compile(r"(?<=\S) +([,;:.!?)])(?=\s|\Z)")
_SPACED_FRACTION = re.compile(r"(?<=\d) / (?=\d)")
_TWO_COMMAS = re.compile(r",(?:\s*+,)++")
_LINK_OPENERS = frozenset(
    "please find see get view read click visit check go head for full complete".split()  # noqa: SIM905
)
_ONLY_A_LINK = re.compile(
    rf"\W*(?:(?:please )?(?:{'|'.join(sorted(_LINK_OPENERS - {'please'}))})\b)"
    r"[^.]{0,80}\b(?:recipes?|instructions?|directions?|method|website|blog|site|link|here)\b"
    r"[^.]{0,60}[.!]?\W*\Z",
    re.IGNORECASE,
)
_LINK_CHARS = 1000
"""Longest steps in characters that may only be a link."""
_TAGS = re.compile(r"<[^<>]*>")


def without_boilerplate(lines: list[str], notes: Counter[str]) -> list[str]:
    """The lines without buttons and notices of the web page."""
    found = lines
    if not BOILERPLATE.isdisjoint(found):
        found = [line for line in found if line not in BOILERPLATE]
        notes["boilerplate lines"] += len(lines) - len(found)
    if "ADVERTISEMENT" in "\n".join(found):
        notes["boilerplate lines"] += 1
        found = [line.replace("ADVERTISEMENT", "").strip() for line in found]
    return found


def without_repeat(steps: list[str], notes: Counter[str]) -> list[str]:
    """Steps without a second copy of all instructions.

    >>> from collections import Counter
    >>> once = ["Beat the egg whites until stiff.", "Fold in the sugar gradually."]
    >>> without_repeat(once * 2, Counter()) == once
    True
    """
    if len(steps) > 1:
        found = _steps_once(steps)
    elif steps and len(steps[0]) >= 2 * MIN_DOUBLED_CHARS:
        found = [_text_once(steps[0])]
    else:
        return steps
    if found != steps:
        notes["doubled instructions"] += 1
    return found


def _steps_once(steps: list[str]) -> list[str]:
    """Steps without a part that repeats the beginning, however the lines are broken."""
    start = steps[0][:_ALIKE_CHARS]
    if len(steps) > MAX_STEPS or not any(step.startswith(start) for step in steps[1:]):
        return steps
    bare = [_LOST_SPACE.sub("", step).casefold() for step in steps]
    whole = "".join(bare)
    half = len(whole) // 2
    if half >= MIN_DOUBLED_CHARS and whole[:half] == whole[half:]:
        ends = list(accumulate(map(len, bare)))
        if half in ends:
            at = ends.index(half) + 1
            return max(steps[:at], steps[at:], key=len)  # keep the copy with more steps
    if len(bare[0]) >= MIN_DOUBLED_CHARS and "".join(bare[1:]).startswith(bare[0]):
        return steps[1:]  # one paragraph, then again step by step
    return _without_repeated_end(steps, bare)


def _without_repeated_end(steps: list[str], bare: list[str]) -> list[str]:
    """Steps without a run at the end that repeats the beginning.

    It must cover most of what precedes it: two parts of a recipe may begin alike.
    """
    for at in range(-(-len(steps) // 2), len(steps)):
        n_repeated = len(steps) - at
        if (
            bare[at:] == bare[:n_repeated]
            and 3 * n_repeated >= 2 * at
            and sum(map(len, bare[at:])) >= MIN_DOUBLED_CHARS
        ):
            return steps[:at]
    return steps


def _text_once(text: str) -> str:
    """The first half of a text that is the same text twice, with or without a gap."""
    start = text[:MIN_DOUBLED_CHARS].strip()
    at = text.find(start, len(text) // 2 - MIN_DOUBLED_CHARS)
    if at <= 0 or abs(2 * at - len(text)) > MIN_DOUBLED_CHARS:
        return text
    first, second = text[:at], text[at:]
    if _LOST_SPACE.sub("", first) == _LOST_SPACE.sub("", second):
        return first.rstrip()
    return text


def rejoined(steps: list[str], notes: Counter[str]) -> list[str]:
    """Rejoin steps that were split in the middle of a sentence.

    RecipeNLG's scraper split lines where the web page did. A recipe without any capitals and full
    stops is left as it is.

    >>> from collections import Counter
    >>> rejoined(["Bake for", "20", "minutes at 350°.", "Cool."], Counter())
    ['Bake for 20 minutes at 350°.', 'Cool.']
    """
    if len(steps) < 2 or not (
        any(_ENDS_SENTENCE.search(step) for step in steps) and steps[0][:1].isupper()
    ):
        return steps
    found: list[list[str]] = []
    before = ""
    for step in steps:
        if found and _GOES_ON.match(step) and not _ENDS_SENTENCE.search(before):
            found[-1][-1] = found[-1][-1].rstrip()
            found[-1].append(step.lstrip())
            notes["sentences split in the middle rejoined"] += 1
        else:
            found.append([step])
        before = step
    return list(map(" ".join, found))


def untokenised(lines: list[str], notes: Counter[str]) -> list[str]:
    """Lines without the spaces that Food.com's export put around commas and fractions.

    >>> from collections import Counter
    >>> untokenised(["cook 1 / 2 cup rice , covered , for 20 minutes"], Counter())
    ['cook 1/2 cup rice, covered, for 20 minutes']
    """
    found = [
        _TWO_COMMAS.sub(",", _SPACED_FRACTION.sub("/", _SPACED_MARK.sub(r"\1", line)))
        for line in lines
    ]
    notes["recipes with spaces before punctuation"] += found != lines
    return found


def only_a_link(steps: list[str]) -> bool:
    """Whether the steps only link to the steps.

    >>> only_a_link(["Find complete instructions on a cook's recipes"]), only_a_link(["Bake."])
    (True, False)
    """
    if not steps or sum(map(len, steps)) > _LINK_CHARS:
        return False
    first = steps[0].partition(" ")[0]
    if first.isascii() and first.isalpha() and first.lower() not in _LINK_OPENERS:
        return False
    text = " ".join(_TAGS.sub(" ", " ".join(steps)).split())
    return bool(text) and _ONLY_A_LINK.match(text) is not None
