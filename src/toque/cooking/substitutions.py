"""Edits of words, and ingredient substitution, throughout prompt and recipe or not at all.

A swap is made only if the request lists exactly that food, the recipe names it, and no other word
of the example refers to it ("buttered", "peanut butter", "the beef") or to its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.cooking.ingredients.names import stem
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import key_of

Ids = NDArray[np.generic]
BREAK = "\n"  # the word that stands for a line break
_SPACED_BREAK = re.compile(f" ?{BREAK} ?")
Forms = tuple[str, str]  # singular and plural


def _forms(food: str) -> Forms:
    one, _, several = food.partition("|")
    return one, several or one


_SWAPS: Final = (  # at the same weight; all begin with a consonant, so that "a" stays right
    "walnut|walnuts = pecan|pecans; butter = margarine; vegetable oil = canola oil; "
    "sunflower oil = canola oil; parsley = cilantro; lemon juice = lime juice; "
    "chicken broth = vegetable broth; beef broth = vegetable broth; "
    "chicken stock = vegetable stock; ground beef = ground turkey; honey = maple syrup; "
    "raisin|raisins = dried cherry|dried cherries; spinach = kale; zucchini = yellow squash; "
    "kidney bean|kidney beans = black bean|black beans; spaghetti = linguine; "
    "penne = rigatoni; broccoli = cauliflower; carrot|carrots = parsnip|parsnips; "
    "strawberry|strawberries = raspberry|raspberries; peach|peaches = nectarine|nectarines; "
    "cod = haddock; thyme = rosemary; dried basil = dried marjoram; "
    "sour cream = plain yogurt"
)
PAIRS: Final = tuple(
    (_forms(one), _forms(other))
    for one, _, other in (swap.partition(" = ") for swap in _SWAPS.split("; "))
)

_CLOSING: Final = ",.;:)!?"
_SIDES: Final = frozenset(
    """
    peanut almond cocoa apple cashew nut body clarified brown browned seasoned herbed bean beans
    sprout sprouts lettuce sauce vinegar flavored flavoured paste powder seeds seed oil mustard
    flakes root
    """.split()  # noqa: SIM905
)  # words next to a food that make it another one


class Edit(NamedTuple):
    """Replace words[start:end]."""

    start: int
    end: int
    words: tuple[str, ...]


def edited(words: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """The words after `edits`."""
    out: list[str] = []
    at = 0
    for edit in edits:
        out += [*words[at : edit.start], *edit.words]
        at = edit.end
    return [*out, *words[at:]]


def joined(words: Sequence[str]) -> str:
    """The text of words: a space between two, none beside a line break."""
    return _SPACED_BREAK.sub(BREAK, " ".join(words))


def words_of(codec: Codec, ids: Ids) -> list[str]:
    """The words of a text, without spaces; line breaks are words."""
    text = codec.decode(ids.tolist())
    return [word for word in text.replace(BREAK, f" {BREAK} ").split(" ") if word]


def spliced(codec: Codec, ids: Ids, edits: Sequence[Edit]) -> Ids:
    """The ids of the text with `edits` made in order; `ids` if its words are not read back."""
    words = words_of(codec, ids)
    if not edits or codec.encode(joined(words)) != ids.tolist():
        return ids
    return np.array(codec.encode(codec.normalise(joined(edited(words, edits)))), np.int64)


def substitution(
    prompt: Sequence[str], target: Sequence[str], names_at: int, *, key: int
) -> tuple[list[Edit], list[Edit]]:
    """The edits of one swap in each side, or none; names begin at the prompt's word `names_at`."""
    listed = {name.casefold() for name in " ".join(prompt[names_at:]).split(", ")}
    text = " ".join((*prompt, *target)).casefold()
    swaps = [
        (old, new)
        for one, other in PAIRS
        for old, new in ((one, other), (other, one))
        if listed & set(old) and not any(stem(word) in text for word in _own(new, old))
    ]
    if not swaps:
        return [], []
    old, new = swaps[key_of(key) % len(swaps)]
    asked, written = _swapped(prompt, old, new), _swapped(target, old, new)
    return (asked, written) if asked and written else ([], [])


def _own(food: Forms, other: Forms) -> list[str]:
    return [word for word in food[0].split() if word not in other[0].split()]


def _swapped(words: Sequence[str], old: Forms, new: Forms) -> list[Edit] | None:
    """Replace every mention; None if another word refers to the food."""
    edits: list[Edit] = []
    telling = {stem(word) for word in _own(old, new)}
    at = 0
    while at < len(words):
        found = _mention(words, at, old, new)
        if found is None:
            if any(part in words[at].casefold() for part in telling):
                return None
            at += 1
            continue
        before, after = (
            {word.casefold().strip("(" + _CLOSING) for word in side}
            for side in (words[max(0, at - 1) : at], words[found.end :][:1])
        )
        ends = words[found.end - 1][-1] in _CLOSING
        if not _SIDES.isdisjoint(before if ends else before | after):
            return None
        edits.append(found)
        at = found.end
    return edits


def _mention(words: Sequence[str], at: int, old: Forms, new: Forms) -> Edit | None:
    for form, other in zip(old, new, strict=True):
        parts, replacing = form.split(), other.split()
        here = list(words[at : at + len(parts)])
        if len(here) < len(parts):
            continue
        opening = here[0][: len(here[0]) - len(here[0].lstrip("("))]
        closing = here[-1][len(here[-1].rstrip(_CLOSING)) :]
        bare = " ".join(here)[len(opening) :].removesuffix(closing)
        if bare.casefold() != form:
            continue
        if bare.isupper() and len(bare) > 1:
            replacing = [word.upper() for word in replacing]
        elif bare[0].isupper():
            titled = len(parts) == 1 or here[-1][0].isupper()
            replacing = [w.capitalize() if titled or not i else w for i, w in enumerate(replacing)]
        replacing[0] = opening + replacing[0]
        replacing[-1] += closing
        return Edit(at, at + len(parts), tuple(replacing))
    return None
