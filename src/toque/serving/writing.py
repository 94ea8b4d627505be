"""Writing: the texts of one request as they come out of the batch, cut at its stop strings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.text_stream import TextStream
from toque.models.generation.live_rows import End, NewToken, Order
from toque.serving.batcher import Batcher
from toque.serving.served import ServedModel


class Told(NamedTuple):
    """A token as it stands in its text; all of them side by side are the text."""

    new: NewToken
    text: str
    """Empty where a character's bytes are not all there yet; the last of them has it whole.

    Tokens of unfinished characters are held back until it is, or until the text ends."""
    others: Sequence[str]
    """The texts that the likeliest tokens would have had in this place."""

    @property
    def likeliest(self) -> list[tuple[str, float]]:
        """The likeliest texts with their log-probabilities, the one that was chosen among them."""
        new, pairs = self.new, zip(self.new.likeliest, self.others, strict=True)
        best = [(self.text if token == new.token else text, log) for (token, log), text in pairs]
        chosen = any(token == new.token for token, _ in new.likeliest)
        return best if chosen or new.logprob is None else [*best, (self.text, new.logprob)]


@dataclass(frozen=True)
class Piece:
    """More of one text."""

    index: int
    """Which of the request's texts."""
    text: str
    """May be empty: characters and stop strings are held back until they are whole."""
    tokens: Sequence[Told]
    """What it was written with, the end token left out."""
    end: End | None
    """Set with the last piece of a text."""


class StopStrings:
    """Text up to the first of some strings; what may become one is held back.

    Args:
        stops: None of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, bool]:
        r"""The text that is certain now, and whether a stop string came.

        >>> StopStrings(["###"]).feed("Stir.\n#")
        ('Stir.\n', False)
        """
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._held = ""
            return text[: min(places)], True
        held = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that a stop string begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class _Text:
    """One text of a request while it is written."""

    def __init__(self, codec: Codec, stops: Sequence[str]) -> None:
        self._stream, self._stops = TextStream(codec), StopStrings(stops)
        self._untold: list[Told] = []  # without text so far, which the end may bring
        self.is_over = False

    def add(self, index: int, news: Sequence[NewToken]) -> Piece:
        """The piece that some more tokens make."""
        text, end = "", None
        tokens: list[Told] = []
        for new in news:
            end, piece = new.end, ""
            if end != "stop":
                others = [self._stream.would_be(token) for token, _ in new.likeliest]
                piece = self._stream.feed(new.token)
                self._untold.append(Told(new, piece, others))
            if end is not None:
                piece += self._stream.rest()
                if self._untold:
                    self._untold[-1] = self._untold[-1]._replace(text=piece)
            sure, stopped = self._stops.feed(piece, last=end is not None)
            text += sure
            end = "stop" if stopped else end
            if piece or end is not None:
                tokens += self._untold
                self._untold.clear()
            if end is not None:
                break
        self.is_over = end is not None
        return Piece(index, text, tokens, end)


class Writing:
    """The texts of a request, in the batch from `async with` to its end.

    Args:
        batcher: That writes them.
        served: The model that was asked for.
        orders: One a text.
        stops: Strings that end a text, and are no part of it.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ServedModel,
        orders: Sequence[Order],
        stops: Sequence[str] = (),
    ) -> None:
        self.served, self.orders, self._stops = served, orders, stops
        self._batcher = batcher
        self.n_tokens = 0
        """Tokens written for all texts, without end tokens."""

    async def __aenter__(self) -> Self:
        """Join the queue.

        Raises:
            RequestError: 429, it is full.
        """
        self._ticket = self._batcher.submit(self.served, self.orders)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Free the places of what is unfinished, for example when the client went away."""
        self._batcher.cancel(self._ticket.orders)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """The pieces of the texts as they are written, several at a time where there are.

        Raises:
            RequestError: the batch could not go on.
        """
        texts = {order: _Text(self.served.codec, self._stops) for order in self.orders}
        places = {order: place for place, order in enumerate(self.orders)}
        left = len(texts)
        async for news in self._ticket.news():
            by_order: dict[Order, list[NewToken]] = {}
            for new in news:
                if not texts[new.order].is_over:
                    by_order.setdefault(new.order, []).append(new)
            pieces = []
            for order, own in by_order.items():
                piece = texts[order].add(places[order], own)
                pieces.append(piece)
                self.n_tokens += len(piece.tokens)
                if piece.end is not None:
                    left -= 1
                    if own[-1].end is None:  # a stop string, which the batch knows nothing of
                        self._batcher.cancel([order])
            if pieces:
                yield pieces
            if not left:
                return
