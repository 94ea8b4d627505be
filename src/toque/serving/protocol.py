"""OpenAI's protocol: the fields of requests that have an effect here, and the JSON of answers.

A field that this server would have to ignore is refused by name, unless it asks for nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from toque.cooking.answer_schemas import SHIPPED, answer_schema
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, DataError
from toque.models.generation.constraints import HeldText
from toque.models.generation.live_rows import End, NewToken
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import ServedModel
from toque.serving.server import RequestError
from toque.serving.token_bytes import bytes_of_token
from toque.sources.conversations import join_parts

Json = dict[str, Any]
_MOST_ERRORS: Final = 100
"""Mistakes that are named one by one; half a million, in 1 MiB, would hold up everybody else."""


class TextToken(NamedTuple):
    """A token as it stands in its text; the texts of all tokens side by side are the text."""

    codec: Codec
    new: NewToken
    text: str  # empty where a character's bytes are not all there yet; the last has it whole
    others: Sequence[str]  # the texts that the likeliest tokens would have had in this place

    @property
    def likeliest(self) -> list[tuple[int, str, float]]:
        """The likeliest tokens, texts and log-probabilities, the chosen token among them."""
        new, pairs = self.new, zip(self.new.likeliest, self.others, strict=True)
        best = [
            (token, self.text if token == new.token else text, log) for (token, log), text in pairs
        ]
        chosen = any(token == new.token for token, _ in new.likeliest)
        if chosen or new.logprob is None:
            return best
        return [*best, (new.token, self.text, new.logprob)]


@dataclass(frozen=True)
class Piece:
    """More of one text; an answer at once has one piece of each."""

    index: int  # number of the text in its request
    text: str = ""  # may be empty: characters and stop strings are held back until they are whole
    tokens: Sequence[TextToken] = ()  # tokens it was written with, the end token left out
    offset: int = 0  # characters of the tokens before these
    end: End | None = None  # set with the last piece of a text

    @property
    def is_news(self) -> bool:
        """True if a client sees a difference."""
        return bool(self.text or self.end or any(t.new.logprob is not None for t in self.tokens))

    @classmethod
    def joined(cls, pieces: Sequence[Piece]) -> Piece:
        """The pieces of one text as one."""
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        return cls(pieces[-1].index, text, tokens, end=pieces[-1].end)


def _asks_for_nothing(value: object) -> object:
    if value in (None, 0, False, {}, [], "", "none", {"type": "text"}):
        return value
    raise ValueError("this server cannot do that; leave the field out")


_Unused = Annotated[Any, AfterValidator(_asks_for_nothing)]
_Stop = Annotated[str, Field(min_length=1, max_length=200)]
# The first wrong item ends a list: a million of them took 14 s.
_Ids = Annotated[list[int], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[str], Field(fail_fast=True)]


class _Part(BaseModel):
    """Part of a request, of whose fields none is unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _StreamOptions(_Part):
    include_usage: bool = False
    include_obfuscation: bool | None = None


class _JsonSchema(_Part):
    name: Annotated[str, Field(max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # None: that of `name`
    strict: bool | None = None  # an answer always keeps to its schema


class _ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: _JsonSchema | None = None

    @property
    def schema_asked(self) -> Mapping[str, Any] | None:
        """The schema that a text shall be JSON of; None where any text will do."""
        if self.type != "json_schema":
            return {"type": "object"} if self.type == "json_object" else None
        own = self.json_schema
        if own is None or (own.schema_ is None and own.name not in SHIPPED):
            raise ConfigError(
                f"json_schema has no schema, and none of {', '.join(SHIPPED)}, which this server "
                'has itself, is its name. Send {"name": ..., "schema": {...}}.'
            )
        return answer_schema(own.name) if own.schema_ is None else own.schema_


class TextRequest(_Part, ABC):
    """A request for texts: the fields that both kinds have, and the form of its answers."""

    model_config = ConfigDict(allow_inf_nan=False, ser_json_inf_nan="null")
    id_prefix: ClassVar[str]
    answer_object: ClassVar[str]
    event_object: ClassVar[str]
    prompt_field: ClassVar[str]
    opens_texts: ClassVar[bool] = False  # True: a stream begins each text with an empty event

    model: str
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None  # 1 when left out
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    # Other servers' additions to the protocol.
    top_k: Annotated[int, Field(ge=0)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    best_of: Annotated[int, Field(ge=0)] | None = None  # 0 and 1 choose nothing
    best_by: str | None = None  # our own addition: the score; likelihood when left out
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: _ResponseFormat | None = None  # other servers' addition to /v1/completions
    # What callers note for themselves.
    user: str | None = None
    metadata: dict[str, str] | None = None
    frequency_penalty: _Unused = None
    presence_penalty: _Unused = None
    logit_bias: _Unused = None

    @property
    @abstractmethod
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""

    @abstractmethod
    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """The prompts as the model reads them, made in another thread: 1 MiB takes a second."""

    async def held(self, served: ServedModel) -> HeldText | None:
        """The form that the texts are held to, compiled in another thread; None for any text."""
        try:
            wanted = self.response_format or _ResponseFormat()
            if (schema := wanted.schema_asked) is None:
                return None
            return await run_in_threadpool(lambda: served.vocabulary.to_schema(schema))
        except ConfigError as error:
            raise RequestError(400, str(error), param="response_format") from error

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest text; None for the length the model was trained on."""
        return self.max_tokens

    @property
    def echoes(self) -> bool:
        """True where the texts begin with their prompts."""
        return False

    @property
    def stops(self) -> list[str]:
        """The strings that end a text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def wants_usage(self) -> bool:
        """True where a stream shall end with what it cost."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> GenerationOptions:
        """The choice of tokens; without a seed, every request draws another."""
        temperature = 1.0 if self.temperature is None else self.temperature
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return GenerationOptions(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            seed=seed,
        )

    @abstractmethod
    def choice(self, piece: Piece, *, whole: bool) -> Json:
        """One whole text of an answer, or a piece of it in a stream."""


class CompletionRequest(TextRequest):
    """POST /v1/completions: prompts as they are."""

    id_prefix = "cmpl"
    answer_object = event_object = "text_completion"
    prompt_field = "prompt"

    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0 writes nothing: the prompt alone
    echo: bool | None = None
    suffix: _Unused = None

    @property
    def echoes(self) -> bool:
        """True where the texts begin with their prompts."""
        return bool(self.echo)

    @property
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""
        return self.logprobs

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """The prompts as the model reads them; ids are taken as they are."""
        prompts: list[Any] = [self.prompt] if isinstance(self.prompt, str) else list(self.prompt)
        if not prompts or isinstance(prompts[0], int):
            return [prompts]  # one prompt of ids, which is refused where it is empty
        return await run_in_threadpool(
            lambda: [served.prompt_ids(one) if isinstance(one, str) else one for one in prompts]
        )

    def choice(self, piece: Piece, *, whole: bool) -> Json:
        """A whole text and a piece of it have the same form."""
        logs = None if self.logprobs is None else _logprobs(piece)
        return _choice(piece, {"text": piece.text}, logs)


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    """A message, whose other fields are for the chat template."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[_TextPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return join_parts(part.text for part in self.content)
        return self.content or ""

    @property
    def fields(self) -> Json:
        """The other fields that are filled: clients send answers back with empty ones."""
        extra = (self.model_extra or {}).items()
        return {name: value for name, value in extra if value not in (None, False, "", [], {})}

    @property
    def turn(self) -> Json:
        """The message as chat templates know it; OpenAI's `developer` is their `system`."""
        role = "system" if self.role == "developer" else self.role
        return {**self.fields, "role": role, "content": self.text}


class ChatRequest(TextRequest):
    """POST /v1/chat/completions: a conversation, in the form the model was trained on."""

    id_prefix, answer_object, event_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    prompt_field, opens_texts = "messages", True

    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None  # overrides max_tokens
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: _Unused = None
    tool_choice: _Unused = None
    functions: _Unused = None
    # What is done anyway: nothing is stored, there are no tools to call, and no model here reasons
    # apart from its text.
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None

    @property
    def n_likeliest(self) -> int | None:
        """Tokens to report at every place; None for no probabilities."""
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest text; None for the length the model was trained on."""
        return self.max_completion_tokens or self.max_tokens

    async def prompt_ids(self, served: ServedModel) -> list[list[int]]:
        """The conversation: all its turns where the model's template takes them, else the last."""
        texts = [message.text for message in self.messages if message.role == "user"]
        if not texts or not texts[-1].strip():
            raise RequestError(
                400, "messages hold nothing that a user says; add one.", param="messages"
            )
        if served.chat is None:
            for n, message in enumerate(self.messages):
                for name in message.fields:
                    raise RequestError(
                        400,
                        f"messages: {name[:100]!r} of message {n + 1} cannot be read by this "
                        "model, which was trained on single texts. Leave the field out.",
                        param="messages",
                    )
            return [await run_in_threadpool(lambda: served.prompt_ids(served.asked(texts[-1])))]
        turns = [message.turn for message in self.messages]
        try:
            return [await asyncio.wrap_future(served.chat.ids(turns))]
        except DataError as error:
            raise RequestError(400, str(error), param="messages") from error

    def choice(self, piece: Piece, *, whole: bool) -> Json:
        """A text as a message; a piece of it as a delta, the first of which names the speaker."""
        content: Json = {"content": piece.text} if piece.text else {}
        if whole:
            content = {"role": "assistant", "content": piece.text, "refusal": None}
        elif not piece.is_news:
            content = {"role": "assistant", "content": ""}
        logs = None
        if self.logprobs:
            logs = {"content": [self._logprob(token) for token in piece.tokens], "refusal": None}
        return _choice(piece, {"message" if whole else "delta": content}, logs)

    def _logprob(self, token: TextToken) -> Json:
        best = [_chat_logprob(token.codec, *one) for one in token.likeliest]
        new = token.new
        chosen = _chat_logprob(token.codec, new.token, token.text, new.logprob)
        return {**chosen, "top_logprobs": best}


def _choice(piece: Piece, content: Json, logprobs: Json | None) -> Json:
    return {"index": piece.index, **content, "logprobs": logprobs, "finish_reason": piece.end}


def _chat_logprob(codec: Codec, token: int, text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(bytes_of_token(codec, token, text))}


def _logprobs(piece: Piece) -> Json:
    """Log-probabilities as /v1/completions has them: four lists side by side."""
    likeliest, offsets, offset = list[Json | None](), [], piece.offset
    for token in piece.tokens:
        best: dict[str, float | None] = {}
        for _, text, log in token.likeliest:
            best.setdefault(text, log)  # of texts that are equal, the likeliest
        known = token.new.logprob is not None  # of all but the first token of a prompt
        likeliest.append(best | {token.text: token.new.logprob} if known else None)
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in piece.tokens],
        "token_logprobs": [token.new.logprob for token in piece.tokens],
        "top_logprobs": likeliest,
        "text_offset": offsets,
    }


R = TypeVar("R", bound=BaseModel)


def parsed(kind: type[R], body: bytes) -> R:
    """A request from its JSON; RequestError 400 names the first field that is wrong."""
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
        param = str(first["loc"][0])[:100] if first["loc"] else None
        message = f"{param}: {first['msg']}." if param else f"{first['msg']}."
        if first["type"] == "extra_forbidden":
            message = f"Unrecognized request argument supplied: {param}."
        raise RequestError(400, message, param=param) from error
