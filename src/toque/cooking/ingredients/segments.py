"""Segments of an ingredient line: runs of tokens between commas, names and participles."""

from __future__ import annotations

from typing import Literal

from toque.cooking.ingredients.tokens import CLOSING, Tokens
from toque.cooking.ingredients.vocabulary import (
    ADJECTIVES,
    ADVERBS,
    KEPT_WITH,
    PART_OF_NAME,
    PARTS,
    PREPARED,
    PURPOSES,
    REMARKS,
    SEGMENT_PREPARED,
    SIZES,
    UNSAID,
)

Run = tuple[int, int]
RemarkKind = Literal["preparation", "comment", "purpose"]
Remarks = tuple[str, str, str, bool]
"""Preparation, comment, purpose, and whether the ingredient is optional."""
NO_REMARKS: Remarks = ("", "", "", False)

_COMMAS = frozenset({",", ";", ":", "|", "--"})
_MAX_NAMED = 4  # maximum number of segments in a list of foods
_MAX_FOOD_WORDS = 5  # maximum words of a food in such a list
_JOINING = frozenset({"or", "and"})
_JOINING_WITHIN = _JOINING | {"/"}
_QUALITY_ENDINGS = (
    "-fat", "-free", "-style", "-on", "-in", "-cooked", "-drained", "-roasted", "-packed", "-less",
)  # fmt: skip
_AMOUNT_WORDS = frozenset({"taste", "needed", "required", "desired", "wish", "like"})
_SPEAKING = frozenset(
    "also can like love may need prefer recommend use used want".split()  # noqa: SIM905
)
"""Words after "I" or "you" that begin a remark."""
_PREPARING = SEGMENT_PREPARED | ADVERBS
_OF_NO_FOOD = _PREPARING | PARTS | {"only", "part"}
_NO_FOOD = frozenset({"a", "more", "less", "you", "another"})
_NO_NAME = REMARKS | PURPOSES | SEGMENT_PREPARED
ENDS = frozenset(
    """
    plus preferably optional such about including divided + from see or and to for as if at cut i
    you you'll can made dissolved combined mixed soaked steeped plumped weighing use with room z für
    zum zur voor om para til för
    """.split()  # noqa: SIM905
)
"""Words that may end a name. `ends_name` decides."""
SPECIAL_WORDS = ENDS | PREPARED | ADVERBS | SIZES
"""Words that may not be part of a name."""


def segments(tokens: Tokens, i: int) -> list[Run]:
    """Split the tokens from `i` at commas and similar marks. A bracket stays in one run."""
    kinds = tokens.kinds
    words = tokens.words
    end = len(tokens)
    runs: list[Run] = []
    start = i
    while i < end:
        if kinds[i] != "P":
            i += 1
            continue
        word = words[i]
        if word in CLOSING:
            i = tokens.closing(i, end) + 1
            continue
        is_dash = word == "-" and i > start and not tokens.is_glued(i)
        if word in _COMMAS or is_dash:
            if i > start:
                runs.append((start, i))
            start = i + 1
        i += 1
    if end > start:
        runs.append((start, end))
    return runs


def n_named(tokens: Tokens, runs: list[Run]) -> int:
    """Count the first runs that form the name: two in "boneless, skinless breasts"."""
    words = tokens.words
    n = 1
    for start, end in runs[:-1]:
        if not all(map(is_quality, words[start:end])):
            break
        n += 1

    # The name may be a list of foods: "water, chicken broth, or stock".
    for m in range(n, min(len(runs), n + _MAX_NAMED)):
        start, end = runs[m]
        run = words[start:end]
        if words[start - 1] != ",":
            return n
        if run[0] in _JOINING:
            return m + 1 if _names_food(tokens, start + 1) else n
        if tokens.kinds[start] != "W" or len(run) > _MAX_FOOD_WORDS:
            return n
        if run[0] in REMARKS or not _OF_NO_FOOD.isdisjoint(run):
            return n
        # The last food of a list may have no comma before it: "butter, oil or lard".
        if not _JOINING_WITHIN.isdisjoint(run):
            return m + 1
    return n


def _names_food(tokens: Tokens, i: int) -> bool:
    """Check that a food, not an amount or a remark, follows a joining word."""
    word = tokens.words[i]
    return not tokens.is_number(i) and word not in _NO_FOOD and word not in _NO_NAME


def is_quality(word: str) -> bool:
    """Check that a word cannot be a food, so that the name continues after its comma."""
    return word in ADJECTIVES or word.endswith(_QUALITY_ENDINGS)


_FOLLOWING: dict[str, frozenset[str]] = {
    **dict.fromkeys(
        ("or", "and"), frozenset({"more", "to", "a", "as", "half", "other"})
    ),
    **dict.fromkeys(("to", "for"), PURPOSES),
    "as": _AMOUNT_WORDS | {"a", "an", "you"},
    "if": _AMOUNT_WORDS | {"you"},
    "room": frozenset({"temperature", "temp"}),
    **dict.fromkeys(
        ("made", "dissolved", "combined", "mixed", "soaked", "steeped", "plumped"),
        frozenset({"by", "for", "from", "in", "into", "with", "overnight"}),
    ),
    "at": frozenset({"room", "least"}),
    **dict.fromkeys(("i", "you", "you'll", "can"), _SPEAKING),
    "cut": frozenset({"into", "in", "up", "from", "to", "on", "across", "crosswise"}),
    "+": _NO_FOOD | UNSAID,  # "salt + pepper", but "oil + extra"
}
"""Words of `ENDS` that end a name only before certain words."""


def ends_name(tokens: Tokens, i: int) -> bool:
    """Check whether a name ends before token `i`, which is in `ENDS`."""
    word, following = tokens.words[i], tokens.words[i + 1]
    before_amount = tokens.kinds[i + 1] == "N" and tokens.words[i + 2] != "%"
    if word in {"or", "and"}:
        if following == "half" == tokens.words[i - 1]:
            return False  # "half and half"
        if before_amount:
            return True  # "butter or 1 cup oil", but "whole or 2% milk"
    if word == "with":
        return before_amount  # "butter with 1/2 tsp vanilla", but "yogurt with 2% fat"
    if word == "for" and following.endswith("ing"):
        return True
    if word == "+" and tokens.kinds[i + 1] != "W":
        return True  # "butter + 1 tbsp"
    if word == "z":
        return tokens.words[i + 1 : i + 4] == [".", "b", "."]  # German "e.g."
    return word not in _FOLLOWING or following in _FOLLOWING[word]


def participles_end(tokens: Tokens, i: int, end: int) -> int:
    """Return the index after a run like "finely chopped and toasted", or `i` without a run."""
    words = tokens.words
    last = i
    for j in range(i, end):
        word = words[j]
        if word in PREPARED:
            is_preparation = words[j + 1] not in PART_OF_NAME.get(word, ())
        else:  # "freshly ground", but "ground beef"
            previous = words[j - 1] if j > i else ""
            after_adverb = previous in ADVERBS or previous == "or"
            is_preparation = word == "ground" and after_adverb
        if is_preparation:
            last = j + 1
            continue
        joins = word in {"and", "or", ","} and (last == j or words[j - 1] == ",")
        if word not in ADVERBS and not joins:
            break
    return last


def belongs_to_name(before: str, word: str) -> bool:
    """Check whether a participle is part of the name: "frozen chopped", "peas or sliced figs"."""
    return before in KEPT_WITH or (before in {"or", "and"} and word not in ADVERBS)


def remark_kind(words: list[str]) -> RemarkKind:
    """Return the kind of a run after a name, based on its first words."""
    if words[0] in {"for", "to"} and words[1:2] != ["taste"]:
        return "purpose"
    if words[0] in REMARKS or words[:2] == ["at", "least"]:
        return "comment"
    return "comment" if _PREPARING.isdisjoint(words[:4]) else "preparation"


def remarks(kinds_and_texts: list[tuple[RemarkKind, str]]) -> Remarks:
    """Join the texts after a name by kind."""
    if not kinds_and_texts:
        return NO_REMARKS
    texts: dict[RemarkKind, list[str]] = {
        "preparation": [],
        "comment": [],
        "purpose": [],
    }
    for kind, text in kinds_and_texts:
        texts[kind].append(text)
    preparation, comment, purpose = map(", ".join, texts.values())
    low = comment.lower()
    return preparation, comment, purpose, "optional" in low or "if desired" in low


def join(tokens: Tokens, indexes: list[int]) -> str:
    """Join the texts of these tokens. Tokens that are not neighbours get a space between them."""
    if not indexes:
        return ""
    if indexes[-1] - indexes[0] == len(indexes) - 1:  # the usual case, without a gap
        return tokens.stripped(indexes[0], indexes[-1] + 1)
    parts: list[str] = []
    start = indexes[0]
    for index, following in zip(indexes, [*indexes[1:], -1], strict=True):
        if following != index + 1:  # the last token of a run
            parts.append(tokens.stripped(start, index + 1))
            start = following
    return " ".join(part for part in parts if part)
