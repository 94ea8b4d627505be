"""Token rows: the concatenated ids of many rows, their special tokens, and pieces of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toque.data.array_types import Bools, Ints
from toque.data.tokenizer.codec import FamilyKind

Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class TokenRows:
    """Concatenated token rows of one side. Row i is tokens[ends[i - 1] : ends[i]]."""

    tokens: Ids
    ends: Ints

    @property
    def lengths(self) -> Ints:
        """Number of tokens per row."""
        return np.diff(self.ends, prepend=0)

    def select(self, mask: Bools) -> TokenRows:
        """Select the rows that a mask [rows] marks."""
        lengths = self.lengths
        tokens = self.tokens[np.repeat(mask, lengths)]
        return TokenRows(tokens, np.cumsum(lengths[mask]))

    def split(self) -> list[Ids]:
        """Return the tokens of each row as a view."""
        return np.split(self.tokens, self.ends)[:-1]

    @classmethod
    def concatenate(cls, rows: list[Ids]) -> TokenRows:
        """Concatenate the tokens of rows."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate([np.empty(0, np.uint32), *rows]), np.cumsum(lengths))


@dataclass(frozen=True)
class ExampleRows:
    """Rows of examples, in the order of the examples."""

    prompt: TokenRows
    target: TokenRows
    example: Ints  # [rows] index of the example
    part: Ints  # [rows] index of the piece of a document

    def select(self, mask: Bools) -> ExampleRows:
        """Select the rows that a mask [rows] marks."""
        return ExampleRows(
            self.prompt.select(mask),
            self.target.select(mask),
            self.example[mask],
            self.part[mask],
        )

    def merge(self, other: ExampleRows) -> ExampleRows:
        """Merge these rows with the rows of other examples, in the order of the examples."""
        if not len(self.example):
            return other
        example = np.concatenate([self.example, other.example])
        part = np.concatenate([self.part, other.part])
        order = np.argsort(example, kind="stable")

        def merge_side(a: TokenRows, b: TokenRows) -> TokenRows:
            rows = [*a.split(), *b.split()]
            return TokenRows.concatenate([rows[i] for i in order])

        return ExampleRows(
            merge_side(self.prompt, other.prompt),
            merge_side(self.target, other.target),
            example[order],
            part[order],
        )


@dataclass(frozen=True)
class Wrapped:
    """Token rows of one side with their special tokens."""

    side: TokenRows
    cut: Bools  # [rows] True if tokens were cut from the row
    lost: Ints  # [rows] number of text tokens cut from the row


def wrap(
    side: TokenRows,
    *,
    limit: int,
    begin: int | None,
    end: int | None,
    end_after_cut: bool,
) -> Wrapped:
    """Put `begin` before and `end` after each row, and cut rows to `limit` tokens.

    `end_after_cut` is whether a cut row also gets the end. If it does not, a row that lost only its
    end counts as cut.
    """
    n_begin = int(begin is not None)
    n_end = int(end is not None)
    lengths = side.lengths
    is_cut = lengths + n_begin + n_end > limit
    max_text = limit - n_begin - (n_end if end_after_cut else 0)
    text_lengths = np.where(is_cut, np.minimum(lengths, max_text), lengths)
    has_end = np.full(len(lengths), bool(n_end)) & (~is_cut | end_after_cut)
    row_lengths = n_begin + text_lengths + has_end
    ends = np.cumsum(row_lengths)
    starts = ends - row_lengths

    tokens = np.empty(int(row_lengths.sum()), np.uint32)
    is_text = np.ones(len(tokens), np.bool_)
    if begin is not None:
        is_text[starts] = False
        tokens[starts] = begin
    if end is not None:
        is_text[ends[has_end] - 1] = False
        tokens[ends[has_end] - 1] = end
    text = side.tokens
    if is_cut.any():
        # Keep the beginning of each row.
        parts = np.stack([text_lengths, lengths - text_lengths], axis=1).ravel()
        stays = np.repeat(np.tile([True, False], len(lengths)), parts)
        text = text[stays]
    tokens[is_text] = text
    return Wrapped(TokenRows(tokens, ends), is_cut, lengths - text_lengths)


def pieces(
    ids: Ids,
    *,
    family_kind: FamilyKind,
    max_prompt: int,
    max_target: int,
    bos_id: int | None,
    eos_id: int,
    ends: bool,
) -> Iterator[tuple[Ids, Ids]]:
    """Split a document into pieces with a prompt and a target each.

    In a decoder-only model, every token is a target once. The first prompt is [bos], and any other
    prompt is the last token of the previous piece. With max_target 3 and ids 5 6 7 8:

        [bos] -> 5 6 7        [7] -> 8 eos

    An encoder-decoder learns prefix language modelling (Raffel et al. 2020, section 3.2.1 and
    figure 4): a piece has max_prompt - 1 + max_target tokens, and the prompt is its beginning. A
    shorter last piece is divided in the same proportion.

    Args:
        ids: Token ids of the document.
        family_kind: Kind of the model.
        max_prompt: Largest number of tokens per prompt.
        max_target: Largest number of tokens per target.
        bos_id: Id of the begin token.
        eos_id: Id of the end token.
        ends: Whether the document ends with `ids`. If it does, an end token follows.
    """
    text = np.concatenate([ids, np.array([eos_id] if ends else [], np.uint32)])
    if family_kind == "decoder":
        prompt = np.array([] if bos_id is None else [bos_id], np.uint32)
        for start in range(0, len(text), max_target):
            target = text[start : start + max_target]
            yield prompt, target
            prompt = target[-1:]
        return
    # The end token takes a token of each prompt.
    max_prefix = max_prompt - 1
    size = max_prefix + max_target
    end = np.array([eos_id], np.uint32)
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        n_prefix = min(len(piece) - 1, max_prefix * len(piece) // size)
        yield np.concatenate([piece[:n_prefix], end]), piece[n_prefix:]
