"""Text stream: the text of ids that arrive one by one, as far as it is settled."""

from __future__ import annotations

from tokenizers.decoders import DecodeStream

from toque.data.tokenizer.codec import Codec

_AROUND = 8
"""Ids before one that decide its text: the bytes of a character, and whether a line begins."""


class TextStream:
    """Feed ids, get text; all pieces together are `codec.decode` of all ids.

    A character whose bytes several tokens share is held back until it is whole.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._line = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._length = 0

    def feed(self, token: int) -> str:
        """The text that one more id settles, often one word, sometimes nothing."""
        self._ids.append(token)
        if token == self._codec.newline_id:
            self._line = DecodeStream(skip_special_tokens=False)
            return self.rest()
        if token in self._codec.silent:
            return ""
        piece = self._codec.decode_next(self._line, token)
        self._length += len(piece)
        return piece

    def would_be(self, token: int) -> str:
        """The text of one more id in this place; the name of a token that texts are without.

        Alone it would be another: SentencePiece drops the space that leads a line.
        """
        if token in self._codec.silent:
            return self._codec.piece(token)
        before = self._ids[-_AROUND:]
        settled = self._codec.decode(before).rstrip("\ufffd")  # half a character
        return self._codec.decode([*before, token])[len(settled) :]

    def rest(self) -> str:
        """Text held back until now, to be called after the last id."""
        piece = self._codec.decode(self._ids)[self._length :]
        self._length += len(piece)
        return piece
