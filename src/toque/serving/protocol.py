"""Requests of the OpenAI protocol: the fields that have an effect here, and no others.

A field that is absent or null takes its default. One that this server would have to ignore is
refused by name, unless it asks for nothing (a penalty of 0, an empty `logit_bias`).
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from toque.models.generation.sampling import TokenChooser
from toque.serving.errors import RequestError


def _asks_for_nothing(value: object) -> object:
    if value in (None, 0, False, {}, [], "", "none", {"type": "text"}):
        return value
    raise ValueError("this server cannot do that; leave the field out")


Unused = Annotated[Any, AfterValidator(_asks_for_nothing)]
"""A field of the protocol that is accepted only where it asks for nothing."""
Stop = Annotated[str, Field(min_length=1, max_length=200)]
_MOST_ERRORS: Final = 100
"""Told one by one; a body of 1 MiB may hold half a million wrong keys or items, whose sentences
take seconds to make, while nobody else is answered."""


class StreamOptions(BaseModel):
    """What a stream ends with."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    include_usage: bool = False
    include_obfuscation: bool | None = None


class Sampling(BaseModel, ABC):
    """What both kinds of requests have."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, ser_json_inf_nan="null"
    )
    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 takes the likeliest token every time; 1 when left out."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    """No field of the protocol's, and an addition that other servers have, too."""
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # What callers note for themselves.
    user: str | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: Unused = None
    presence_penalty: Unused = None
    logit_bias: Unused = None

    @property
    @abstractmethod
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage

    def chooser(self) -> TokenChooser:
        """How tokens are chosen; without a seed, every request draws another."""
        temperature = 1.0 if self.temperature is None else self.temperature
        if temperature == 0:
            return TokenChooser()
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return TokenChooser("sample", temperature, self.top_k, self.top_p or 1.0, seed)


# The first wrong item ends a list: a million of them took 14 s.
Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class CompletionRequest(Sampling):
    """POST /v1/completions: prompts as they are."""

    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Unused = None
    echo: Unused = None
    suffix: Unused = None

    @property
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts, or ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [self.prompt]  # type: ignore[list-item]  # one prompt of ids, not empty
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    """Part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """What it says."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatRequest(Sampling):
    """POST /v1/chat/completions: a conversation, in the form the model was trained on."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens, which it overrides."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    store: bool | None = None
    tools: Unused = None
    tool_choice: Unused = None
    functions: Unused = None
    response_format: Unused = None

    @property
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def turns(self) -> list[dict[str, str]]:
        """All that was said, as a chat template reads it."""
        return [{"role": message.role, "content": message.text} for message in self.messages]

    @property
    def question(self) -> str:
        """The last thing the user said, for models that were trained on single requests."""
        said = [message.text for message in self.messages if message.role == "user"]
        return said[-1] if said else ""


R = TypeVar("R", bound=BaseModel)


def parsed(kind: type[R], body: bytes) -> R:
    """A request from its JSON.

    Raises:
        RequestError: 400, it is no JSON, or a field is missing, unknown or out of range.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MOST_ERRORS:
            raise RequestError(
                400,
                f"{error.error_count():,} of the body's fields are unknown, missing or of the "
                "wrong kind. Send the fields of OpenAI's protocol alone.",
            ) from None
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        param = str(first["loc"][0]) if first["loc"] else None
        where = f"{param}: " if param else ""
        if first["type"] == "extra_forbidden":
            message = f"Unrecognized request argument supplied: {str(param)[:100]}."
        else:
            message = f"{where}{first['msg']}."
        raise RequestError(400, message, param=param and param[:100]) from error
