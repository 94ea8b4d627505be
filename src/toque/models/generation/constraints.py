"""Constrained decoding with llguidance: a mask of the logits forces texts to match a form.

A form is a JSON schema, or a regular expression for each part of the text. The logits of tokens
that must not come next become minus infinity before a token is chosen.

Shapes: n live rows, V vocabulary size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from toque.errors import ConfigError, needing

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

Form = Generator[str, str, None]
r"""Generator of a pattern for each part of a text. It receives the text of each finished part.

`re` and Rust's regex crate must interpret the patterns equally. Patterns have no anchors. A line
break is "\n", and "." is any other character. Every part except the last ends at the first match
of its pattern.
"""
_MAX_SCHEMA_LENGTH: Final = 100_000
"""Maximum length of a schema in characters. 90,000 compiled in 1.7 s, 270,000 in 19 s.
"""
_MAX_LEXER_STATES: Final = 50_000
"""Maximum number of lexer states of a schema. Each needs 1 to 2 KB."""
_MAX_REMAINDERS: Final = 10_000
"""Maximum number of remainders of a schema's `multipleOf` values.

llguidance searches the remainders before it counts states. 9,973 took 0.04 s, 999,983 took 10 s and
419 MB, and 99,999,989 crashed the process.
"""
_MAX_COMPILED: Final = 64
"""Maximum number of compiled grammars to cache per vocabulary."""
# Most JSON in training texts is on one line. If spaces were allowed, a weak model might generate
# nothing else.
_ONE_LINE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_JSON_TEXT: Final = '{}[]":,-.0123456789truefalsenull'
"""Characters that any JSON text may need."""


class TextCodec(Protocol):
    """Conversion between a model's tokens and text, implemented by `Codec`."""

    tokenizer_json: str
    newline_id: int | None
    """Token that marks a line break; None if the vocabulary contains "\\n"."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end a text."""

    def encode(self, text: str) -> Sequence[int]:
        """Convert a text to tokens."""

    def decode(self, ids: Iterable[int]) -> str:
        """Convert tokens to a text."""


class ConstraintCompiler:
    """Compiler of constraints for a vocabulary, with a cache of compiled grammars."""

    def __init__(self, codec: TextCodec) -> None:
        self._lib = _import_llguidance()
        self.codec = codec
        self.tokens: LLTokenizer = _convert_vocabulary(codec)
        # A line may start with "▁". Decoders remove it, but llguidance reads it as a space.
        first_bytes = self.tokens.decode_bytes([*codec.encode("a")])
        self._starts_with_space = first_bytes.startswith(b" ")
        # With a line-break token, every line is tokenized like the start of a text.
        has_marker = codec.newline_id is not None
        self._lines_start_with_space = self._starts_with_space and has_marker
        # Prompts and schemas repeat.
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def to_form(self, form: Form) -> Constraint:
        """Create the constraint for a text that consists of the parts of a form."""
        return Constraint(self, self.create_matcher(next(form)), form)

    def to_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """Create the constraint for JSON that follows a schema, on one line.

        Raises:
            ConfigError: llguidance cannot compile the schema, or the vocabulary cannot encode it.
        """
        # llguidance reads options from the schema. Override them, because it may be untrusted.
        try:
            text = json.dumps({**schema, "x-guidance": _ONE_LINE}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"The JSON schema is not valid JSON: {error}. Correct the schema."
            ) from error
        _check_size(schema, text)
        self._check_vocabulary(schema)

        space = '" "? ' if self._starts_with_space else ""
        grammar = f"start: {space}json\njson: %json {text}"
        matcher = self._compiled(grammar, _MAX_LEXER_STATES)
        if matcher.is_error():
            raise ConfigError(
                f"The JSON schema is not supported: {_error_of(matcher)}. Remove or replace the "
                "parts that llguidance does not support, and check each answer yourself."
            )
        return Constraint(self, matcher.deep_copy())

    def create_matcher(self, pattern: str, *, continues: bool = False) -> LLMatcher:
        """Create a matcher for a pattern at the start of a text, or after a finished part."""
        starts_line = not continues or self._lines_start_with_space
        if self._starts_with_space and starts_line:
            pattern = f" ?{pattern}"
        if self._lines_start_with_space:
            pattern = pattern.replace(r"\n", r"\n ?")
        grammar = self._lib.LLMatcher.grammar_from_regex(pattern)
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: str, max_states: int | None = None) -> LLMatcher:
        limits = self._lib.LLParserLimits(
            max_lexer_states=max_states, verbose_errors=False
        )
        matcher = self._lib.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the slowest step; copies share its result
        return cast("LLMatcher", matcher)

    def _check_vocabulary(self, schema: Mapping[str, Any]) -> None:
        """Check that the vocabulary can encode JSON that follows a schema.

        Raises:
            ConfigError: A character has no tokens.
        """
        needed = {*_JSON_TEXT, *_literals(schema)}
        missing = [
            character for character in sorted(needed) if not self._can_encode(character)
        ]
        if missing:
            raise ConfigError(
                f"This model's vocabulary cannot encode {' '.join(missing[:20])}, which JSON "
                "output with this schema needs. Use a model with another tokenizer, or generate "
                "without a schema."
            )

    def _can_encode(self, character: str) -> bool:
        decoded = self.tokens.decode_bytes(self.tokens.tokenize_str(character))
        return decoded.strip() == character.encode("utf-8", "replace").strip()


@dataclass(eq=False)
class Constraint:
    """Constraint of one text, with the state of its form while the text is generated."""

    compiler: ConstraintCompiler
    matcher: LLMatcher
    form: Form | None = None
    """Generator of the next parts; None for a schema, or after the last part."""
    fault: str = ""
    """Error as the predicate of a message with the subject "The text"; "" without an error."""
    _n_read: int = 0  # tokens that matchers have read
    _part_start: int = 0  # first token of the current part

    def copy(self) -> Constraint:
        """Copy the constraint of a schema for another text."""
        return Constraint(self.compiler, self.matcher.deep_copy())

    def read(self, answer: Sequence[int]) -> None:
        """Read the answer's tokens since the last call."""
        for token in answer[self._n_read :]:
            if self.update_fault():
                return
            self.matcher.consume_token(token)
            self._n_read += 1
            if self.form is not None and self.matcher.is_accepting():
                part = answer[self._part_start : self._n_read]
                self._start_next_part(self.form, self.compiler.codec.decode(part))

    def _start_next_part(self, form: Form, text: str) -> None:
        """Match the part of the form after a part with this text, if there is one."""
        try:
            pattern = form.send(text)
        except StopIteration:
            self.form = None
        else:
            self.matcher = self.compiler.create_matcher(pattern, continues=True)
            self._part_start = self._n_read

    def update_fault(self) -> str:
        """Update `fault` from the matcher, and return it."""
        if self.matcher.is_error():
            self.fault = (
                f"cannot match its form: {_error_of(self.matcher)}. Relax the form (fewer "
                "ingredients, simpler names, a simpler schema), or generate without it."
            )
        return self.fault


def mask_logits(
    logits: Tensor, texts: Sequence[tuple[int, Constraint, Sequence[int]]]
) -> None:
    """Set logits [n, V] of tokens that must not come next to minus infinity.

    Do not use the logits of a row if its constraint has a fault afterwards.

    Args:
        logits: [n, V], changed in place.
        texts: Row, constraint and answer so far of each constrained text. All constraints are from
            one compiler.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    matchers = []
    for index, (_, constraint, answer) in enumerate(texts):
        constraint.read(answer)
        matchers.append((constraint.matcher, index))
    size = texts[0][1].compiler.tokens.vocab_size
    bits = allocate_token_bitmask(len(texts), size)
    fill_next_token_bitmask_par(_executor(), matchers, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")

    width = min(size, logits.shape[1])
    forbidden = np.zeros(logits.shape, np.bool_)
    for (row, constraint, _), allowed_tokens in zip(texts, allowed, strict=True):
        if not constraint.update_fault():
            forbidden[row] = True  # also tokens after `width`
            forbidden[row, :width] = allowed_tokens[:width] == 0
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


def _check_size(schema: Mapping[str, Any], text: str) -> None:
    """Check that a schema does not need too much time or memory. `text` is the schema as JSON.

    Raises:
        ConfigError: The schema is too large.
    """
    if len(text) > _MAX_SCHEMA_LENGTH:
        raise ConfigError(
            f"The JSON schema has {len(text):,} characters, more than the allowed "
            f"{_MAX_SCHEMA_LENGTH:,}. Remove the parts that the answers do not need."
        )
    if _count_remainders(schema) > _MAX_REMAINDERS:
        raise ConfigError(
            f"The JSON schema's multipleOf values have more than {_MAX_REMAINDERS:,} remainders in "
            "total, which needs too much memory. Use smaller or rounder numbers, or remove "
            "multipleOf and check each answer yourself."
        )


def _objects_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all objects in a schema, including the schema itself."""
    stack: list[Any] = [schema]
    while stack:  # no recursion, since the depth of a schema is not limited
        part = stack.pop()
        if isinstance(part, Mapping):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _literals(schema: Mapping[str, Any]) -> str:
    """Collect the literal texts of a schema's answers: property names and fixed values."""
    literals = ""
    for part in _objects_in(schema):
        properties = part.get("properties")
        names = [*properties] if isinstance(properties, Mapping) else None
        values = [part.get("const"), part.get("enum"), names]
        literals += json.dumps(values, ensure_ascii=False)
    return literals


def _count_remainders(schema: Mapping[str, Any]) -> int:
    """Count the possible remainders of a number divided by all `multipleOf` values of a schema.

    The count is the least common multiple of the values' digits. Powers of ten are ignored.

    >>> _count_remainders({"allOf": [{"multipleOf": 0.25}, {"multipleOf": 3000}]})
    75
    """
    divisors = []
    for part in _objects_in(schema):
        step = part.get("multipleOf")
        if isinstance(step, int | float):
            mantissa = repr(step).partition("e")[0]
            digits = mantissa.replace(".", "").strip("-0")
            if digits.isdecimal():  # not "inf" or ""
                divisors.append(int(digits))
    # llguidance searches all multiples together, in `anyOf` as in `allOf`.
    return math.lcm(*divisors)


def _error_of(matcher: LLMatcher) -> str:
    """Return a matcher's error without its position in the grammar, which users do not see."""
    error = matcher.get_error().partition("\n   1 |")[0].partition("\n<state>")[0]
    reason = error.rpartition("failed to compile JSON schema: ")[2]
    return " ".join(reason.split()).rstrip(".")


@cache
def _executor() -> LLExecutor:
    """Return the thread pool that fills masks."""
    return cast("LLExecutor", _import_llguidance().LLExecutor())


def _import_llguidance() -> Any:
    with needing("structured", "Constrained generation"):
        import llguidance
    return llguidance


def _convert_vocabulary(codec: TextCodec) -> LLTokenizer:
    """Convert a vocabulary to llguidance's format.

    Raises:
        ConfigError: llguidance does not support the tokenizer.
    """
    lib = _import_llguidance()
    tokenizer = json.loads(codec.tokenizer_json)
    decoder = tokenizer.get("decoder") or {}
    drops_spaces = decoder.get("type") == "Metaspace"
    if drops_spaces:
        # llguidance does not support Metaspace, but it supports this equivalent sequence.
        space = {
            "type": "Replace",
            "pattern": {"String": decoder["replacement"]},
            "content": " ",
        }
        parts = [space, {"type": "ByteFallback"}, {"type": "Fuse"}]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": parts}

    end_ids = sorted(codec.end_ids)
    try:
        tokens: LLTokenizer = lib.LLTokenizer(json.dumps(tokenizer), eos_token=end_ids)
    except ValueError as error:
        raise ConfigError(
            f"llguidance does not support this model's tokenizer: {error}. Constrained generation "
            "needs a byte-level, SentencePiece BPE or unigram vocabulary. Generate without "
            "constraints."
        ) from error
    if not drops_spaces and codec.newline_id is None:
        return tokens

    # Such a tokenizer has no token for a single " " or "\n", which llguidance requires.
    pieces = _Pieces(tokens, codec)
    wrapper = lib.TokenizerWrapper(pieces)
    return cast("LLTokenizer", lib.LLTokenizer(wrapper, eos_token=end_ids))


class _Pieces:
    """Vocabulary as the bytes of its tokens. llguidance reads the public attributes."""

    def __init__(self, tokens: LLTokenizer, codec: TextCodec) -> None:
        ids = range(tokens.vocab_size)
        self.eos_token_id = min(codec.end_ids)
        self.bos_token_id = None
        self.tokens = [tokens.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokens.is_special_token(token)
        ]
        if codec.newline_id is not None:
            # The marker of line breaks is text, even if the vocabulary declares it special.
            self.tokens[codec.newline_id] = b"\n"
            if codec.newline_id in self.special_token_ids:
                self.special_token_ids.remove(codec.newline_id)
        special_ids = set(self.special_token_ids)
        self._ids = {
            piece: token
            for token, piece in enumerate(self.tokens)
            if token not in special_ids
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize text greedily, up to the first byte that no token begins with."""
        ids: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids
