"""Longest common subsequences, bit-parallel: one text's positions are the bits of an integer.

A column of the dynamic programme is an integer whose zero bits mark the positions of the
reference at which the length of the subsequence grows; a candidate's token updates it by an
addition (Crochemore et al. 2001, Hyyrö 2004): V' = (V + (V & M)) | (V & ~M), where M holds the
positions of that token in the reference.

The many short problems of ROUGE-Lsum advance together in numpy, one token a turn; longer ones are
solved one by one with Python's long integers, which are fast where few are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.tokens import I64, U64

WORD: Final = 63
"""Positions a problem of `lcs_positions` may have; the 64th bit takes the addition's overflow."""
_ONE: Final = np.uint64(1)
_ALL: Final = np.uint64(2**WORD - 1)


def lcs_length(reference: Sequence[int], candidate: Sequence[int]) -> int:
    """Length of the longest common subsequence of two lists of words.

    Every word of the candidate must be one of the reference's: the others cannot be on it.

    >>> lcs_length([1, 2, 3, 4], [2, 4, 3])
    2
    """
    masks: dict[int, int] = {}
    bit = 1
    for word in reference:
        masks[word] = masks.get(word, 0) | bit
        bit <<= 1
    column = everywhere = bit - 1
    for word in candidate:
        matches = column & masks[word]
        column = (column + matches) | (column - matches)
    return len(reference) - (column & everywhere).bit_count()


def lcs_positions(
    masks: U64, entries: I64, starts: I64, lengths: I64, skipped: NDArray[np.bool_]
) -> U64:
    """The reference positions on the common subsequence that rouge-score 0.1.2 reads off.

    Its table is walked from the end: over a match diagonally, else to the candidate's token before
    where the reference's position before has a shorter subsequence, else to the position before.
    In bits: the position falls to the highest one that matches or has a zero in the column.

    Args:
        masks: [entries] positions, below `WORD`, of each entry (a distinct word) of a reference.
        entries: the candidates' tokens as entries, one problem after the other; tokens that match
            nothing are left out.
        starts: [problems] first token of each problem.
        lengths: [problems] its tokens; descending.
        skipped: [tokens] whether tokens that match nothing were left out right after this one.

    Returns:
        [problems] positions as bits.
    """
    running = _running(lengths)
    turns: list[tuple[U64, U64]] = []
    column = np.full(len(lengths), _ALL)
    for turn, n in enumerate(running):
        matches, before = masks[entries[starts[:n] + turn]], column[:n]
        both = before & matches
        column = ((before + both) | (before ^ both)) & _ALL
        turns.append((matches, column))
    found = np.zeros(len(lengths), np.uint64)
    below = np.full(len(lengths), _ALL)  # positions not yet passed
    for turn in range(len(turns) - 1, -1, -1):
        matches, column = turns[turn]
        n = running[turn]
        grows, reach = column ^ _ALL, below[:n]
        over = np.flatnonzero(skipped[starts[:n] + turn])
        if len(over):
            reach[over] = _up_to_highest(grows[over] & reach[over])
        upto = _up_to_highest((matches | grows) & reach)
        taken = (upto ^ (upto >> _ONE)) & matches
        found[:n] |= taken
        below[:n] = upto ^ taken
    return found


def long_lcs_positions(matches: Sequence[int], skipped: Sequence[bool]) -> int:
    """The same for one problem of any length.

    Args:
        matches: positions of each of the candidate's tokens in the reference, as bits.
        skipped: as for `lcs_positions`.
    """
    everywhere = (1 << max(mask.bit_length() for mask in matches)) - 1
    column, columns = everywhere, []
    for mask in matches:
        both = column & mask
        column = ((column + both) | (column ^ both)) & everywhere
        columns.append(column)
    found, below = 0, everywhere
    for mask, column, over in zip(
        reversed(matches), reversed(columns), reversed(skipped), strict=True
    ):
        grows = column ^ everywhere
        if over:
            below = (1 << (grows & below).bit_length()) - 1
        reached = ((mask | grows) & below).bit_length()
        below = (1 << reached) - 1
        if reached and mask >> (reached - 1) & 1:
            below >>= 1
            found |= below + 1
    return found


def _running(lengths: I64) -> list[int]:
    """For each turn, how many of the problems (longest first) still have a token."""
    longest = int(lengths[0]) if len(lengths) else 0
    counts = np.searchsorted(-lengths, -np.arange(longest), side="left")
    return [int(n) for n in counts]


def _up_to_highest(bits: U64) -> U64:
    """All positions up to the highest set one."""
    filled = bits.copy()
    for shift in _SHIFTS:
        filled |= filled >> shift
    return filled


_SHIFTS: Final = tuple(np.uint64(1 << k) for k in range(6))
