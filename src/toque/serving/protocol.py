"""OpenAI's protocol: the supported fields of requests, and the JSON of answers.

The server refuses a field that it does not support, unless its value has no effect.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from toque.cooking.recipe_form import SHIPPED, answer_schema
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, DataError
from toque.models.generation.constraints import Constraint
from toque.models.generation.live_rows import End, NewToken
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import ServedModel
from toque.serving.request_errors import RequestError
from toque.serving.token_bytes import bytes_of_token
from toque.sources.conversations import join_parts

Json = dict[str, Any]


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


def _check_is_off(value: object) -> object:
    """Check that the value of an unsupported field has no effect."""
    if value in (None, 0, False, {}, [], "", "none", {"type": "text"}):
        return value
    raise ValueError("this server does not support this field; leave it out")


_Unused = Annotated[Any, AfterValidator(_check_is_off)]
"""Type of the fields that this server does not support."""
_TokenId = Annotated[str, Field(pattern=r"^\d{1,9}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]
_Stop = Annotated[str, Field(min_length=1, max_length=200)]
# Validation stops at the first wrong item, because a million wrong items took 14 s.
_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]


class _Part(BaseModel):
    """Part of a request. Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _JsonSchema(_Part):
    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """JSON schema; None for the shipped schema with this `name`."""
    strict: bool | None = None  # no effect: an answer always follows its schema


class _ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

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


class TextRequest(_Part, ABC):
    """Fields that both kinds of completion request share, and the form of their answers."""

    model_config = ConfigDict(allow_inf_nan=False, ser_json_inf_nan="null")
    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    event_object: ClassVar[str]
    prompt_field: ClassVar[str]
    opens_texts: ClassVar[bool] = False
    """True if a stream begins each text with an event without text."""

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
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=0)] | None = None  # 0 and 1 have no effect
    best_by: str | None = None  # our extension; None means likelihood
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: _ResponseFormat | None = None  # an extension in /v1/completions
    # Notes from the client, which have no effect.
    user: str | None = None
    metadata: dict[str, str] | None = None

    @property
    @abstractmethod
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""

    @abstractmethod
    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the prompts, in another thread because 1 MiB of text takes a second."""

    async def compile_constraint(self, served: ServedModel) -> Constraint | None:
        """Compile the constraint for the schema in another thread; None without a schema.

        Raises:
            RequestError: The schema is invalid, or the model does not support it.
        """
        if self.response_format is None:
            return None
        try:
            schema = self.response_format.requested_schema
            if schema is None:
                return None
            return await run_in_threadpool(
                lambda: served.constraint_compiler.to_schema(schema)
            )
        except ConfigError as error:
            raise RequestError(400, str(error), param="response_format") from error

    @property
    def requested_tokens(self) -> int | None:
        """Maximum tokens of a text; None for the limit in the model's training."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """True if the texts begin with their prompts."""
        return False

    @property
    def stops(self) -> list[str]:
        """Strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

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

    @abstractmethod
    def choice(self, piece: Piece, *, is_complete: bool) -> Json:
        """Format a complete text, or a piece of it in a stream, as an entry of `choices`."""


class CompletionRequest(TextRequest):
    """POST /v1/completions: prompts without a template."""

    id_prefix = "cmpl"
    answer_object = event_object = "text_completion"
    prompt_field = "prompt"

    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0 returns only the prompt
    echo: bool | None = None
    suffix: _Unused = None

    @property
    def echoes(self) -> bool:
        """True if the texts begin with their prompts."""
        return bool(self.echo)

    @property
    def n_logprobs(self) -> int | None:
        """Most likely tokens to report per position; None for no log-probabilities."""
        return self.logprobs

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """Tokenize text prompts in another thread. Return prompts of ids unchanged."""
        prompts = self._list_prompts()
        if not isinstance(prompts[0], str):
            return prompts
        return await run_in_threadpool(
            lambda: [served.prompt_ids(prompt) for prompt in prompts]
        )

    def _list_prompts(self) -> list[Any]:
        """Return the texts, or the lists of ids, of all prompts."""
        prompt = self.prompt
        is_several = (
            isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        )
        # `limit_answer` refuses an empty list, which is one empty prompt.
        return list(prompt) if is_several else [prompt]

    def choice(self, piece: Piece, *, is_complete: bool) -> Json:
        """Format a text or a piece as an entry of `choices`. Both have the same form."""
        logs = None if self.logprobs is None else _logprobs(piece)
        return _choice(piece, {"text": piece.text}, logs)


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    """Message of a conversation. Additional fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)] | None = None

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


class ChatRequest(TextRequest):
    """POST /v1/chat/completions: a conversation in the training format."""

    id_prefix = "chatcmpl"
    answer_object = "chat.completion"
    event_object = "chat.completion.chunk"
    prompt_field = "messages"
    opens_texts = True

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    # Overrides max_tokens.
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: _Unused = None
    tool_choice: _Unused = None
    functions: _Unused = None
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
        """Tokenize the conversation, or the last user message if the model has no chat template.

        Raises:
            RequestError: The last user message is missing or empty, or the model does not support
                the conversation.
        """
        texts = [message.text for message in self.messages if message.role == "user"]
        if not texts or not texts[-1].strip():
            raise RequestError(
                400,
                "messages must contain a user message with text. Add one.",
                param="messages",
            )

        if served.chat is None:
            self._refuse_additional_fields()
            last = texts[-1]
            prompt = await run_in_threadpool(
                lambda: served.prompt_ids(served.to_prompt(last))
            )
            return [prompt]

        turns = [message.turn for message in self.messages]
        try:
            return [await asyncio.wrap_future(served.chat.ids(turns))]
        except DataError as error:
            raise RequestError(400, str(error), param="messages") from error

    def _refuse_additional_fields(self) -> None:
        """Raise a RequestError if a message has fields that only a chat template could use."""
        for number, message in enumerate(self.messages, start=1):
            for name in message.fields:
                raise RequestError(
                    400,
                    "messages: this model was trained on single texts and does not support "
                    f"{name[:100]!r} in message {number}. Leave the field out.",
                    param="messages",
                )

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
                "content": [_token_logprobs(token) for token in piece.tokens],
                "refusal": None,
            }
        return _choice(piece, {"message" if is_complete else "delta": content}, logs)


def _token_logprobs(token: TextToken) -> Json:
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
