"""Answers of the OpenAI protocol: what was written, whole or piece by piece."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from toque.serving.served import ServedModel
from toque.serving.writing import Piece, Told

Json = dict[str, Any]


class Answers(Protocol):
    """The form of one endpoint's answers."""

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """The answer at once: the pieces of every text."""
        ...

    def opening(self, n: int) -> list[Json]:
        """What a stream of n texts begins with."""
        ...

    def part(self, piece: Piece) -> Json:
        """One event of a stream."""
        ...

    def closing(self, usage: Json) -> Json:
        """The event of a stream that says what it cost."""
        ...


def usage_of(prompt_tokens: int, tokens: int) -> Json:
    """What a request cost."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": tokens,
        "total_tokens": prompt_tokens + tokens,
    }


class CompletionAnswers:
    """Answers of /v1/completions."""

    def __init__(self, served: ServedModel, *, n_likeliest: int | None) -> None:
        self._n_likeliest = n_likeliest
        self._shared = _shared("cmpl", "text_completion", served)
        self._lengths: dict[int, int] = {}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """The answer at once."""
        choices = []
        for index, own in enumerate(pieces):
            choices.append(self._choice(_joined(index, own)))
        return {**self._shared, "choices": choices, "usage": usage}

    def opening(self, n: int) -> list[Json]:
        """Nothing."""
        return []

    def part(self, piece: Piece) -> Json:
        """One event of a stream."""
        return {**self._shared, "choices": [self._choice(piece)]}

    def closing(self, usage: Json) -> Json:
        """The event that says what it cost."""
        return {**self._shared, "choices": [], "usage": usage}

    def _choice(self, piece: Piece) -> Json:
        logs = None if self._n_likeliest is None else self._logprobs(piece)
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": logs,
            "finish_reason": piece.end,
        }

    def _logprobs(self, piece: Piece) -> Json:
        offset = self._lengths.get(piece.index, 0)
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for told in piece.tokens:
            found["tokens"].append(told.text)
            found["token_logprobs"].append(told.new.logprob)
            best: dict[str, float | None] = {}
            for text, log in told.likeliest:
                best.setdefault(text, log)  # of texts that are equal, the likeliest
            found["top_logprobs"].append(best | {told.text: told.new.logprob})
            found["text_offset"].append(offset)
            offset += len(told.text)
        self._lengths[piece.index] = offset
        return found


class ChatAnswers:
    """Answers of /v1/chat/completions."""

    def __init__(self, served: ServedModel, *, n_likeliest: int | None) -> None:
        self._n_likeliest = n_likeliest
        self._shared = _shared("chatcmpl", "chat.completion", served)
        self._event = {**self._shared, "object": "chat.completion.chunk"}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """The answer at once."""
        choices = []
        for index, own in enumerate(pieces):
            piece = _joined(index, own)
            message = {"role": "assistant", "content": piece.text, "refusal": None}
            choices.append(self._choice(piece, "message", message))
        return {**self._shared, "choices": choices, "usage": usage}

    def opening(self, n: int) -> list[Json]:
        """Who speaks, once for every text."""
        said = {"role": "assistant", "content": ""}
        nothing = [Piece(index, "", [], None) for index in range(n)]
        return [
            {**self._event, "choices": [self._choice(piece, "delta", said)]} for piece in nothing
        ]

    def part(self, piece: Piece) -> Json:
        """One event of a stream."""
        delta = {"content": piece.text} if piece.text else {}
        return {**self._event, "choices": [self._choice(piece, "delta", delta)]}

    def closing(self, usage: Json) -> Json:
        """The event that says what it cost."""
        return {**self._event, "choices": [], "usage": usage}

    def _choice(self, piece: Piece, name: str, content: Json) -> Json:
        logs = None
        if self._n_likeliest is not None:
            logs = {"content": [self._logprob(told) for told in piece.tokens], "refusal": None}
        return {
            "index": piece.index,
            name: content,
            "logprobs": logs,
            "finish_reason": piece.end,
        }

    def _logprob(self, told: Told) -> Json:
        best = [_token(text, log) for text, log in told.likeliest] if self._n_likeliest else []
        return {**_token(told.text, told.new.logprob), "top_logprobs": best}


def _token(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _joined(index: int, pieces: Sequence[Piece]) -> Piece:
    """The pieces of one text as one."""
    text = "".join(piece.text for piece in pieces)
    tokens = [told for piece in pieces for told in piece.tokens]
    return Piece(index, text, tokens, pieces[-1].end)


def _shared(prefix: str, kind: str, served: ServedModel) -> Json:
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
    }
