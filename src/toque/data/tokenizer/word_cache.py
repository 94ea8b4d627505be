"""Word cache: each distinct word is tokenised once; same ids, many times faster.

A pre-tokenizer that always cuts before a space never joins two words in one token, so the ids of
a text are the ids of its words, side by side. 68,000 recipes hold 16 million words, and fewer than
100,000 distinct ones: each is tokenised when it is first met, and is bytes from then on.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.data.tokenizer.char_fallbacks import Rewriter
from toque.data.tokenizer.tokenizer_folder import TextSteps, steps_of

Kind = Literal["sentencepiece", "byte-level"]
_LARGEST = 400_000  # words held before starting afresh: about 100 MB
_SLICE = 64  # texts cut at a time: few enough for the processor's cache
_END, _LEADS, _BREAKS, _SPACE = b"\0", b"\1", b"\2", b"\3"
"""Bytes that no text has: the end of a text, the mark of a word without a space before it, two line
breaks, and a space that is no mark of a word."""
_MARKS = (_END, _LEADS, _BREAKS, _SPACE)
_SPACES = re.compile(rb" {3,}")
_OUTER_SPACE = re.compile(r"\A\s|\s\Z|\s\s")  # GPT-2's rule: a run but its last sign is a piece
_SPACED = re.compile(r"\A(?! {2,}\Z).*\s", re.DOTALL)


@dataclass(frozen=True)
class Encoded:
    """Many texts as ids."""

    flat: NDArray[np.uint32]  # all ids joined
    ends: NDArray[np.int64]  # [texts] the position after its last id
    lost: Counter[str]  # characters that became unknown tokens, and how often
    disagreed: bool = False  # True if the fast way gave other ids than the tokenizer and was left


class _Table(dict[bytes, bytes | bytearray]):
    """Words to the bytes of their ids; a new word gets a place, to be filled by `_learn`."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[bytes] = []

    def __missing__(self, word: bytes) -> bytearray:
        place = self[word] = bytearray()
        self.new.append(word)
        return place


class WordTable:
    r"""Ids of whole texts, rewritten for the vocabulary, from the ids of their words.

    "sentencepiece" drops spaces and writes "▁" at each word (T5), "byte-level" keeps a space with
    the word it leads (GPT-2, NeoX). `break_id` is a line break's marker, None for a word "\n".
    """

    def __init__(
        self, rewriter: Rewriter, *, kind: Kind, break_id: int | None, vocab_size: int
    ) -> None:
        self._rewriter, self._tokenizer = rewriter, rewriter.tokenizer
        self._unk_id = rewriter.unk_id
        self._spaced = kind == "byte-level"
        self._break_id = break_id
        # A special token's text is read as text; other added tokens are found before words are.
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._added = [token.content for token in added if not token.special]
        # NeoX has tokens of several spaces.
        self._runs = self._spaced and not any(map(str.isspace, self._added))
        # Two ids above the vocabulary stand for the end of a text and for a word that is odd.
        bits = 16 if vocab_size < (1 << 16) - 1 else 32
        self._dtype = np.dtype(f"u{bits // 8}")
        self._end_id = (1 << bits) - 1
        self._odd_id = self._end_id - 1
        self._forget()

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, NDArray[np.int64]]:
        """The ids of `texts`, rewritten as needed; and the numbers of those to tokenise whole."""
        lost: Counter[str] = Counter()
        slices = range(0, len(texts), _SLICE)
        joined = b"".join([self._slice(texts[at : at + _SLICE], lost) for at in slices])
        found = np.frombuffer(joined, self._dtype)
        ends = np.flatnonzero(found == self._end_id)
        odd = np.unique(np.searchsorted(ends, np.flatnonzero(found == self._odd_id)))
        flat = found[found != self._end_id].astype(np.uint32)
        return Encoded(flat, ends - np.arange(len(ends)), lost), odd

    def _slice(self, texts: Sequence[str], lost: Counter[str]) -> bytes:
        """The ids of some texts, the mark of the end after each, as bytes."""
        if len(self._table) > _LARGEST:
            self._forget()
        table = self._table
        words = self._marked(texts).split(b" ")
        found = list(map(table.__getitem__, words))
        if table.new:
            self._learn()
        ids = b"".join(found)
        if self._lossy and (np.frombuffer(ids, self._dtype) == self._unk_id).any():
            for word in filter(self._lossy.__contains__, words):
                lost.update(self._lossy[word])
        return ids

    def _marked(self, texts: Sequence[str]) -> bytes:
        """The texts as one, with a space before every word and mark."""
        raw = "\0".join(texts).encode()
        if raw.count(_END) >= len(texts) or any(mark in raw for mark in _MARKS[1:]):
            # What has the marks in it becomes a mark in a wrong place, which is odd.
            has_mark = [any(mark.decode() in text for mark in _MARKS) for text in texts]
            kept = ["\1" if bad else text for text, bad in zip(texts, has_mark, strict=True)]
            raw = "\0".join(kept).encode()
        if not self._spaced:
            return raw.replace(b"\n", b" \n ").replace(_END, b" \0 ") + b" \0"
        raw = raw.replace(b"\n\n", b" \2 \1").replace(b"\n", b" \n \1")
        marked = _LEADS + raw.replace(_END, b" \0 \1") + b" \0"
        if self._runs and b"  " in marked:
            # GPT-2's rule: of a run of white space before a word all but the last is a piece. So
            # of k spaces k - 1 are, but spaces and the first of two breaks are one, which is odd.
            marked = marked.replace(b"  \2", b"  \1 \2")
            marked = _SPACES.sub(lambda run: b" " + _SPACE * (len(run[0]) - 1) + b" ", marked)
        return marked

    def _learn(self) -> None:
        new, self._table.new = self._table.new, []
        words: list[bytes] = []
        texts: list[str] = []
        for word in new:
            text = (word[1:] if word.startswith(_LEADS) else word).decode()
            if word.startswith(_SPACE) or not self._is_odd(text):
                words.append(word)
                texts.append(text)
            else:
                self._fill(word, [self._odd_id])
        # A line each: asked one by one they take several times as long.
        texts = self._rewriter("\n".join(texts)).split("\n") if texts else []
        if self._spaced:
            texts = [self._as_read(*of) for of in zip(words, texts, strict=True)]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for word, text, encoding in zip(words, texts, encodings, strict=True):
            ids = encoding.ids
            self._fill(word, ids if text or not self._spaced else [self._odd_id])
            if self._unk_id in ids and (lost := self._rewriter.lost([text])):
                self._lossy[word] = lost

    def _as_read(self, word: bytes, text: str) -> str:
        """A word of bytes with the space it is read with; nothing where it is odd."""
        if word.startswith(_SPACE):
            return " " * len(word)
        if not text or _OUTER_SPACE.search(text):
            return ""
        return text if word.startswith(_LEADS) else f" {text}"

    def _fill(self, word: bytes, ids: list[int]) -> None:
        data = array("H" if self._dtype.itemsize == 2 else "I", ids).tobytes()
        self._table[word] += data  # the place itself: it lies in lists already
        self._table[word] = data

    def _is_odd(self, text: str) -> bool:
        """True if a word's ids could differ with what stands beside it."""
        if not text or not text[0].isprintable():
            return True
        if not text.isascii() and unicodedata.category(text[0])[0] == "M":
            return True  # a mark at the front folds with the space before it, as a joiner does
        return bool(self._added) and any(content in text for content in self._added)

    def _forget(self) -> None:
        self._lossy: dict[bytes, Counter[str]] = {}
        self._table = _Table()
        if self._break_id is not None:
            breaks = [self._break_id]
        elif self._spaced:
            breaks = self._tokenizer.encode("\n", add_special_tokens=False).ids
        else:
            breaks = [self._odd_id]
        space = [self._odd_id]
        if self._runs:
            space = self._tokenizer.encode(" ", add_special_tokens=False).ids
        for word, ids in (
            (b"", space if self._spaced else []),
            (_LEADS, [self._odd_id]),
            (_END, [self._end_id]),
            (b"\n", breaks),
            (_BREAKS, breaks * 2),
        ):
            self._fill(word, ids)
        self._table.new = []


def kind_of(tokenizer_json: str) -> Kind | None:
    """Rule by which a tokenizer splits words; None if the cache is not exact for it."""
    state = msgspec.json.decode(tokenizer_json, type=TextSteps)
    pieces = list(steps_of(state.pre_tokenizer))
    folds = {step["type"] for step in steps_of(state.normalizer)}
    if not folds <= {"NFC", "NFKC", "Precompiled"}:
        return None
    # Added tokens are found before words are cut. Of those with white space only NeoX's runs of
    # spaces are sure to lie between words.
    if any(_SPACED.search(token["content"]) for token in state.added_tokens or ()):
        return None
    match [piece["type"] for piece in pieces]:
        case ["WhitespaceSplit", "Metaspace"] if pieces[1].get("prepend_scheme") == "always":
            return "sentencepiece"
        case ["ByteLevel"] if pieces[0].get("use_regex", True):
            return None if pieces[0].get("add_prefix_space") else "byte-level"
        case _:
            return None
