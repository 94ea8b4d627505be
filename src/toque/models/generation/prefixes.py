"""Keys and values of finished rows, for prompts that begin with the same tokens.

The next turn of a conversation repeats all earlier turns, so only its new tokens are prefilled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LayerStates = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [H, tokens, d] each. For the letters see `kv_cache.py`."""
MIN_TOKENS: Final = 32
"""Minimum length of a prefix that is stored or used, in tokens."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """Beginning of a prompt, with its keys and values."""

    states: LayerStates
    length: int
    """Number of tokens. The states may have more."""


@dataclass(eq=False)
class _Entry:
    ids: NDArray[np.int64]
    states: LayerStates
    n_bytes: int


@final
class PrefixCache:
    """Finished rows, the least recently used first.

    Args:
        max_bytes: Maximum size of all keys and values.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: list[_Entry] = []
        self.n_bytes = 0
        """Size of all keys and values."""
        self.n_reused = 0
        """Number of tokens that were not prefilled again."""

    def find(self, prompt: Sequence[int]) -> Prefix | None:
        """Return the longest stored beginning of a prompt, without its last two tokens.

        The first step reads the last token. The token before it is always computed, so that each
        layer stores its keys and values.
        """
        ids = np.asarray(prompt[:-2], np.int64)
        best: _Entry | None = None
        length = MIN_TOKENS - 1
        for entry in self._entries:
            common = _count_common(entry.ids, ids)
            if common > length:
                best, length = entry, common
        if best is None:
            return None
        self._entries.remove(best)
        self._entries.append(best)
        self.n_reused += length
        return Prefix(best.states, length)

    def add(self, tokens: Sequence[int], states: LayerStates) -> None:
        """Store the keys and values of tokens. Forget the oldest rows above the maximum size."""
        n_bytes = sum(tensor.nbytes for pair in states for tensor in pair)
        if len(tokens) < MIN_TOKENS or n_bytes > self._max_bytes:
            return
        ids = np.asarray(tokens, np.int64)
        # An earlier turn of the same conversation is a part of this one.
        repeated = [
            entry
            for entry in self._entries
            if _count_common(entry.ids, ids) == len(entry.ids)
        ]
        for entry in repeated:
            self._forget(entry)
        while self.n_bytes + n_bytes > self._max_bytes:
            self._forget(self._entries[0])
        self._entries.append(_Entry(ids, states, n_bytes))
        self.n_bytes += n_bytes

    def _forget(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.n_bytes -= entry.n_bytes


def _count_common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Count the tokens at the beginning of both arrays.

    >>> _count_common(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    n = min(len(first), len(second))
    differences = (first[:n] != second[:n]).nonzero()[0]
    return int(differences[0]) if len(differences) else n


def attend_after(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute attention of the last tokens of a row over all of its earlier tokens.

    Args:
        query: [1, H * G, S, d], of the last S tokens.
        key: [1, H * G, P, d], of all tokens.
        value: [1, H * G, P, d].
        scale: Factor of the scores.

    Returns:
        [1, H * G, S, d].
    """
    n_new, n_all = query.shape[2], key.shape[2]
    position = torch.arange(n_all, device=query.device)
    is_earlier = position <= position[n_all - n_new :, None]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_earlier, scale=scale
    )
