"""Requests of OpenAI's Responses API, which are answered like a chat.

The server stores no responses. See https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from toque.serving.batcher import ServedModel
from toque.serving.completions import token_logprobs
from toque.serving.pieces import Piece
from toque.serving.protocol import (
    AnswerForm,
    Json,
    JsonSchema,
    Message,
    RequestPart,
    ResponseFormat,
    TextPart,
    TextRequest,
    Unused,
    Usage,
    conversation_ids,
)
from toque.serving.request_errors import RequestError

_TEXT_TYPES = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"


def _check_is_not_stored(value: object) -> object:
    """Check that a field does not refer to a stored response."""
    if value in (None, False):
        return value
    raise ValueError(
        "this server stores no responses. Send the earlier messages in input"
    )


def _check_items(items: object) -> object:
    """Check the types of the input's items and of their parts, for a message that names them."""
    if isinstance(items, list) and not items:
        raise ValueError("the list is empty. Send a message")
    for item in items if isinstance(items, list) else ():
        fields = item if isinstance(item, dict) else {}
        kind = fields.get("type", "message")
        if kind != "message":
            raise ValueError(f"this server reads messages only, not {kind!r:.100}")
        content = fields.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else part
            if kind not in _TEXT_TYPES:
                raise ValueError(f"this server reads text only, not {kind!r:.100}")
    return items


_Stored = Annotated[Any, AfterValidator(_check_is_not_stored)]
"""Type of the fields that need stored responses."""


class _Part(RequestPart):
    """Text of a message."""

    model_config = ConfigDict(extra="ignore")  # notes on earlier answers
    type: Literal["input_text", "output_text", "text"]
    text: str


class _Item(BaseModel):
    """Message of the input. Earlier answers have further fields, which have no effect."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]

    @property
    def message(self) -> Message:
        """Message of a chat."""
        if isinstance(self.content, str):
            return Message(role=self.role, content=self.content)
        parts = [TextPart(type="text", text=part.text) for part in self.content]
        return Message(role=self.role, content=parts)


class _Format(RequestPart):
    """Format of an answer. Its schema has no inner object, unlike in a chat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None  # no effect: an answer always follows its schema


class _TextOptions(RequestPart):
    """Options of the text."""

    format: _Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # no effect


class ResponseRequest(TextRequest):
    """POST /v1/responses: a conversation in the training format."""

    prompt_field: ClassVar[str] = "input"
    schema_field: ClassVar[str] = "text"

    input: Annotated[
        str | Annotated[list[_Item], Field(fail_fast=True)],
        BeforeValidator(_check_items),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: _TextOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: (
        list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]]
        | None
    ) = None
    tools: Unused = None
    tool_choice: Unused = None
    max_tool_calls: Unused = None
    background: Unused = None
    prompt: Unused = None
    store: _Stored = None
    previous_response_id: _Stored = None
    conversation: _Stored = None
    truncation: Literal["disabled"] | None = None
    # Fields without an effect: this server does not call tools or reason separately.
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, str | None] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""
        is_included = _LOGPROBS in (self.include or ())
        if not is_included and not self.top_logprobs:
            return None
        return self.top_logprobs or 0

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of a text; None for the limit in the model's training."""
        return self.max_output_tokens

    @property
    def requested_format(self) -> ResponseFormat | None:
        """Format of the text; None for any text."""
        if self.text is None or self.text.format is None:
            return None
        form = self.text.format
        if form.type != "json_schema":
            return ResponseFormat(type=form.type)
        fields = {"name": form.name or "", "schema": form.schema_}
        inner = JsonSchema.model_validate(fields)
        return ResponseFormat(type="json_schema", json_schema=inner)

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the conversation; see `conversation_ids`."""
        messages: list[Message] = []
        if self.instructions:
            messages.append(Message(role="system", content=self.instructions))
        if isinstance(self.input, str):
            messages.append(Message(role="user", content=self.input))
        else:
            messages += [item.message for item in self.input]
        return [await conversation_ids(served, messages, param="input")]

    def answer_form(self, model: str) -> AnswerForm:
        """Create the form of the answer of a model."""
        return _ResponseForm(self, model)


class _ResponseForm(AnswerForm):
    """Response with one message. Its events have a type and a number."""

    def __init__(self, request: ResponseRequest, model: str) -> None:
        number = uuid.uuid4().hex
        self._item_id = f"msg_{number}"
        self._n_events = 0
        self._pieces: list[Piece] = []
        self._place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        text_options = request.text or _TextOptions()
        answer_format = text_options.format or _Format()
        self._response: Json = {
            "id": f"resp_{number}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {
                "format": answer_format.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": request.top_p or 1.0,
            "truncation": "disabled",
            "usage": None,
            "user": request.user,
        }

    def choice(self, piece: Piece) -> Json:
        status = "incomplete" if piece.end == "length" else "completed"
        return {**self._empty_item(), "status": status, "content": [_content(piece)]}

    def complete(self, choices: Sequence[Json], usage: Usage) -> Json:
        (item,) = choices
        details = None
        if item["status"] == "incomplete":
            details = {"reason": "max_output_tokens"}
        return {
            **self._response,
            "status": item["status"],
            "incomplete_details": details,
            "output": choices,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": usage.new_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.total_tokens,
            },
        }

    def first_events(self, n_texts: int) -> list[Json]:
        content = _content(Piece(0))
        item = self._empty_item()
        return [
            self._event("response.created", response=self._response),
            self._event("response.in_progress", response=self._response),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=content),
        ]

    def event(self, piece: Piece) -> Json:
        self._pieces.append(piece)
        return self._event(
            "response.output_text.delta",
            **self._place,
            delta=piece.text,
            logprobs=_content(piece)["logprobs"],
        )

    def last_events(self, usage: Usage) -> list[Json]:
        item = self.choice(Piece.join(self._pieces))
        (content,) = item["content"]
        response = self.complete([item], usage)
        return [
            self._event(
                "response.output_text.done",
                **self._place,
                text=content["text"],
                logprobs=content["logprobs"],
            ),
            self._event("response.content_part.done", **self._place, part=content),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{response['status']}", response=response),
        ]

    def error_event(self, error: RequestError) -> Json:
        # OpenAI's client raises an exception for an event with the field `error`.
        record = error.record["error"]
        return self._event("error", **record | {"type": "error"}, error=record)

    def encode(self, event: Json) -> bytes:
        name = str(event["type"]).encode()
        return b"event: " + name + b"\n" + super().encode(event)

    def _event(self, kind: str, **fields: Any) -> Json:
        """Create the next event."""
        event = {**fields, "type": kind, "sequence_number": self._n_events}
        self._n_events += 1
        return event

    def _empty_item(self) -> Json:
        """Return the message before its first text."""
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }


def _content(piece: Piece) -> Json:
    """Format a text as the content of a message."""
    logprobs = [
        token_logprobs(token) for token in piece.tokens if token.new.logprob is not None
    ]
    return {
        "type": "output_text",
        "text": piece.text,
        "annotations": [],
        "logprobs": logprobs,
    }
