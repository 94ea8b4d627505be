"""Values from a model's config. This module does not need torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_LONGROPE: Final = ("longrope", "su")  # "su" is the name in older Phi-3 files


def window_of(config: Any) -> int | None:
    """Return a sliding window's width in tokens, with the current token; None without a window."""
    window = getattr(config, "sliding_window", None)
    is_used = getattr(config, "use_sliding_window", True)
    return int(window) if window is not None and is_used else None


def head_size(config: Any) -> int:
    """Return the head size of a decoder-only model, in columns."""
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def scales_outputs(config: Any) -> bool:
    """Return false only for a T5 that does not multiply its outputs by d_model ** -0.5."""
    return bool(getattr(config, "scale_decoder_outputs", True))


def max_positions(config: Any) -> int | None:
    """Return a model's context length in tokens; None for T5, which has no limit.

    RoPE can compute longer rows, but the model was not trained on them.
    """
    rope = getattr(config, "rope_parameters", None)
    limits = (getattr(config, "max_position_embeddings", None), short_positions(rope))
    return min((int(limit) for limit in limits if limit is not None), default=None)


def short_positions(rope: object, original: object = None) -> int | None:
    """Return the length that LongRoPE's short factors support; None for other kinds of RoPE.

    A longer row uses the long factors for all of its positions (Ding et al. 2024). transformers
    selects the factors by the longest row of a batch, so packed rows would change each other. A
    text that grows longer would read keys that were rotated by the short factors.

    >>> short_positions({"rope_type": "longrope", "original_max_position_embeddings": 4096})
    4096

    Args:
        rope: The entry rope_parameters or rope_scaling of a config.
        original: The entry original_max_position_embeddings of a config.
    """
    if not isinstance(rope, Mapping):
        return None
    rope_type = rope.get("rope_type", rope.get("type"))
    # Some configs have one mapping per layer type.
    limits = [short_positions(inner, original) for inner in rope.values()]
    if rope_type in _LONGROPE:
        limits.append(rope.get("original_max_position_embeddings", original))
    return min((limit for limit in limits if isinstance(limit, int)), default=None)
