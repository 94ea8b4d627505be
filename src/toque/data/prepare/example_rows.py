"""Encoded texts to stored rows: special tokens, truncation, document pieces.

    decoder-only      prompt [bos] + ids + [break]  target ids + [eos]
    encoder-decoder   prompt ids + [eos]            target ids + [eos]

The line break separates the prompt from its answer. A truncated target gets no eos, which would
teach the model to stop in mid-recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.prepare_settings import FamilyKind
from toque.data.tokenizer.codec import Codec
from toque.errors import DataError
from toque.models.loading.provenance import Form
from toque.sources.records import Block, Example

Ids = NDArray[np.uint32]
PIECES_PER_GROUP = 16
"""Consecutive pieces of a document that go to the same split."""


def check_ids(block: Block, examples: list[Example], codec: Codec) -> None:
    """Check the ids of token files against the tokenizer's vocabulary.

    Raises:
        DataError: an id is not below the vocabulary's size.
    """
    for number, example in enumerate(examples):
        if example.ids:
            most = int(np.frombuffer(example.ids, "<u4").max())
            if most >= codec.vocab_size:
                raise DataError(
                    f"{block.path} holds the token id {most:,} (document "
                    f"{block.first_line + number:,}), and the tokenizer {codec.name} has only the "
                    f"ids 0 to {codec.vocab_size - 1:,}. A token file can only be read with the "
                    "tokenizer it was written with: name that one in model.tokenizer, or prepare "
                    "the texts themselves."
                )


def ids_of(example: Example, codec: Codec) -> Ids:
    """An example's ids without bos and eos, which `pieces` adds.

    With an end token 1, the ids 5 6 1 of a whole document give 5 6.
    """
    ids = np.frombuffer(example.ids, "<u4").astype(np.uint32)
    if len(ids) and codec.bos_id is not None and ids[0] == codec.bos_id:
        ids = ids[1:]
    if len(ids) and example.ends and ids[-1] == codec.eos_id:
        ids = ids[:-1]
    return ids


@dataclass(frozen=True)
class TokenRows:
    """Rows of one side, concatenated: row i is tokens[ends[i - 1] : ends[i]]."""

    tokens: Ids
    ends: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each row."""
        return np.diff(self.ends, prepend=0)

    def select(self, keep: NDArray[np.bool_]) -> TokenRows:
        """The rows where `keep` is true."""
        if keep.all():
            return self
        lengths = self.lengths
        return TokenRows(self.tokens[np.repeat(keep, lengths)], np.cumsum(lengths[keep]))

    def row(self, index: int) -> Ids:
        """One row; a view."""
        return self.tokens[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @classmethod
    def joined(cls, rows: list[Ids]) -> TokenRows:
        """Side made from a list of rows."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate([np.empty(0, np.uint32), *rows]), np.cumsum(lengths))


@dataclass(frozen=True)
class Wrapped:
    """Rows with their special tokens, at most `limit` long."""

    side: TokenRows
    cut: NDArray[np.bool_]
    """Rows that lost tokens."""
    lost: NDArray[np.int64]
    """Text tokens each row lost."""


def prompt_bounds(codec: Codec, family_kind: FamilyKind) -> tuple[int | None, int | None]:
    """The tokens that begin and end a prompt."""
    if family_kind == "encoder-decoder":
        return None, codec.eos_id
    return codec.bos_id, codec.break_id


def asking_bounds(
    codec: Codec, family_kind: FamilyKind, form: Form
) -> tuple[int | None, int | None]:
    """The tokens that begin and end what a model is asked with.

    A decoder that was trained on documents continues a text, so nothing ends it.
    """
    begin, end = prompt_bounds(codec, family_kind)
    return begin, None if form == "documents" and family_kind == "decoder" else end


def prompt_ids(codec: Codec, text: str, family_kind: FamilyKind, form: Form) -> list[int]:
    """A prompt encoded as in the store, for generating in the form the model was trained on."""
    begin, end = asking_bounds(codec, family_kind, form)
    ids = codec.encode(codec.normalise(text))
    return [i for i in (begin, *ids, end) if i is not None]


def wrap(
    side: TokenRows, *, limit: int, begin: int | None, end: int | None, end_after_cut: bool
) -> Wrapped:
    """Put `begin` before and `end` after every row, and cut rows to `limit` tokens.

    Rows [5, 6] and [7, 8, 9] with end 1, limit 3 and no end after a cut:

        [5, 6, 1], [7, 8, 9]
    """
    n_begin, n_end = int(begin is not None), int(end is not None)
    lengths = side.lengths
    cut = lengths + n_begin + n_end > limit
    room_when_cut = limit - n_begin - (n_end if end_after_cut else 0)
    kept = np.where(cut, np.minimum(lengths, room_when_cut), lengths)
    has_end = np.full(len(lengths), bool(n_end)) & (~cut | end_after_cut)
    out_lengths = n_begin + kept + has_end
    out_ends = np.cumsum(out_lengths)
    starts = out_ends - out_lengths
    tokens = np.empty(int(out_ends[-1]) if len(out_ends) else 0, np.uint32)
    is_text = np.ones(len(tokens), np.bool_)
    if begin is not None:
        is_text[starts] = False
        tokens[starts] = begin
    if end is not None:
        is_text[out_ends[has_end] - 1] = False
        tokens[out_ends[has_end] - 1] = end
    tokens[is_text] = side.tokens if not cut.any() else side.tokens[_beginnings(kept, lengths)]
    # A row that lost only its eos counts as cut too.
    return Wrapped(TokenRows(tokens, out_ends), cut, lengths - kept)


def _beginnings(kept: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mask over concatenated rows: true for the first `kept` tokens of each."""
    parts = np.stack([kept, lengths - kept], axis=1).ravel()
    return np.repeat(np.tile([True, False], len(kept)), parts)


def pieces(
    ids: Ids,
    *,
    family_kind: FamilyKind,
    max_prompt: int,
    max_target: int,
    bos_id: int | None,
    eos_id: int,
    whole: bool,
) -> Iterator[tuple[Ids, Ids]]:
    """(prompt, target) pieces of a document; `whole` when `ids` reach its true end.

    Decoder-only: every token is a target once. The prompt is [bos] for the first piece and then the
    last token of the piece before. With max_target 3 and ids 5 6 7 8:

        [bos] -> 5 6 7        [7] -> 8 eos

    Encoder-decoder: prefix language modelling (Raffel et al. 2020, section 3.2.1 and figure 4):
    each run of max_prompt - 1 + max_target tokens gives its beginning as the prompt; a shorter
    last run is divided in the same proportion.
    """
    tail = np.array([eos_id] if whole else [], np.uint32)
    text = np.concatenate([ids, tail])
    if family_kind == "decoder":
        before = np.array([] if bos_id is None else [bos_id], np.uint32)
        for at in range(0, len(text), max_target):
            piece = text[at : at + max_target]
            yield before, piece
            before = piece[-1:]
        return
    prefix = max_prompt - 1
    end = np.array([eos_id], np.uint32)
    for at in range(0, len(text), prefix + max_target):
        piece = text[at : at + prefix + max_target]
        divide = min(len(piece) - 1, prefix * len(piece) // (prefix + max_target))
        yield np.concatenate([piece[:divide], end]), piece[divide:]
