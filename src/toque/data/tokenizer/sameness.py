"""Sameness of two tokenizers: by what they do, not by the bytes of their files.

A tokenizer that another version of a library saved again has other bytes and the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.portable import PRIVATE, PROBES

_SHOWN: Final = 40
"""Characters of a text that an error shows."""
_RECIPE: Final = """Generate recipe for: Grandma's Crème Brûlée using ingredients: 1½ cups milk
Ingredients:
- 2 (15 ounce) cans chickpeas, drained & rinsed
- 250 ml (8½ fl oz) crème fraîche, at 180 °C / 350 °F

Instructions:
1. Preheat; whisk "gently" – don't boil.
2. Bake 20-25 minutes\tuntil golden..."""


def tokenizer_differences(one: Codec, other: Codec, texts: Iterable[str] = ()) -> list[str]:
    """How two tokenizers differ, in words; nothing where they are the same.

    Compared are the vocabularies, the ids of the special tokens, and the ids of sample texts with
    line breaks, accents and special tokens written out.

    Args:
        one: called "one" in the words.
        other: called "the other".
        texts: more texts to compare, such as some of the data at hand.
    """
    if one.sha256 == other.sha256 and one.special_ids == other.special_ids:
        return []
    found = [
        f"{name} is {a} in one and {b} in the other"
        for (name, a), b in zip(one.special_ids.items(), other.special_ids.values(), strict=True)
        if a != b
    ]
    ours, theirs = _spelled(one), _spelled(other)
    apart = sorted(n for n in ours.keys() | theirs.keys() if ours.get(n) != theirs.get(n))
    if apart:
        first = apart[0]
        found.append(
            f"{len(apart):,} of {max(len(ours), len(theirs)):,} entries differ, the first is "
            f"{first}: {ours.get(first)!r} in one and {theirs.get(first)!r} in the other"
        )
    samples: Sequence[str] = [*PROBES, _RECIPE, *texts]
    for text in samples:
        if one.encode(one.normalise(text)) != other.encode(other.normalise(text)):
            found.append(f"they give other ids for {text[:_SHOWN]!r}")
            break
    return found


def _spelled(codec: Codec) -> dict[int, str]:
    """Every token by its id, those that the portable form spells otherwise as they were."""
    pieces = {number: piece.replace(PRIVATE, "<") for piece, number in codec.pieces().items()}
    if codec.newline_id is not None:
        pieces[codec.newline_id] = "\n"
    return pieces
