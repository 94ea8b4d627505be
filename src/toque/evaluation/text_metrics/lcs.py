"""Longest common subsequences, bit-parallel: one text's positions are the bits of an integer.

A column of the dynamic programme is an integer whose zero bits mark the positions of the
reference at which the length of the subsequence grows; a candidate's token updates it by an
addition (Crochemore et al. 2001, Hyyrö 2004): V' = (V + (V & M)) | (V & ~M), where M holds the
positions of that token in the reference.

The many short problems of ROUGE-Lsum advance together in numpy, one token a turn; longer ones are
solved one by one with Python's long integers, which are fast where few are left. Where only the
length is wanted (ROUGE-L), the columns of many problems are fields of one long integer, each with
a bit to spare, which takes the addition's overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.evaluation.text_metrics.token_hashes import I64, U64

WORD: Final = 63
"""Positions a problem of `lcs_positions` may have; the 64th bit takes the addition's overflow."""
Side = tuple[I64, I64]
"""Words, and the problem of each."""
_TOGETHER: Final = 1 << 22
"""Problems whose size squared sums up to this are solved together: about as many bytes."""
_LONGEST: Final = 4096
"""Words of a problem that is solved by itself."""
_ONE: Final = np.uint64(1)
_ALL: Final = np.uint64(2**WORD - 1)


def lcs_lengths(reference: Side, candidate: Side, n: int) -> I64:
    """Length of the longest common subsequence of each of `n` problems.

    Every word of a problem's candidate must be one of its reference's: the others cannot be on it.

    Args:
        reference: words and problems; those of a problem stand together, in their order, and no
            word is of two problems.
        candidate: the same of the other side.
        n: number of problems, some perhaps without words.

    >>> problems = np.array([0, 0, 0, 0, 2])
    >>> lcs_lengths((np.array([1, 2, 3, 4, 7]), problems), (np.array([2, 4, 3]), problems[:3]), 3)
    array([2, 0, 0])
    """
    found = np.zeros(n, np.int64)
    sizes = np.stack([np.bincount(problems, minlength=n) for _, problems in (reference, candidate)])
    larger = sizes.max(0)
    order = np.argsort(larger)
    order = order[sizes[0][order] > 0]
    at = 0
    while at < len(order):
        # Problems of like size; of the largest there are the fewest together.
        squares = larger[order[at:]].astype(float) ** 2 * np.arange(1, len(order) - at + 1)
        end = at + max(1, int(np.searchsorted(squares, _TOGETHER)))
        chosen = np.full(n, -1)
        chosen[order[at:end]] = np.arange(end - at)
        sides = [
            (words[kept := chosen[problems] >= 0], chosen[problems[kept]])
            for words, problems in (reference, candidate)
        ]
        if end - at == 1 and larger[order[at]] > _LONGEST:
            found[order[at]] = lcs_length(sides[0][0].tolist(), sides[1][0].tolist())
        else:
            found[order[at:end]] = _lengths(sides[0], sides[1], end - at)
        at = end
    return found


def _lengths(reference: Side, candidate: Side, n: int) -> I64:
    """`lcs_lengths` of problems small enough to be the fields of one integer."""
    places, turns = (ranks(problems) for _, problems in (reference, candidate))
    n_bytes = (int(places.max()) + 1) // 8 + 1  # at least one bit more than positions
    known = np.zeros(int(reference[0].max()) + 1, np.int64)
    known[reference[0]] = 1
    numbers = np.cumsum(known)  # of words, from 1; 0 is of no token
    bits = np.zeros((int(numbers[-1]) + 1, 8 * n_bytes), bool)
    bits[numbers[reference[0]], places] = True
    masks = np.packbits(bits, axis=1, bitorder="little")
    if not len(turns):
        return np.zeros(n, np.int64)
    entry = np.zeros((int(turns.max()) + 1, n), np.int64)
    entry[turns, candidate[1]] = numbers[candidate[0]]
    field = (1 << (8 * n_bytes - 1)) - 1
    column = everywhere = int.from_bytes(field.to_bytes(n_bytes, "little") * n, "little")
    for row in masks[entry]:
        matches = column & int.from_bytes(row.tobytes(), "little")
        column = ((column + matches) | (column - matches)) & everywhere
    left = np.frombuffer(column.to_bytes(n * n_bytes, "little"), np.uint8).reshape(n, n_bytes)
    found: I64 = 8 * n_bytes - 1 - np.bitwise_count(left).sum(1, dtype=np.int64)
    return found


def ranks(groups: I64) -> I64:
    """Position of each element within its run of equal neighbours, from 0."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    return np.arange(len(groups)) - np.repeat(first, np.diff(first, append=len(groups)))


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
