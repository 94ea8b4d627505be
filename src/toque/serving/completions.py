"""Requests for completions and chats, and their answers with `choices`."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from toque.data.tokenizer.codec import Codec
from toque.serving.batcher import ServedModel
from toque.serving.pieces import Piece, TextToken
from toque.serving.protocol import (
    AnswerForm,
    Json,
    Message,
    Prompts,
    ResponseFormat,
    TextRequest,
    Unused,
    Usage,
    conversation_ids,
    tokenize_prompts,
)
from toque.serving.request_errors import RequestError
from toque.serving.token_bytes import bytes_of_token


class ChoiceRequest(TextRequest, ABC):
    """Fields that both kinds of completion request share, and the form of their answers."""

    schema_field = "response_format"
    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    event_object: ClassVar[str]
    opens_texts: ClassVar[bool] = False
    """True if a stream begins each text with an event without text."""

    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=0)] | None = None  # 0 and 1 have no effect
    best_by: str | None = None  # our extension; None means likelihood
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None  # an extension in /v1/completions

    @property
    def n_texts(self) -> int:
        """Number of texts per prompt in the answer."""
        return self.n or 1

    @property
    def n_candidates(self) -> int:
        """Number of texts per prompt to choose from."""
        return self.best_of or 1

    @property
    def ranking(self) -> str | None:
        """Name of the score that ranks the texts; None for the default."""
        return self.best_by

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of a text; None for the limit in the model's training."""
        return self.max_tokens

    @property
    def requested_format(self) -> ResponseFormat | None:
        """Format of the texts; None for any text."""
        return self.response_format

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def answer_form(self, model: str) -> AnswerForm:
        """Create the form of the answer of a model."""
        return _Choices(self, model)

    @abstractmethod
    def choice(self, piece: Piece, *, is_complete: bool) -> Json:
        """Format a complete text, or a piece of it in a stream, as an entry of `choices`."""


class _Choices(AnswerForm):
    """Answer with the texts in `choices`."""

    end_mark = b"data: [DONE]\n\n"

    def __init__(self, request: ChoiceRequest, model: str) -> None:
        self._request = request
        self._head = {
            "id": f"{request.id_prefix}-{uuid.uuid4().hex}",
            "object": request.event_object if request.stream else request.answer_object,
            "created": int(time.time()),
            "model": model,
        }

    def choice(self, piece: Piece) -> Json:
        return self._request.choice(piece, is_complete=True)

    def complete(self, choices: Sequence[Json], usage: Usage) -> Json:
        return {**self._head, "choices": choices, "usage": _usage_record(usage)}

    def first_events(self, n_texts: int) -> list[Json]:
        opened = n_texts if self._request.opens_texts else 0
        return [self.event(Piece(i)) for i in range(opened)]

    def event(self, piece: Piece) -> Json:
        choice = self._request.choice(piece, is_complete=False)
        return {**self._head, "choices": [choice]}

    def last_events(self, usage: Usage) -> list[Json]:
        if not self._request.wants_usage:
            return []
        return [{**self._head, "choices": [], "usage": _usage_record(usage)}]

    def error_event(self, error: RequestError) -> Json:
        return error.record


def _usage_record(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.new_tokens,
        "total_tokens": usage.total_tokens,
    }


class CompletionRequest(ChoiceRequest):
    """POST /v1/completions: prompts without a template."""

    id_prefix = "cmpl"
    answer_object = event_object = "text_completion"
    prompt_field = "prompt"

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0 returns only the prompt
    echo: bool | None = None
    suffix: Unused = None

    @property
    def echoes(self) -> bool:
        """True if the texts begin with their prompts."""
        return bool(self.echo)

    @property
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""
        return self.logprobs

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the prompts; see `tokenize_prompts`."""
        return await tokenize_prompts(served, self.prompt)

    def choice(self, piece: Piece, *, is_complete: bool) -> Json:
        """Format a text or a piece as an entry of `choices`. Both have the same form."""
        logs = None if self.logprobs is None else _logprobs(piece)
        return _choice(piece, {"text": piece.text}, logs)


class ChatRequest(ChoiceRequest):
    """POST /v1/chat/completions: a conversation in the training format."""

    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"
    prompt_field = "messages"
    opens_texts = True

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    # Overrides max_tokens.
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Unused = None
    tool_choice: Unused = None
    functions: Unused = None
    # Fields without an effect: this server does not store texts, call tools or reason separately.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: (
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None
    ) = None

    @property
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""
        if not self.logprobs:
            return None
        return self.top_logprobs or 0

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of a text; None for the limit in the model's training."""
        return self.max_completion_tokens or self.max_tokens

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the conversation; see `conversation_ids`."""
        return [await conversation_ids(served, self.messages, param="messages")]

    def choice(self, piece: Piece, *, is_complete: bool) -> Json:
        """Format a text as a message, or a piece as a delta. The first delta has the role."""
        content: Json
        if is_complete:
            content = {"role": "assistant", "content": piece.text, "refusal": None}
        elif not piece.is_visible:
            content = {"role": "assistant", "content": ""}
        elif piece.text:
            content = {"content": piece.text}
        else:
            content = {}

        logs = None
        if self.logprobs:
            logs = {
                "content": [token_logprobs(token) for token in piece.tokens],
                "refusal": None,
            }
        return _choice(piece, {"message" if is_complete else "delta": content}, logs)


def token_logprobs(token: TextToken) -> Json:
    """Format the log-probabilities of a token's position for /v1/chat/completions."""
    new = token.new
    chosen = _chat_logprob(token.codec, new.token, token.text, new.logprob)
    top = [
        _chat_logprob(token.codec, other, text, logprob)
        for other, text, logprob in token.most_likely
    ]
    return {**chosen, "top_logprobs": top}


def _choice(piece: Piece, content: Json, logprobs: Json | None) -> Json:
    """Format an entry of `choices`."""
    return {
        "index": piece.index,
        **content,
        "logprobs": logprobs,
        "finish_reason": piece.end,
    }


def _chat_logprob(codec: Codec, token: int, text: str, logprob: float | None) -> Json:
    """Format one token with its log-probability for /v1/chat/completions."""
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(bytes_of_token(codec, token, text)),
    }


def _logprobs(piece: Piece) -> Json:
    """Format log-probabilities for /v1/completions: four parallel lists."""
    top_logprobs: list[Json | None] = []
    offsets = []
    offset = piece.offset
    for token in piece.tokens:
        logprob = token.new.logprob
        if logprob is None:  # the first token of a prompt
            top_logprobs.append(None)
        else:
            by_text: dict[str, float | None] = {}
            for _, text, log in token.most_likely:
                by_text.setdefault(text, log)  # several tokens may have the same text
            top_logprobs.append(by_text | {token.text: logprob})
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in piece.tokens],
        "token_logprobs": [token.new.logprob for token in piece.tokens],
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }
