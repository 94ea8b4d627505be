"""Constrained decoding: texts that match a form, enforced by a mask of the logits (llguidance).

A form is a JSON schema, or a pattern for each part of the text. The logits of tokens that must not
come next become minus infinity before a token is chosen. Letters: n live rows, V vocabulary.
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
r"""Generator of the patterns of a text's parts. It receives the text of each finished part.

`re` and Rust's regex crate must interpret the patterns equally. Patterns have no anchors. A line
break is "\n", and "." is any other character. Every part except the last ends at the first match
of its pattern.
"""
# characters: 90,000 compiled in 1.7 s, 270,000 in 19 s.
_MAX_SCHEMA_LENGTH: Final = 100_000
_MAX_LEXER_STATES: Final = 50_000  # lexer states of a schema, at 1 to 2 KB each
_MAX_REMAINDERS: Final = 10_000
"""Maximum number of remainders of a schema's multiples.

llguidance searches the remainders before it counts any state. 9,973 took 0.04 s, 999,983 took 10 s
and 419 MB, and 99,999,989 ended the process.
"""
_MAX_COMPILED: Final = 64  # grammars cached per vocabulary
# Most JSON in texts is on one line. A weak model could write only spaces if they were allowed.
_ONE_LINE: Final = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_JSON_TEXT: Final = '{}[]":,-.0123456789truefalsenull'


class Spelling(Protocol):
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

    def __init__(self, spelling: Spelling) -> None:
        self._lib = _library()
        self.spelling = spelling
        self.tokens: LLTokenizer = _tokens_of(spelling)
        # A line may start with "▁". Decoders remove it, but llguidance reads it as a space.
        first_bytes = self.tokens.decode_bytes([*spelling.encode("a")])
        self._starts_with_space = first_bytes.startswith(b" ")
        has_marker = spelling.newline_id is not None
        self._line_break = r"\n ?" if self._starts_with_space and has_marker else r"\n"
        # Prompts and schemas repeat.
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def to_form(self, form: Form) -> Constraint:
        """Create the constraint of a text that consists of the parts of a form."""
        return Constraint(self, self.matcher(next(form)), form)

    def to_schema(self, schema: Mapping[str, Any]) -> Constraint:
        """Create the constraint of a text that is JSON of a schema, on one line.

        Raises:
            ConfigError: llguidance cannot compile the schema, or the vocabulary cannot write it.
        """
        # llguidance reads its options from the schema: override the options of untrusted schemas.
        try:
            text = json.dumps({**schema, "x-guidance": _ONE_LINE}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"The JSON schema is not valid JSON: {error}. Correct the schema."
            ) from error
        if len(text) > _MAX_SCHEMA_LENGTH:
            raise ConfigError(
                f"The JSON schema has {len(text):,} characters, more than the allowed "
                f"{_MAX_SCHEMA_LENGTH:,}. Remove the parts that the answers do not need."
            )
        if _count_remainders(schema) > _MAX_REMAINDERS:
            raise ConfigError(
                f"The JSON schema's multipleOf values have more than {_MAX_REMAINDERS:,} "
                "remainders together, which needs too much memory. Use smaller or rounder numbers, "
                "or remove multipleOf and check each answer yourself."
            )
        needed = {*_JSON_TEXT, *_literals(schema)}
        missing = [
            character for character in sorted(needed) if not self._can_write(character)
        ]
        if missing:
            raise ConfigError(
                f"This model's vocabulary cannot write {' '.join(missing[:20])}, which JSON of "
                "this schema needs. Use a model with another tokenizer, or generate without a "
                "schema."
            )

        space = '" "? ' if self._starts_with_space else ""
        matcher = self._compiled(
            f"start: {space}json\njson: %json {text}", _MAX_LEXER_STATES
        )
        if matcher.is_error():
            raise ConfigError(
                f"The JSON schema is not supported: {_error_of(matcher)}. Remove or replace the "
                "parts that llguidance does not support, and check each answer yourself."
            )
        return Constraint(self, matcher.deep_copy())

    def matcher(self, pattern: str, *, continues: bool = False) -> LLMatcher:
        """Create a matcher for a pattern at the start of a text, or after a finished part."""
        has_marker = self.spelling.newline_id is not None
        if self._starts_with_space and (has_marker or not continues):
            pattern = f" ?{pattern}"
        pattern = pattern.replace(r"\n", self._line_break)
        return self._compiled(
            self._lib.LLMatcher.grammar_from_regex(pattern)
        ).deep_copy()

    def _compile(self, grammar: str, max_states: int | None = None) -> LLMatcher:
        limits = self._lib.LLParserLimits(
            max_lexer_states=max_states, verbose_errors=False
        )
        matcher = self._lib.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # the slowest step; copies share its result
        return cast("LLMatcher", matcher)

    def _can_write(self, character: str) -> bool:
        decoded = self.tokens.decode_bytes(self.tokens.tokenize_str(character))
        return decoded.strip() == character.encode("utf-8", "replace").strip()


@dataclass(eq=False)
class Constraint:
    """Constraint of one text, with the state of its form while the text is generated."""

    compiler: ConstraintCompiler
    matcher: LLMatcher
    # The next parts; None for a schema, or after the last part.
    form: Form | None = None
    fault: str = ""
    """Predicate of the error message with the subject "The text"; "" without an error."""
    _n_read: int = 0  # tokens that matchers have read
    _part_start: int = 0  # the first token of the current part

    def again(self) -> Constraint:
        """Create the constraint of another text with the same schema."""
        return Constraint(self.compiler, self.matcher.deep_copy())

    def read(self, answer: Sequence[int]) -> None:
        """Read the tokens that the answer has gained since the last call."""
        while self._n_read < len(answer) and not self.check():
            self.matcher.consume_token(answer[self._n_read])
            self._n_read += 1
            if self.form is None or not self.matcher.is_accepting():
                continue
            try:
                part = answer[self._part_start : self._n_read]
                pattern = self.form.send(self.compiler.spelling.decode(part))
            except StopIteration:
                self.form = None
            else:
                self.matcher = self.compiler.matcher(pattern, continues=True)
                self._part_start = self._n_read

    def check(self) -> str:
        """Update `fault` from the matcher and return it."""
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

    `texts` are rows, their constraints from one compiler, and their answers, which only grow.
    Do not use a row if its constraint has a fault afterwards.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    for _, text, answer in texts:
        text.read(answer)

    size = texts[0][1].compiler.tokens.vocab_size
    bits = allocate_token_bitmask(len(texts), size)
    matchers = [(text.matcher, place) for place, (_, text, _) in enumerate(texts)]
    fill_next_token_bitmask_par(_executor(), matchers, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")

    width = min(size, logits.shape[1])
    forbidden = np.zeros(logits.shape, np.bool_)
    for (row, text, _), allowed_tokens in zip(texts, allowed, strict=True):
        if not text.check():
            forbidden[row] = True
            forbidden[row, :width] = allowed_tokens[:width] == 0
    logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Iterate over all objects in a schema, including the schema itself."""
    parts: list[Any] = [schema]
    while parts:  # no recursion, since the depth of a schema is not limited
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            part = [*part.values()]
        parts += part if isinstance(part, list) else []


def _literals(schema: Mapping[str, Any]) -> str:
    """Collect the literal texts in answers of a schema: property names and fixed values."""
    literals = ""
    for part in _parts(schema):
        names = part.get("properties")
        names = [*names] if isinstance(names, Mapping) else None
        literals += json.dumps(
            [part.get("const"), part.get("enum"), names], ensure_ascii=False
        )
    return literals


def _count_remainders(schema: Mapping[str, Any]) -> int:
    """Count the remainders of numbers by all `multipleOf` of a schema. Powers of ten are free.

    >>> _count_remainders({"allOf": [{"multipleOf": 0.25}, {"multipleOf": 3000}]})
    75
    """
    steps = (part.get("multipleOf") for part in _parts(schema))
    digits = (
        repr(step).partition("e")[0].replace(".", "").strip("-0")
        for step in steps
        if isinstance(step, int | float)
    )
    # llguidance searches all multiples together, in `anyOf` as in `allOf`.
    return math.lcm(*(int(each) for each in digits if each.isdecimal()))


def _error_of(matcher: LLMatcher) -> str:
    """Return a matcher's error without its position in the grammar, which users do not see."""
    error = matcher.get_error().partition("\n   1 |")[0].partition("\n<state>")[0]
    reason = error.rpartition("failed to compile JSON schema: ")[2]
    return " ".join(reason.split()).rstrip(".")


@cache
def _executor() -> LLExecutor:
    """Return the thread pool that fills masks."""
    return cast("LLExecutor", _library().LLExecutor())


def _library() -> Any:
    with needing("structured", "Constrained generation"):
        import llguidance
    return llguidance


def _tokens_of(spelling: Spelling) -> LLTokenizer:
    """Convert a vocabulary to llguidance's format."""
    lib = _library()
    tokenizer = json.loads(spelling.tokenizer_json)
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

    ends = sorted(spelling.end_ids)
    try:
        tokens: LLTokenizer = lib.LLTokenizer(json.dumps(tokenizer), eos_token=ends)
    except ValueError as error:
        raise ConfigError(
            f"llguidance does not support this model's tokenizer: {error}. Constrained generation "
            "needs a byte-level, SentencePiece BPE or unigram vocabulary. Generate without a form."
        ) from error
    if not drops_spaces and spelling.newline_id is None:
        return tokens

    # Such a tokenizer has no token for a single " " or "\n", which llguidance requires.
    pieces = _Pieces(tokens, spelling)
    return cast(
        "LLTokenizer", lib.LLTokenizer(lib.TokenizerWrapper(pieces), eos_token=ends)
    )


class _Pieces:
    """A vocabulary as the bytes of its tokens. llguidance reads the public attributes."""

    def __init__(self, tokens: LLTokenizer, spelling: Spelling) -> None:
        ids = range(tokens.vocab_size)
        self.eos_token_id = min(spelling.end_ids)
        self.bos_token_id = None
        self.tokens = [tokens.decode_bytes([token]) for token in ids]
        self.special_token_ids = [
            token for token in ids if tokens.is_special_token(token)
        ]
        if spelling.newline_id is not None:
            self.tokens[spelling.newline_id] = b"\n"
            if spelling.newline_id in self.special_token_ids:
                self.special_token_ids.remove(spelling.newline_id)
        special = set(self.special_token_ids)
        self._ids = {
            piece: t for t, piece in enumerate(self.tokens) if t not in special
        }
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize the text up to the first byte that starts no token."""
        ids: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids
