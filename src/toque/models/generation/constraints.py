"""Constrained decoding: texts of a form, held by a mask of the logits (llguidance).

A form says, part by part, which pattern a text must match; logits of tokens that may not come next
become minus infinity before one is chosen. Letters: n live rows, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from toque.errors import ConfigError, needing

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Form = Generator[str, str, None]
r"""Patterns of a text's parts in their order; it is sent the text of each part once that is there.

Patterns are those that `re` and Rust's regex crate read alike, without anchors; a line break is
"\n", and what is no line break is ".". Every part but the last ends where its pattern first
matches, and must not match earlier by chance.
"""


@dataclass(frozen=True)
class Spelling:
    """Spelling: the text of a model's tokens."""

    tokenizer_json: str
    eos_id: int
    break_id: int | None
    """The marker that stands for a line break; None where the vocabulary holds "\\n"."""
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


class FormConstraint:
    """Holds each text to its form, one for each prompt; one object serves one `generate`."""

    def __init__(self, forms: Sequence[Form], spelling: Spelling) -> None:
        self._lib = _library()
        self._forms, self._spelling = forms, spelling
        self._tokens: LLTokenizer = _tokens_of(spelling)
        # What begins a line with "▁", which a decoder takes away, is read with a blank before it.
        begins_blank = self._tokens.decode_bytes([*spelling.encode("a")]).startswith(b" ")
        self._start = " ?" if begins_blank else ""
        self._break = r"\n ?" if begins_blank and spelling.break_id is not None else r"\n"
        self._compiled: dict[str, LLMatcher] = {}
        self._rows: dict[int, _Row] = {}
        self._executor = self._lib.LLExecutor()

    def __call__(
        self, logits: Tensor, *, prompts: Sequence[int], answers: Sequence[Sequence[int]]
    ) -> Tensor:
        """The logits [n, V], minus infinity written where a token may not be; answers only grow."""
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

        rows = [self._advanced(i, answer) for i, answer in zip(prompts, answers, strict=True)]
        bits = allocate_token_bitmask(len(rows), self._tokens.vocab_size)
        fill_next_token_bitmask_par(
            self._executor, [(row.matcher, place) for place, row in enumerate(rows)], bits
        )
        for number, row in zip(prompts, rows, strict=True):
            _refuse_error(row.matcher, number)
        allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        width = min(self._tokens.vocab_size, logits.shape[1])
        mask = torch.from_numpy(allowed[:, :width]).to(logits.device) == 0
        logits[:, :width].masked_fill_(mask, -torch.inf)
        logits[:, width:] = -torch.inf
        return logits

    def _advanced(self, number: int, answer: Sequence[int]) -> _Row:
        """The row after all tokens of its answer."""
        row = self._rows.get(number)
        if row is None:
            form = self._forms[number]
            row = self._rows[number] = _Row(form, self._matcher(self._start + next(form)))
        while row.taken < len(answer):
            row.matcher.consume_token(answer[row.taken])
            _refuse_error(row.matcher, number)
            row.taken += 1
            if row.is_last or not row.matcher.is_accepting():
                continue
            try:
                pattern = row.form.send(self._spelling.decode(answer[row.began : row.taken]))
            except StopIteration:
                row.is_last = True
            else:
                start = self._start if self._spelling.break_id is not None else ""
                row.matcher, row.began = self._matcher(start + pattern), row.taken
        return row

    def _matcher(self, pattern: str) -> LLMatcher:
        """A matcher at the beginning of a pattern; compiled once, because prompts repeat."""
        if pattern not in self._compiled:
            grammar = self._lib.LLMatcher.grammar_from_regex(pattern.replace(r"\n", self._break))
            self._compiled[pattern] = self._lib.LLMatcher(self._tokens, grammar, log_level=0)
        return self._compiled[pattern].deep_copy()


@dataclass
class _Row:
    """State of a text within its form."""

    form: Form
    matcher: LLMatcher
    taken: int = 0  # tokens the matchers have read
    began: int = 0  # the first token of the part
    is_last: bool = False


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
    try:
        found: LLTokenizer = lib.LLTokenizer(json.dumps(tokenizer), eos_token=spelling.eos_id)
    except ValueError as error:
        raise ConfigError(
            f"llguidance does not read this model's tokenizer: {error}. Texts can be held to a "
            "form with byte-level, SentencePiece BPE and unigram vocabularies; write without it."
        ) from error
    if not drops_blanks and spelling.break_id is None:
        return found
    # Such a tokenizer has no tokens for a lone " " or "\n", which llguidance asks it for.
    pieces = _Pieces(found, spelling)
    return cast("LLTokenizer", lib.LLTokenizer(lib.TokenizerWrapper(pieces)))


class _Pieces:
    """A vocabulary by the bytes of its tokens; llguidance names the attributes."""

    def __init__(self, tokens: LLTokenizer, spelling: Spelling) -> None:
        every = range(tokens.vocab_size)
        self.eos_token_id, self.bos_token_id = spelling.eos_id, None
        self.tokens = [tokens.decode_bytes([token]) for token in every]
        self.special_token_ids = [t for t in every if tokens.is_special_token(t)]
        if spelling.break_id is not None:
            self.tokens[spelling.break_id] = b"\n"
            if spelling.break_id in self.special_token_ids:
                self.special_token_ids.remove(spelling.break_id)
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


def _refuse_error(matcher: LLMatcher, number: int) -> None:
    if matcher.is_error():
        said = matcher.get_error().partition("\n")[0]
        raise ConfigError(
            f"The text of prompt {number} cannot be held to its form: {said}. Ask for fewer "
            "ingredients or simpler names, or write without it."
        )
