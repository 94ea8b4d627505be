"""Pieces of texts between the batch and the form of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from toque.data.tokenizer.codec import Codec
from toque.models.generation.live_rows import End, NewToken


class TextToken(NamedTuple):
    """Token of a text. The texts of all tokens together are the entire text."""

    codec: Codec
    new: NewToken
    text: str
    """Text of the token. If several tokens make up a character, only the last one has text.
    """
    alternatives: Sequence[str]
    """Texts of the most likely tokens at this position."""

    @property
    def most_likely(self) -> list[tuple[int, str, float]]:
        """Most likely tokens, their texts and log-probabilities, including the chosen token."""
        chosen = self.new.token
        tokens = []
        for (token, logprob), text in zip(
            self.new.top_logprobs, self.alternatives, strict=True
        ):
            # The chosen token has its text in this position, e.g. of a complete character.
            tokens.append((token, self.text if token == chosen else text, logprob))
        is_listed = any(token == chosen for token, _ in self.new.top_logprobs)
        if not is_listed and self.new.logprob is not None:
            tokens.append((chosen, self.text, self.new.logprob))
        return tokens


@dataclass(frozen=True)
class Piece:
    """Next part of one text. A complete answer has one piece per text."""

    index: int
    """Index of the text in its request."""
    text: str = ""
    """New text. Incomplete characters and possible stop strings wait for the next piece."""
    tokens: Sequence[TextToken] = ()
    """Tokens of the text. The end token is included only with `echo`."""
    offset: int = 0
    """Number of characters of all previous tokens."""
    end: End | None = None
    """Reason for the end, in the last piece of a text."""

    @property
    def is_visible(self) -> bool:
        """True if the client receives text, an end or a log-probability."""
        has_logprobs = any(token.new.logprob is not None for token in self.tokens)
        return bool(self.text) or self.end is not None or has_logprobs

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Join the pieces of one text."""
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        return cls(pieces[-1].index, text, tokens, end=pieces[-1].end)
