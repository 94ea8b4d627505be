"""Constrained decoding: texts of a form, held by a mask of the logits (llguidance).

A form says, part by part, which pattern a text must match, or is a JSON schema; logits of tokens
that may not come next become minus infinity before one is chosen. Letters: n live rows, V
vocabulary.
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
r"""Patterns of a text's parts in their order; it is sent the text of each part once that is there.

Patterns are those that `re` and Rust's regex crate read alike, without anchors; a line break is
"\n", and what is no line break is ".". Every part but the last ends where its pattern first
matches, and must not match earlier by chance.
"""
_LONGEST_SCHEMA: Final = 100_000
"""Characters of a schema: compiling one of 90,000 took 1.7 s, one of 270,000 19 s."""
_MOST_STATES: Final = 50_000  # of a schema's lexer, at 1 to 2 KB each
_MOST_REMAINDERS: Final = 10_000
"""Remainders of the multiples of a schema, which llguidance searches before it counts any state:
9,973 took 0.04 s, 999,983 10 s and 419 MB, and 99,999,989 ended the process."""
_MOST_COMPILED: Final = 64  # grammars that a vocabulary keeps
# One line, as most JSON in texts is written; free blanks would let a weak model write nothing else.
_ONE_LINE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_JSON_TEXT: Final = '{}[]":,-.0123456789truefalsenull'


class Spelling(Protocol):
    """Spelling: the text of a model's tokens; a `Codec` is one."""

    tokenizer_json: str
    newline_id: int | None
    """The marker that stands for a line break; None where the vocabulary holds "\\n"."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end a text."""

    def encode(self, text: str) -> Sequence[int]:
        """Tokens of a text."""

    def decode(self, ids: Iterable[int]) -> str:
        """Text of tokens."""


class HeldVocabulary:
    """Vocabulary that texts can be held with; it is read once, and grammars are compiled once."""

    def __init__(self, spelling: Spelling) -> None:
        self._lib = _library()
        self.spelling = spelling
        self.tokens: LLTokenizer = _tokens_of(spelling)
        # What begins a line with "▁", which a decoder takes away, is read with a blank before it.
        self._begins_blank = self.tokens.decode_bytes([*spelling.encode("a")]).startswith(b" ")
        has_marker = spelling.newline_id is not None
        self._break = r"\n ?" if self._begins_blank and has_marker else r"\n"
        self._compiled = lru_cache(_MOST_COMPILED)(self._compile)  # prompts and schemas repeat

    def to_form(self, form: Form) -> HeldText:
        """A text that has a form's parts one after the other."""
        return HeldText(self, self.matcher(next(form)), form)

    def to_schema(self, schema: Mapping[str, Any]) -> HeldText:
        """A text that is JSON of a schema, in one line.

        Raises:
            ConfigError: llguidance cannot hold the schema, or the vocabulary cannot write it.
        """
        # llguidance reads its options in the schema, where one of a stranger may set others.
        try:
            text = json.dumps({**schema, "x-guidance": _ONE_LINE}, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"The JSON schema is no JSON: {error}. Mend it.") from error
        if len(text) > _LONGEST_SCHEMA:
            raise ConfigError(
                f"The JSON schema has {len(text):,} characters, and at most {_LONGEST_SCHEMA:,} "
                "are compiled. Leave out what the answers do not need."
            )
        if _remainders(schema) > _MOST_REMAINDERS:
            raise ConfigError(
                f"The JSON schema's multipleOf leave more than {_MOST_REMAINDERS:,} remainders "
                "together, which takes too much memory. Ask for multiples of smaller or rounder "
                "numbers, or leave multipleOf out and check each answer for that yourself."
            )
        lacking = [c for c in sorted({*_JSON_TEXT, *_literals(schema)}) if not self._writes(c)]
        if lacking:
            raise ConfigError(
                f"This model's vocabulary cannot write {' '.join(lacking[:20])}, which JSON of "
                "this schema needs. Use a model whose tokenizer holds them, or write without it."
            )
        blank = '" "? ' if self._begins_blank else ""
        grammar = f"start: {blank}json\njson: %json {text}"
        made = self._compiled(grammar, _MOST_STATES)
        if made.is_error():
            raise ConfigError(
                f"The JSON schema cannot be held: {_said_by(made)}. Leave out or replace what "
                "llguidance does not know, and check each answer for that yourself."
            )
        return HeldText(self, made.deep_copy())

    def matcher(self, pattern: str, *, goes_on: bool = False) -> LLMatcher:
        """A matcher at the beginning of a text's pattern, or of one that goes on with a text."""
        starts_blank = self._begins_blank and (self.spelling.newline_id is not None or not goes_on)
        pattern = (" ?" if starts_blank else "") + pattern
        pattern = pattern.replace(r"\n", self._break)
        return self._compiled(self._lib.LLMatcher.grammar_from_regex(pattern)).deep_copy()

    def _compile(self, grammar: str, most_states: int | None = None) -> LLMatcher:
        limits = self._lib.LLParserLimits(max_lexer_states=most_states, verbose_errors=False)
        made = self._lib.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        if not made.is_error():
            made.compute_bitmask()  # the longest step, which fills what copies share
        return cast("LLMatcher", made)

    def _writes(self, character: str) -> bool:
        written = self.tokens.decode_bytes(self.tokens.tokenize_str(character))
        return written.strip() == character.encode("utf-8", "replace").strip()


@dataclass(eq=False)
class HeldText:
    """A text that is held to its form while it is written; a `HeldVocabulary` begins it."""

    vocabulary: HeldVocabulary
    matcher: LLMatcher
    form: Form | None = None  # that of the parts to come
    fault: str = ""
    """Sentences that go on after "The text": why it cannot go on, once it cannot."""
    _taken: int = 0  # tokens the matchers have read
    _began: int = 0  # the first token of the part

    def again(self) -> HeldText:
        """Another text of the same schema, at its beginning too."""
        return HeldText(self.vocabulary, self.matcher.deep_copy())

    def read(self, answer: Sequence[int]) -> None:
        """Read what the answer has more than at the last call."""
        while self._taken < len(answer) and not self.look():
            self.matcher.consume_token(answer[self._taken])
            self._taken += 1
            if self.form is None or not self.matcher.is_accepting():
                continue
            try:
                part = answer[self._began : self._taken]
                pattern = self.form.send(self.vocabulary.spelling.decode(part))
            except StopIteration:
                self.form = None
            else:
                self.matcher = self.vocabulary.matcher(pattern, goes_on=True)
                self._began = self._taken

    def look(self) -> str:
        """The fault, if there is one now."""
        if self.matcher.is_error():
            self.fault = (
                f"cannot be held to its form: {_said_by(self.matcher)}. Ask for less (fewer "
                "ingredients, simpler names, a looser schema), or write without it."
            )
        return self.fault


def hold(logits: Tensor, texts: Sequence[tuple[int, HeldText, Sequence[int]]]) -> None:
    """Write minus infinity into logits [n, V] where a token may not be next.

    `texts` are rows with their held texts of one vocabulary and answers, which only grow. A row
    whose text has a fault afterwards is not to be used.
    """
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

    for _, text, answer in texts:
        text.read(answer)
    size = texts[0][1].vocabulary.tokens.vocab_size
    bits = allocate_token_bitmask(len(texts), size)
    places = [(text.matcher, place) for place, (_, text, _) in enumerate(texts)]
    fill_next_token_bitmask_par(_executor(), places, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    width = min(size, logits.shape[1])
    barred = np.zeros(logits.shape, np.bool_)
    for (row, text, _), own in zip(texts, allowed, strict=True):
        if not text.look():
            barred[row] = True
            barred[row, :width] = own[:width] == 0
    logits.masked_fill_(torch.from_numpy(barred).to(logits.device), -torch.inf)


def _parts(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every object in a schema, itself among them."""
    parts: list[Any] = [schema]
    while parts:  # without recursion, for a schema may be as deep as it likes
        part = parts.pop()
        if isinstance(part, Mapping):
            yield part
            part = [*part.values()]
        parts += part if isinstance(part, list) else []


def _literals(schema: Mapping[str, Any]) -> str:
    """The texts that answers of a schema have as they are: names and fixed values."""
    found = ""
    for part in _parts(schema):
        names = part.get("properties")
        names = [*names] if isinstance(names, Mapping) else None
        found += json.dumps([part.get("const"), part.get("enum"), names], ensure_ascii=False)
    return found


def _remainders(schema: Mapping[str, Any]) -> int:
    """Remainders that numbers leave by all `multipleOf` of a schema; powers of ten cost nothing.

    >>> _remainders({"allOf": [{"multipleOf": 0.25}, {"multipleOf": 3000}]})
    75
    """
    steps = (part.get("multipleOf") for part in _parts(schema))
    digits = (
        repr(step).partition("e")[0].replace(".", "").strip("-0")
        for step in steps
        if isinstance(step, int | float)
    )
    # Of all, for those of one number are searched together, in `anyOf` as in `allOf`.
    return math.lcm(*(int(each) for each in digits if each.isdecimal()))


def _said_by(matcher: LLMatcher) -> str:
    """The reason a matcher gives, without the place in a grammar that the user did not write."""
    said = matcher.get_error().partition("\n   1 |")[0].partition("\n<state>")[0]
    return " ".join(said.rpartition("failed to compile JSON schema: ")[2].split()).rstrip(".")


@cache
def _executor() -> LLExecutor:
    """Threads that fill masks."""
    return cast("LLExecutor", _library().LLExecutor())


def _library() -> Any:
    with needing("structured", "Holding texts to a form"):
        import llguidance
    return llguidance


def _tokens_of(spelling: Spelling) -> LLTokenizer:
    """The vocabulary as llguidance reads it."""
    lib = _library()
    tokenizer = json.loads(spelling.tokenizer_json)
    decoder = tokenizer.get("decoder") or {}
    drops_blanks = decoder.get("type") == "Metaspace"
    if drops_blanks:
        # llguidance knows it by its parts only, and by ByteFallback among them.
        blank = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
        parts = [blank, {"type": "ByteFallback"}, {"type": "Fuse"}]
        tokenizer["decoder"] = {"type": "Sequence", "decoders": parts}
    ends = sorted(spelling.end_ids)
    try:
        found: LLTokenizer = lib.LLTokenizer(json.dumps(tokenizer), eos_token=ends)
    except ValueError as error:
        raise ConfigError(
            f"llguidance does not read this model's tokenizer: {error}. Texts can be held to a "
            "form with byte-level, SentencePiece BPE and unigram vocabularies; write without it."
        ) from error
    if not drops_blanks and spelling.newline_id is None:
        return found
    # Such a tokenizer has no tokens for a lone " " or "\n", which llguidance asks it for.
    pieces = _Pieces(found, spelling)
    return cast("LLTokenizer", lib.LLTokenizer(lib.TokenizerWrapper(pieces), eos_token=ends))


class _Pieces:
    """A vocabulary by the bytes of its tokens; llguidance names the attributes."""

    def __init__(self, tokens: LLTokenizer, spelling: Spelling) -> None:
        every = range(tokens.vocab_size)
        self.eos_token_id, self.bos_token_id = min(spelling.end_ids), None
        self.tokens = [tokens.decode_bytes([token]) for token in every]
        self.special_token_ids = [t for t in every if tokens.is_special_token(t)]
        if spelling.newline_id is not None:
            self.tokens[spelling.newline_id] = b"\n"
            if spelling.newline_id in self.special_token_ids:
                self.special_token_ids.remove(spelling.newline_id)
        special = set(self.special_token_ids)
        self._ids = {piece: t for t, piece in enumerate(self.tokens) if t not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of the text up to the first byte that no token begins with."""
        ids: list[int] = []
        while text:
            sizes = range(min(self._longest, len(text)), 0, -1)
            size = next((size for size in sizes if text[:size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[text[:size]])
            text = text[size:]
        return ids
