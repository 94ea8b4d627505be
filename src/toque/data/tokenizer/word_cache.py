"""Word cache: encodes each distinct word once, which gives the same ids many times faster.

If a pre-tokenizer always splits before a space, no token spans two words. Then the ids of a text
are the concatenated ids of the words. 68,000 recipes have 16 million words, but fewer than
100,000 distinct words. The cache stores the ids of each word as bytes.
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

from toque.data.array_types import Ints
from toque.data.tokenizer.char_fallbacks import Rewriter
from toque.data.tokenizer.tokenizer_folder import TextSteps, steps_of

Kind = Literal["sentencepiece", "byte-level"]
_MAX_WORDS = 400_000  # number of words in a full cache, about 100 MB
_SLICE_TEXTS = 64  # number of texts per slice, which fit into the processor's cache
# Bytes that mark parts of the joined texts, because texts rarely have them:
_END = b"\0"  # the end of a text
_LEADS = b"\1"  # a word without a space before it
_BREAKS = b"\2"  # two line breaks
_SPACE = b"\3"  # a space that does not separate words
_MARKS = (_END, _LEADS, _BREAKS, _SPACE)
_SPACES = re.compile(rb" {3,}")
# White space at the start or end of a text, or several white-space characters in a row.
_OUTER_SPACE = re.compile(r"\A\s|\s\Z|\s\s")
# White space, except in a text of two or more spaces alone.
_SPACED = re.compile(r"\A(?! {2,}\Z).*\s", re.DOTALL)


@dataclass(frozen=True)
class Encoded:
    """Ids of many texts."""

    flat: NDArray[np.uint32]  # concatenated ids
    ends: Ints  # [texts] index after the last id of each text
    lost: Counter[str]  # counts of characters that became unknown tokens
    # Whether a sample's ids from the cache differed from the tokenizer's.
    disagreed: bool = False


class _Table(dict[bytes, bytes | bytearray]):
    """Ids of words as bytes. A new word gets an empty array that `_learn` fills."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[bytes] = []

    def __missing__(self, word: bytes) -> bytearray:
        ids = self[word] = bytearray()
        self.new.append(word)
        return ids


class WordTable:
    r"""Encoder of texts by words, with the character fallbacks of a `Rewriter`.

    The ids of an *odd* word depend on its neighbours. A text with an odd word must be encoded
    without the cache.

    Args:
        rewriter: Rewriter of the tokenizer.
        kind: "sentencepiece" drops spaces and begins each word with "▁" (T5). "byte-level" keeps
            the space before a word (GPT-2, NeoX).
        break_id: Id of the line-break marker. None means that the vocabulary has "\n".
        vocab_size: Number of entries in the vocabulary.
    """

    def __init__(
        self, rewriter: Rewriter, *, kind: Kind, break_id: int | None, vocab_size: int
    ) -> None:
        self._rewriter = rewriter
        self._tokenizer = rewriter.tokenizer
        self._unk_id = rewriter.unk_id
        self._keeps_spaces = kind == "byte-level"
        # The tokenizer reads special tokens as text, but splits at other added tokens first.
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._added = [token.content for token in added if not token.special]
        # NeoX has tokens of several spaces, so it does not split runs of spaces.
        has_space_tokens = any(map(str.isspace, self._added))
        self._splits_runs = self._keeps_spaces and not has_space_tokens

        # Two ids above the vocabulary mark the end of a text and an odd word.
        bits = 16 if vocab_size < (1 << 16) - 1 else 32
        self._dtype = np.dtype(f"u{bits // 8}")
        self._end_id = (1 << bits) - 1
        self._odd_id = self._end_id - 1
        self._mark_ids = self._find_mark_ids(break_id)
        self._clear()

    def encode(self, texts: Sequence[str]) -> tuple[Encoded, Ints]:
        """Encode texts, and list the indices of texts with an odd word. Their ids are wrong."""
        lost: Counter[str] = Counter()
        starts = range(0, len(texts), _SLICE_TEXTS)
        slices = [
            self._encode_slice(texts[at : at + _SLICE_TEXTS], lost) for at in starts
        ]
        ids = np.frombuffer(b"".join(slices), self._dtype)
        ends = np.flatnonzero(ids == self._end_id)
        odd_words = np.flatnonzero(ids == self._odd_id)
        odd_texts = np.unique(np.searchsorted(ends, odd_words))
        flat = ids[ids != self._end_id].astype(np.uint32)
        return Encoded(flat, ends - np.arange(len(ends)), lost), odd_texts

    def _encode_slice(self, texts: Sequence[str], lost: Counter[str]) -> bytes:
        """Encode a few texts as bytes, each with the end mark after it.

        Add the counts of characters without a stand-in to `lost`.
        """
        if len(self._table) > _MAX_WORDS:
            self._clear()
        words = self._mark_words(texts).split(b" ")
        # New words get empty arrays here, which `_learn` fills before they are joined.
        ids_of_words = list(map(self._table.__getitem__, words))
        if self._table.new:
            self._learn()
        ids = b"".join(ids_of_words)
        if self._lossy and (np.frombuffer(ids, self._dtype) == self._unk_id).any():
            for word in filter(self._lossy.__contains__, words):
                lost.update(self._lossy[word])
        return ids

    def _mark_words(self, texts: Sequence[str]) -> bytes:
        """Join the texts, with a space before every word and mark."""
        joined = _join_texts(texts)
        if not self._keeps_spaces:
            return joined.replace(b"\n", b" \n ").replace(_END, b" \0 ") + b" \0"

        marked = joined.replace(b"\n\n", b" \2 \1").replace(b"\n", b" \n \1")
        marked = _LEADS + marked.replace(_END, b" \0 \1") + b" \0"
        if self._splits_runs and b"  " in marked:
            # GPT-2's pre-tokenizer keeps a run of white space together, except its last character,
            # so k spaces before a word give a piece of k - 1. Spaces before two line breaks would
            # join the first break, so mark them as odd.
            marked = marked.replace(b"  \2", b"  \1 \2")
            marked = _SPACES.sub(
                lambda run: b" " + _SPACE * (len(run[0]) - 1) + b" ", marked
            )
        return marked

    def _learn(self) -> None:
        """Encode the new words of the table, and record the characters that they lose."""
        texts = self._rewrite_new_words()
        encodings = self._tokenizer.encode_batch_fast(
            list(texts.values()), add_special_tokens=False
        )
        for word, encoding in zip(texts, encodings, strict=True):
            ids = encoding.ids
            self._fill(word, ids)
            if self._unk_id in ids and (lost := self._rewriter.lost([texts[word]])):
                self._lossy[word] = lost

    def _rewrite_new_words(self) -> dict[bytes, str]:
        """Return the text to encode for each new word of the table. Fill odd words here."""
        words: list[bytes] = []
        texts: list[str] = []
        for word in self._table.new:
            text = word.removeprefix(_LEADS).decode()
            if word.startswith(_SPACE) or not self._is_odd(text):
                words.append(word)
                texts.append(text)
            else:
                self._fill(word, [self._odd_id])
        self._table.new = []

        # Rewrite all words in one call, because a call per word takes several times as long.
        rewritten = self._rewriter("\n".join(texts)).split("\n") if texts else []
        rewritten_texts: dict[bytes, str] = {}
        for word, text in zip(words, rewritten, strict=True):
            spaced_text = _with_space(word, text) if self._keeps_spaces else text
            if spaced_text is None:
                self._fill(word, [self._odd_id])
            else:
                rewritten_texts[word] = spaced_text
        return rewritten_texts

    def _fill(self, word: bytes, ids: list[int]) -> None:
        """Set the ids of a word."""
        data = array("H" if self._dtype.itemsize == 2 else "I", ids).tobytes()
        # Change the array in place first, because `_encode_slice` has a list of these arrays.
        self._table[word] += data
        self._table[word] = data

    def _is_odd(self, text: str) -> bool:
        """Check if the ids of a word may depend on its neighbours."""
        if not text or not text[0].isprintable():
            return True
        if not text.isascii() and unicodedata.category(text[0])[0] == "M":
            return True  # a combining mark folds with the space before it
        return any(content in text for content in self._added)

    def _find_mark_ids(self, break_id: int | None) -> dict[bytes, list[int]]:
        """Find the ids of marks, line breaks, and the empty word between two spaces."""
        if break_id is not None:
            breaks = [break_id]
        elif self._keeps_spaces:
            breaks = self._tokenizer.encode("\n", add_special_tokens=False).ids
        else:
            breaks = [self._odd_id]

        empty_word: list[int] = []
        if self._splits_runs:
            empty_word = self._tokenizer.encode(" ", add_special_tokens=False).ids
        elif self._keeps_spaces:
            empty_word = [self._odd_id]
        return {
            b"": empty_word,
            _LEADS: [self._odd_id],
            _END: [self._end_id],
            b"\n": breaks,
            _BREAKS: breaks * 2,
        }

    def _clear(self) -> None:
        """Empty the cache, except for the marks."""
        self._lossy: dict[bytes, Counter[str]] = {}
        self._table = _Table()
        for mark, ids in self._mark_ids.items():
            self._fill(mark, ids)
        # `_learn` must not encode the marks, which the table has recorded as new words.
        self._table.new = []


def _with_space(word: bytes, text: str) -> str | None:
    """Put the space before a rewritten word that belongs to it. None means that the word is odd."""
    if word.startswith(_SPACE):
        return " " * len(word)
    if not text or _OUTER_SPACE.search(text):
        return None
    return text if word.startswith(_LEADS) else f" {text}"


def _join_texts(texts: Sequence[str]) -> bytes:
    """Join texts with end marks. A text that contains a mark becomes a mark without a word."""
    joined = "\0".join(texts).encode()
    has_other_marks = any(mark in joined for mark in _MARKS[1:])
    if joined.count(_END) < len(texts) and not has_other_marks:
        return joined
    # A mark without a word is odd, so these texts are encoded without the cache.
    marks = [mark.decode() for mark in _MARKS]
    safe = ["\1" if any(mark in text for mark in marks) else text for text in texts]
    return "\0".join(safe).encode()


def kind_of(tokenizer_json: str) -> Kind | None:
    """Find the rule by which a tokenizer splits words. None if the cache would give wrong ids."""
    state = msgspec.json.decode(tokenizer_json, type=TextSteps)
    pieces = list(steps_of(state.pre_tokenizer))
    folds = {step["type"] for step in steps_of(state.normalizer)}
    if not folds <= {"NFC", "NFKC", "Precompiled"}:
        return None
    # The tokenizer splits at added tokens before it splits words. An added token with white space
    # may span words, except NeoX's runs of spaces.
    if any(_SPACED.search(token["content"]) for token in state.added_tokens or ()):
        return None
    match [piece["type"] for piece in pieces]:
        case ["WhitespaceSplit", "Metaspace"] if (
            pieces[1].get("prepend_scheme") == "always"
        ):
            return "sentencepiece"
        case ["ByteLevel"] if pieces[0].get("use_regex", True):
            return None if pieces[0].get("add_prefix_space") else "byte-level"
        case _:
            return None
