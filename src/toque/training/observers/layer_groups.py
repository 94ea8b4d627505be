"""Layer groups of a model: embedding, blocks, head, adapter, by the names of its parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_BLOCK: Final = re.compile(
    r"(?:^|\.)(?:(encoder|decoder)\.)?(?:block|blocks|h|layer|layers)\.([0-9]+)\."
)
"""T5's encoder.block.3., GPT-2's h.3., NeoX' and Llama's layers.3."""
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|head)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:shared|wte|wpe|embed|embed_in|embed_tokens|embeddings?|position_embeddings)\."
)
_ADAPTER: Final = re.compile(r"\.(?:lora_\w+|trainable_tokens_\w+)(?:\.|$)")
MOST_RANGES: Final = 12
"""Groups that a stack of blocks is told in, at most."""


def layer_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Group -> positions in `names` of its parameters; a tied head counts as the embedding.

    A stack of more than twelve blocks is told in ranges of equal length.

    >>> layer_groups(["transformer.wte.weight", "transformer.h.0.ln_1.bias", "lm_head.weight"])
    {'embedding': [0], 'block 0': [1], 'head': [2]}
    >>> sorted(layer_groups([f"h.{i}.w" for i in range(24)]))[:2]
    ['blocks 0-1', 'blocks 10-11']
    """
    stacks: dict[str, int] = {}
    for name in names:
        if found := _BLOCK.search(name):
            stack = found.group(1) or ""
            stacks[stack] = max(stacks.get(stack, 0), int(found.group(2)) + 1)
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        groups.setdefault(_group(name, stacks), []).append(position)
    return groups


def _group(name: str, stacks: dict[str, int]) -> str:
    adapter = "adapter " if _ADAPTER.search(name) else ""
    if found := _BLOCK.search(name):
        stack = found.group(1) or ""
        place = _range(int(found.group(2)), stacks[stack])
        return f"{adapter}{stack} {place}".strip().replace("  ", " ")
    if _HEAD.search(name):
        return f"{adapter}head"
    if _EMBEDDING.search(name):
        return f"{adapter}embedding"
    return f"{adapter}other"  # the last norm, above all


def _range(block: int, n_blocks: int) -> str:
    width = -(-n_blocks // MOST_RANGES)
    if width == 1:
        return f"block {block}"
    first = block // width * width
    last = min(first + width, n_blocks) - 1
    return f"blocks {first}-{last}" if last > first else f"block {first}"
