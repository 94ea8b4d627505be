"""Positions that a model's config gives, read without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_LONGROPE: Final = ("longrope", "su")  # "su" is the name that older files of Phi-3 have


def short_positions(rope: object, original: object = None) -> int | None:
    """Positions that LongRoPE (Ding et al. 2024) turns by its short factors; None for other RoPEs.

    A row that is longer takes the long factors for all its positions. transformers chooses by the
    longest row of a batch, so packed neighbours would change each other, and a text that grows past
    this length would read keys that were turned by the others. `rope` is what a config calls
    rope_parameters or rope_scaling, `original` its original_max_position_embeddings.

    >>> short_positions({"rope_type": "longrope", "original_max_position_embeddings": 4096})
    4096
    """
    if not isinstance(rope, Mapping):
        return None
    kind = rope.get("rope_type", rope.get("type"))
    found = [short_positions(inner, original) for inner in rope.values()]  # by kind of layer
    found += [rope.get("original_max_position_embeddings", original)] * (kind in _LONGROPE)
    return min((n for n in found if isinstance(n, int)), default=None)
