"""Tokenising each distinct word once: the same ids, several times faster.

A pre-tokenizer that always cuts before a space never joins two words in one token, so the ids of
a text are the ids of its words, side by side. Recipes repeat their words: 68,000 of them hold 16
million words and fewer than 100,000 distinct ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Kind = Literal["sentencepiece", "byte-level"]
_LARGEST = 400_000
"""Words held before starting afresh: about 100 MB."""
# Spaces that Python and the tokenizers do not cut at alike, and the mark used below.
_ODD_SPACE = re.compile(r"[^\S \n]")
_ODD_ASCII = "\0\t\r\x0b\x0c\x1c\x1d\x1e\x1f"
# GPT-2's own rule with its three classes of visible characters taken as one: a word may hold
# several of its pieces, and no piece reaches into two words.
_BYTE_LEVEL_WORDS = re.compile(r" ?\S+|\s+(?!\S)|\s+")


class WordTable:
    r"""Ids of whole texts from the ids of their words.

    `kind` says how words are cut: "sentencepiece" drops spaces and writes "▁" at each word (T5),
    "byte-level" keeps a space with the word it leads (GPT-2, NeoX). `break_id` is the marker
    written for a line break, None when the vocabulary holds "\n" as any other word.
    """

    def __init__(self, tokenizer: Tokenizer, *, kind: Kind, break_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._kind = kind
        # NeoX has tokens of several spaces that are found before words are cut.
        added = tokenizer.get_added_tokens_decoder().values()
        self._any_spaces = not any(char.isspace() for token in added for char in token.content)
        self._break_id = break_id
        self._index: dict[str, int] = {}
        self._pool = np.empty(0, np.uint32)
        self._starts = np.empty(0, np.int64)
        self._lengths = np.empty(0, np.int64)
        self._forget()

    def usable(self, text: str) -> bool:
        """Whether cutting `text` into words is sure to be exact; the others go the long way."""
        if text.isascii():
            odd = any(space in text for space in _ODD_ASCII)
        else:
            odd = "\0" in text or _ODD_SPACE.search(text) is not None
        return not odd and (self._any_spaces or _single_spaces(text))

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids joined, and for each text the position after its last id."""
        words: list[str] = []
        counts = np.empty(len(texts), np.int64)
        cut = self._words
        for i, text in enumerate(texts):
            own = cut(text)
            words += own
            counts[i] = len(own)
        rows = self._rows(words)
        lengths = self._lengths[rows]
        ends = np.cumsum(lengths)
        # Position in the pool of every id: its word's start, plus its place within the word.
        shift = self._starts[rows] - (ends - lengths)
        total = int(ends[-1]) if len(ends) else 0
        flat = self._pool[np.arange(total) + np.repeat(shift, lengths)]
        return flat, np.concatenate([[0], ends])[np.cumsum(counts)]

    def _words(self, text: str) -> list[str]:
        if self._kind == "sentencepiece":
            if self._break_id is None:
                return text.split()
            return text.replace("\n", " \0 ").split()
        if not _single_spaces(text):
            return _BYTE_LEVEL_WORDS.findall(text)
        spaced = text.replace("\n", "\0\n\0").replace(" ", "\0 ")
        return [word for word in spaced.split("\0") if word]

    def _rows(self, words: list[str]) -> NDArray[np.int64]:
        """Each word's place in the table; words not met before are learnt."""
        rows = np.fromiter(map(self._index.get, words, repeat(-1)), np.int64, len(words))
        unknown = np.flatnonzero(rows < 0)
        if not len(unknown):
            return rows
        new = list(dict.fromkeys(words[i] for i in unknown.tolist()))
        if len(self._index) + len(new) > _LARGEST and len(self._index) > 1:
            self._forget()
            return self._rows(words)
        self._learn(new)
        rows[unknown] = [self._index[words[i]] for i in unknown.tolist()]
        return rows

    def _learn(self, new: list[str]) -> None:
        encodings = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        starts = len(self._pool) + np.cumsum(lengths) - lengths
        flat = np.fromiter(chain.from_iterable(ids), np.uint32, int(lengths.sum()))
        first = len(self._lengths)
        self._index.update((word, first + i) for i, word in enumerate(new))
        self._pool = np.concatenate([self._pool, flat])
        self._starts = np.concatenate([self._starts, starts])
        self._lengths = np.concatenate([self._lengths, lengths])

    def _forget(self) -> None:
        # The marker is the word "\0"; a slot without a marker is never looked up.
        self._index = {"\0": 0}
        self._pool = np.array([self._break_id or 0], np.uint32)
        self._starts = np.zeros(1, np.int64)
        self._lengths = np.ones(1, np.int64)


def _single_spaces(text: str) -> bool:
    """Whether every space and line break of `text` stands alone or before a word."""
    return not (
        "  " in text
        or "\n " in text
        or " \n" in text
        or "\n\n\n" in text
        or text.endswith((" ", "\n"))
    )


def kind_of(tokenizer: Tokenizer) -> Kind | None:
    """How `tokenizer` cuts words, when it is a way known to be exact; None for all others."""
    state = json.loads(tokenizer.to_str())
    pieces = _flat(state.get("pre_tokenizer"), "pretokenizers")
    folds = {part["type"] for part in _flat(state.get("normalizer"), "normalizers")}
    if not folds <= {"NFC", "NFKC", "Precompiled"}:
        return None
    match [piece["type"] for piece in pieces]:
        case ["WhitespaceSplit", "Metaspace"] if pieces[1].get("prepend_scheme") == "always":
            return "sentencepiece"
        case ["ByteLevel"] if pieces[0].get("use_regex", True):
            return None if pieces[0].get("add_prefix_space") else "byte-level"
        case _:
            return None


def _flat(part: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [p for inner in part[inside] for p in _flat(inner, inside)] if inside in part else [part]
