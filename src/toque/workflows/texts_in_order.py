"""Texts in order: the tokens of a batch, which grow side by side, as one text after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from toque.workflows.results import Written

OnText = Callable[[int, Written], object]
"""(number of the text, the text so far)."""
_UNFINISHED = "\ufffd"
"""Character that a decoder gives while bytes of one are still to come."""


class InOrder:
    """An engine's `on_token` that tells of the first unfinished text, then of the next.

    Those that were written meanwhile are told as soon as it is their turn.

    Args:
        on_text: is told.
        prompts: of the texts, as the model reads them.
        decode: ids to text.
        adapter: by which the texts are written, if several are asked.
        first: number of the first text.
    """

    def __init__(
        self,
        on_text: OnText,
        prompts: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        *,
        adapter: str | None = None,
        first: int = 0,
    ) -> None:
        self._on_text, self._prompts, self._decode = on_text, prompts, decode
        self._adapter, self._first = adapter, first
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._over: set[int] = set()
        self._current = 0

    def __call__(self, number: int, token: int | None) -> None:
        """A text's next token; None: it has ended."""
        if token is None:
            self._over.add(number)
        else:
            self._ids[number].append(token)
        if number != self._current:
            return
        self._tell()
        while self._current in self._over:
            self._current += 1
            if self._current < len(self._prompts):
                self._tell()

    def _tell(self) -> None:
        ids = self._ids[self._current]
        text = self._decode(ids)
        if self._current not in self._over:
            text = text.rstrip(_UNFINISHED)
        so_far = Written(self._prompts[self._current], text, len(ids), self._adapter)
        self._on_text(self._first + self._current, so_far)
