"""Word edits: replace words of tokenised texts without tokenising the rest again.

Where a tokenizer cuts before every space, the ids of a text are the ids of its words side by side
(see `word_cache`). So ids are read back as words, some words are replaced, and only the new ones
are tokenised, each once in a process: the result equals tokenising the changed text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.data.tokenizer.codec import Codec

Ids = NDArray[np.generic]
BREAK = "\n"
_SPACED_BREAK = re.compile(f" ?{BREAK} ?")
"""The word that stands for a line break."""


class Edit(NamedTuple):
    """Replace words[start:end]."""

    start: int
    end: int
    words: tuple[str, ...]


def splicer_for(codec: Codec) -> WordSplicer | TextSplicer:
    """A `WordSplicer` where the tokenizer splits before spaces, else a `TextSplicer`."""
    return WordSplicer(codec) if codec.word_kind is not None else TextSplicer(codec)


def edited(words: Sequence[str], edits: Sequence[Edit]) -> list[str]:
    """The words after `edits`.

    >>> edited(["Mix", "well."], [Edit(0, 1, ("Stir", "together"))])
    ['Stir', 'together', 'well.']
    """
    out: list[str] = []
    at = 0
    for edit in edits:
        out += [*words[at : edit.start], *edit.words]
        at = edit.end
    return [*out, *words[at:]]


def joined(words: Sequence[str]) -> str:
    r"""The text of words: a space between two, none beside a line break.

    >>> joined(["1.", "Mix.", BREAK, "2.", "Bake."])
    '1. Mix.\n2. Bake.'
    """
    return _SPACED_BREAK.sub(BREAK, " ".join(words))


class WordSplicer:
    """Splicer for tokenizers that cut before every space: ids are cut where a word begins."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._spaced = codec.word_kind == "byte-level"
        self._begins, self._breaks = _tables(codec)
        self._texts: dict[bytes, str] = {}
        self._with_space: dict[bytes, bool] = {}
        self._ids: dict[str, NDArray[np.int64]] = {}

    def words(self, ids: Ids) -> list[str]:
        """The words of a text, without spaces; line breaks are words."""
        whole = ids.astype(np.int64)
        data, at = whole.tobytes(), [8 * start for start in self._starts(whole)]
        ends = [*at[1:], len(data)]
        return [self._text(data[start:end]) for start, end in zip(at, ends, strict=True)]

    def spliced(self, ids: Ids, edits: Sequence[Edit]) -> Ids:
        """The ids of the text with `edits` made, which ascend and do not overlap."""
        if not edits:
            return ids
        whole = ids.astype(np.int64)
        starts = [*self._starts(whole), len(whole)]
        out: list[NDArray[np.int64]] = []
        at = 0
        for edit in edits:
            self._keep(whole, starts[at : edit.start + 1], out)
            for word in edit.words:
                out.append(self._encoded(word, leads=self._leads(out)))
            at = edit.end
        self._keep(whole, starts[at:], out)
        return np.concatenate([np.empty(0, np.int64), *out])

    def _keep(
        self, whole: NDArray[np.int64], starts: list[int], out: list[NDArray[np.int64]]
    ) -> None:
        """Add the words that begin at all but the last of `starts`."""
        if len(starts) < 2:
            return
        # A word that comes to lead a line, or leads one no more, loses or gets its space.
        first = whole[starts[0] : starts[1]].tobytes()
        text, leads = self._text(first), self._leads(out)
        if self._spaced and text != BREAK and self._with_space[first] == leads:
            out.append(self._encoded(text, leads=leads))
            out.append(whole[starts[1] : starts[-1]])
        else:
            out.append(whole[starts[0] : starts[-1]])

    def _leads(self, out: list[NDArray[np.int64]]) -> bool:
        last = next((part for part in reversed(out) if len(part)), None)
        return last is None or bool(self._breaks[last[-1]])

    def _encoded(self, word: str, *, leads: bool) -> NDArray[np.int64]:
        text = word if leads or not self._spaced or word == BREAK else f" {word}"
        known = self._ids.get(text)
        if known is None:
            known = np.array(self._codec.encode(self._codec.normalise(text)), np.int64)
            self._ids[text] = known
        return known

    def _starts(self, ids: NDArray[np.int64]) -> list[int]:
        begins = self._begins[ids]
        begins[:1] = True
        begins[1:] |= self._breaks[ids[:-1]]
        return np.flatnonzero(begins).tolist()

    def _text(self, part: bytes) -> str:
        known = self._texts.get(part)
        if known is None:
            raw = self._codec.decode(np.frombuffer(part, np.int64).tolist())
            known = BREAK if raw == BREAK else raw.strip(" ")
            self._texts[part], self._with_space[part] = known, raw.startswith(" ")
        return known


class TextSplicer:
    """Splicer for all other tokenizers: the changed text is tokenised, if it can be read back."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def words(self, ids: Ids) -> list[str]:
        """Words of a text, as of a `WordSplicer`."""
        text = self._codec.decode(ids.tolist())
        return [word for word in text.replace(BREAK, f" {BREAK} ").split(" ") if word]

    def spliced(self, ids: Ids, edits: Sequence[Edit]) -> Ids:
        """Ids after `edits`, as of a `WordSplicer`; unchanged where the text has other ids."""
        words = self.words(ids)
        if not edits or self._codec.encode(joined(words)) != ids.tolist():
            return ids
        return np.array(self._codec.encode(joined(edited(words, edits))), np.int64)


def _tables(codec: Codec) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """[vocabulary] whether a token begins a word, and whether it is a line break."""
    begins, breaks = np.zeros(codec.vocab_size, np.bool_), np.zeros(codec.vocab_size, np.bool_)
    for piece, number in codec.pieces().items():
        begins[number] = piece.startswith(("▁", "Ġ", "Ċ"))
        breaks[number] = piece == "Ċ"
    if codec.newline_id is not None:
        begins[codec.newline_id] = breaks[codec.newline_id] = True
    return begins, breaks
