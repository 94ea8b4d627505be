"""Word edits, and the substitution of an ingredient in a prompt and its recipe.

A food is replaced only if the prompt lists exactly this food, the recipe contains it, and no other
word refers to it ("buttered", "peanut butter", "the beef") or to its replacement.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.cooking.ingredients.names import stem
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import key_of

Ids = NDArray[np.generic]
BREAK = "\n"
"""Line breaks are words of a text."""
_SPACED_BREAK = re.compile(f" ?{BREAK} ?")
Forms = tuple[str, str]
"""Singular and plural of a food."""


def _parse_forms(food: str) -> Forms:
    singular, _, plural = food.partition("|")
    return singular, plural or singular


# Foods of equal weight. All begin with a consonant, so that the article "a" stays correct.
_SWAPS = (
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
PAIRS = tuple(
    (_parse_forms(one), _parse_forms(other))
    for one, _, other in (swap.partition(" = ") for swap in _SWAPS.split("; "))
)

_CLOSING = ",.;:)!?"
_SIDES = frozenset(
    """
    peanut almond cocoa apple cashew nut body clarified brown browned seasoned herbed bean beans
    sprout sprouts lettuce sauce vinegar flavored flavoured paste powder seeds seed oil mustard
    flakes root
    """.split()  # noqa: SIM905
)
"""Words that change a food's meaning directly before or after it."""


class Edit(NamedTuple):
    """Replacement of words[start:end] in a text."""

    start: int
    end: int
    words: tuple[str, ...]


def apply_edits(words: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """Apply edits, which must be in order."""
    result: list[str] = []
    position = 0
    for edit in edits:
        result += [*words[position : edit.start], *edit.words]
        position = edit.end
    return [*result, *words[position:]]


def join_words(words: Sequence[str]) -> str:
    """Join words with spaces, except at line breaks."""
    return _SPACED_BREAK.sub(BREAK, " ".join(words))


def words_of(codec: Codec, ids: Ids) -> list[str]:
    """Decode a text and split it at spaces. Line breaks are words."""
    text = codec.decode(ids.tolist())
    return [word for word in text.replace(BREAK, f" {BREAK} ").split(" ") if word]


def splice(codec: Codec, ids: Ids, edits: Sequence[Edit]) -> Ids:
    """Apply edits to a tokenized text, or return `ids` if the codec does not reproduce the text."""
    words = words_of(codec, ids)
    if not edits or codec.encode(join_words(words)) != ids.tolist():
        return ids
    edited = join_words(apply_edits(words, edits))
    return np.array(codec.encode(codec.normalise(edited)), np.int64)


def substitution(
    prompt: Sequence[str], target: Sequence[str], names_at: int, *, key: int
) -> tuple[list[Edit], list[Edit]]:
    """Return the edits of prompt and target that replace one ingredient, or no edits.

    Args:
        prompt: Words of the prompt.
        target: Words of the target.
        names_at: Index of the first ingredient name in the prompt.
        key: Key of the random choice.
    """
    names = {name.casefold() for name in " ".join(prompt[names_at:]).split(", ")}
    swaps = _possible_swaps(names, " ".join((*prompt, *target)).casefold())
    if not swaps:
        return [], []
    old, new = swaps[key_of(key) % len(swaps)]
    prompt_edits = _replace_food(prompt, old, new)
    target_edits = _replace_food(target, old, new)
    if not prompt_edits or not target_edits:
        return [], []
    return prompt_edits, target_edits


def _possible_swaps(names: set[str], text: str) -> list[tuple[Forms, Forms]]:
    """List the swaps (old, new) of a listed food for one that the text does not mention."""
    swaps: list[tuple[Forms, Forms]] = []
    for one, other in PAIRS:
        for old, new in ((one, other), (other, one)):
            new_stems = map(stem, _distinct_words(new, old))
            if names & set(old) and not any(word in text for word in new_stems):
                swaps.append((old, new))
    return swaps


def _distinct_words(food: Forms, other: Forms) -> list[str]:
    """List the words of a food that another food does not have."""
    return [word for word in food[0].split() if word not in other[0].split()]


def _replace_food(words: Sequence[str], old: Forms, new: Forms) -> list[Edit] | None:
    """Replace every occurrence of a food. Return None if another word refers to it."""
    edits: list[Edit] = []
    stems = {stem(word) for word in _distinct_words(old, new)}
    index = 0
    while index < len(words):
        edit = _replace_food_at(words, index, old, new)
        if edit is not None:
            if _has_other_meaning(words, edit):
                return None
            edits.append(edit)
            index = edit.end
        elif any(part in words[index].casefold() for part in stems):
            return None  # "buttered"
        else:
            index += 1
    return edits


def _has_other_meaning(words: Sequence[str], edit: Edit) -> bool:
    """Check for a word next to a food that changes its meaning, as in "peanut butter"."""
    neighbours = [*words[max(0, edit.start - 1) : edit.start]]
    is_last_of_phrase = words[edit.end - 1][-1] in _CLOSING
    if not is_last_of_phrase:
        neighbours += words[edit.end : edit.end + 1]
    return any(word.casefold().strip("(" + _CLOSING) in _SIDES for word in neighbours)


def _replace_food_at(
    words: Sequence[str], index: int, old: Forms, new: Forms
) -> Edit | None:
    """Replace a food that begins at this word, with the same case and punctuation."""
    for old_form, new_form in zip(old, new, strict=True):
        n_words = len(old_form.split())
        end = index + n_words
        if end > len(words):
            continue
        text = " ".join(words[index:end])
        name = text.lstrip("(").rstrip(_CLOSING)
        if name.casefold() != old_form:
            continue
        opening, _, closing = text.partition(name)
        replacement = _in_case_of(name, new_form)
        return Edit(index, end, tuple(f"{opening}{replacement}{closing}".split()))
    return None


def _in_case_of(name: str, food: str) -> str:
    """Return a food in the case of a name: upper case, capitalised words, or unchanged."""
    if name.isupper() and len(name) > 1:
        return food.upper()
    if not name[0].isupper():
        return food
    first, *others = food.split()
    last_word = name.rsplit(maxsplit=1)[-1]
    if last_word[0].isupper():  # "Lemon Juice" or "Walnuts", not "Lemon juice"
        others = [word.capitalize() for word in others]
    return " ".join([first.capitalize(), *others])
