"""Interface of a program that computes the steps of a single row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

States = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of each layer, [H, tokens, d] each."""


class RowProgram(Protocol):
    """Decoder of a model for one row. It has its own cache of keys and values."""

    def begin(self, states: States, source: States = ()) -> None:
        """Copy the cache of a row, and for an encoder-decoder the cache of its source."""

    def step(self, token: int) -> Tensor:
        """Read a token, and return the logits [1, vocabulary] of the next one.

        The next step overwrites them.
        """
        ...

    def states(self) -> States:
        """Return the keys and values of the row. The next step overwrites them."""
        ...
