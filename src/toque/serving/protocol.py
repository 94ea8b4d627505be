"""OpenAI's protocol: the fields that requests share, and the form of answers.

The server refuses a field that it does not support, unless its value has no effect.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from toque.cooking.recipe_form import SHIPPED, answer_schema
from toque.errors import ConfigError, DataError
from toque.models.generation.constraints import Constraint
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import ServedModel
from toque.serving.pieces import Piece
from toque.serving.request_errors import RequestError
from toque.sources.conversations import join_parts

Json = dict[str, Any]


def _check_is_off(value: object) -> object:
    """Check that the value of an unsupported field has no effect."""
    if value in (None, 0, False, {}, [], "", "none", {"type": "text"}):
        return value
    raise ValueError("this server does not support this field; leave it out")


Unused = Annotated[Any, AfterValidator(_check_is_off)]
"""Type of the fields that this server does not support."""
_TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=200)]
# Validation stops at the first wrong item, because a million wrong items took 14 s.
_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts: TypeAlias = str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
"""One or several prompts, as text or as token ids."""


class RequestPart(BaseModel):
    """Part of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(RequestPart):
    """Options of a stream. Toque adds no obfuscation."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class JsonSchema(RequestPart):
    """JSON schema of an answer."""

    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """JSON schema; None for the shipped schema with this `name`."""
    strict: bool | None = None  # no effect: an answer always follows its schema


class ResponseFormat(RequestPart):
    """Format of an answer: any text, any JSON object, or a JSON schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @property
    def requested_schema(self) -> Mapping[str, Any] | None:
        """JSON schema of the answer; None for any text.

        Raises:
            ConfigError: json_schema has neither a schema nor the name of a shipped schema.
        """
        if self.type == "text":
            return None
        if self.type == "json_object":
            return {"type": "object"}

        json_schema = self.json_schema
        if json_schema is not None:
            if json_schema.schema_ is not None:
                return json_schema.schema_
            if json_schema.name in SHIPPED:
                return answer_schema(json_schema.name)
        raise ConfigError(
            f"json_schema must have a schema or the name of a shipped schema: {', '.join(SHIPPED)}."
            ' Send {"name": ..., "schema": {...}}.'
        )


class Usage(NamedTuple):
    """Numbers of tokens of a request."""

    prompt_tokens: int
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        """Number of tokens of the prompts and the texts."""
        return self.prompt_tokens + self.new_tokens


class AnswerForm(ABC):
    """Form of one answer: a JSON object, or server-sent events in order."""

    end_mark: bytes = b""
    """Last bytes of a stream."""

    @abstractmethod
    def choice(self, piece: Piece) -> Json:
        """Format a complete text as an entry of the answer."""

    @abstractmethod
    def complete(self, choices: Sequence[Json], usage: Usage) -> Json:
        """Format a complete answer with the entries of its texts."""

    @abstractmethod
    def first_events(self, n_texts: int) -> list[Json]:
        """Return the events before the first piece."""

    @abstractmethod
    def event(self, piece: Piece) -> Json:
        """Format a piece as an event."""

    @abstractmethod
    def last_events(self, usage: Usage) -> list[Json]:
        """Return the events after the last piece."""

    @abstractmethod
    def error_event(self, error: RequestError) -> Json:
        """Format an error after the first event."""

    def encode(self, event: Json) -> bytes:
        """Encode an event for the stream."""
        return b"data: " + msgspec.json.encode(event) + b"\n\n"


class TextRequest(RequestPart, ABC):
    """Fields that all requests for texts share."""

    model_config = ConfigDict(allow_inf_nan=False, ser_json_inf_nan="null")
    prompt_field: ClassVar[str]
    schema_field: ClassVar[str]
    """Field with the JSON schema."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # None means 1
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[_TokenId, _Bias], Field(max_length=1024)] | None = None
    # Extensions of the protocol that other servers also have.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Notes from the client, which have no effect.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    @abstractmethod
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""

    @property
    @abstractmethod
    def requested_tokens(self) -> int | None:
        """Maximum tokens of a text; None for the limit in the model's training."""

    @property
    @abstractmethod
    def requested_format(self) -> ResponseFormat | None:
        """Format of the texts; None for any text."""

    @abstractmethod
    def answer_form(self, model: str) -> AnswerForm:
        """Create the form of the answer of a model."""

    @abstractmethod
    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the prompts, in another thread because 1 MiB of text takes a second."""

    async def compile_constraint(self, served: ServedModel) -> Constraint | None:
        """Compile the constraint for the schema in another thread; None without a schema.

        Raises:
            RequestError: The schema is invalid, or the model does not support it.
        """
        if self.requested_format is None:
            return None
        try:
            schema = self.requested_format.requested_schema
            if schema is None:
                return None
            return await run_in_threadpool(
                lambda: served.constraint_compiler.to_schema(schema)
            )
        except ConfigError as error:
            raise RequestError(400, str(error), param=self.schema_field) from error

    @property
    def n_texts(self) -> int:
        """Number of texts per prompt in the answer."""
        return 1

    @property
    def n_candidates(self) -> int:
        """Number of texts per prompt to choose from."""
        return 1

    @property
    def ranking(self) -> str | None:
        """Name of the score that ranks the texts; None for the default."""
        return None

    @property
    def echoes(self) -> bool:
        """True if the texts begin with their prompts."""
        return False

    @property
    def stops(self) -> list[str]:
        """Strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def options(self) -> GenerationOptions:
        """Return the sampling options. Choose a random seed if the request does not have one."""
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return GenerationOptions(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={
                int(id_): bias for id_, bias in (self.logit_bias or {}).items()
            },
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=seed,
        )


class TextPart(RequestPart):
    """Text of a message."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """Message of a conversation. Additional fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """Joined text of the message's parts."""
        if isinstance(self.content, list):
            return join_parts(part.text for part in self.content)
        return self.content or ""

    @property
    def fields(self) -> Json:
        """Additional fields with a value. Clients return earlier answers with empty fields."""
        extra = (self.model_extra or {}).items()
        return {
            name: value
            for name, value in extra
            if value not in (None, False, "", [], {})
        }

    @property
    def turn(self) -> Json:
        """Message in the form of the chat template. OpenAI's role `developer` becomes `system`."""
        role = "system" if self.role == "developer" else self.role
        return {**self.fields, "role": role, "content": self.text}


async def tokenize_prompts(served: ServedModel, prompts: Prompts) -> list[list[int]]:
    """Tokenize text prompts in another thread. Return prompts of ids unchanged."""
    each: list[Any] = [prompts]
    # An empty list is one empty prompt, which `check_prompt` refuses.
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        each = list(prompts)
    if not isinstance(each[0], str):
        return each
    return await run_in_threadpool(lambda: [served.prompt_ids(text) for text in each])


async def conversation_ids(
    served: ServedModel, messages: Sequence[Message], *, param: str
) -> list[int]:
    """Tokenize a conversation, or the last user message if the model has no chat template.

    Args:
        served: The model.
        messages: Messages of the conversation.
        param: Name of the request field with the messages.

    Raises:
        RequestError: The last user message is missing or empty, or the model does not support
            the conversation.
    """
    texts = [message.text for message in messages if message.role == "user"]
    if not texts or not texts[-1].strip():
        raise RequestError(
            400,
            f"{param} must contain a user message with text. Add one.",
            param=param,
        )

    if served.chat is None:
        _refuse_additional_fields(messages, param)
        last = texts[-1]
        return await run_in_threadpool(
            lambda: served.prompt_ids(served.to_prompt(last))
        )

    turns = [message.turn for message in messages]
    try:
        return await asyncio.wrap_future(served.chat.ids(turns))
    except DataError as error:
        raise RequestError(400, str(error), param=param) from error


def _refuse_additional_fields(messages: Sequence[Message], param: str) -> None:
    """Raise a RequestError if a message has fields that only a chat template could use."""
    for number, message in enumerate(messages, start=1):
        for name in message.fields:
            raise RequestError(
                400,
                f"{param}: this model was trained on single texts and does not support "
                f"{name[:100]!r} in message {number}. Leave the field out.",
                param=param,
            )
