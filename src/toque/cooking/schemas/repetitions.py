"""Repetitions in scraped lines: second copies of a list, a text and a line. Each is counted."""

from __future__ import annotations

import re
from collections import Counter
from itertools import accumulate
from operator import contains

DOUBLED_LISTS = "doubled lists of ingredients"
MIN_DOUBLED_CHARS = 40  # shorter texts may repeat on purpose ("Stir. Stir.")
_MIN_COPY_CHARS = 120  # minimum letters and digits of lines that repeat distant lines
MAX_STEPS = 200  # maximum compared steps, because the comparison takes quadratic time
_ALIKE_CHARS = 24
_MAX_HEADING_CHARS = 40  # maximum characters of a heading before a repeated text
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_NOTES_HEADING = re.compile(r"(?:[\w'’]{2,8} )?(?:notes?|tips?)\W*", re.IGNORECASE)


def without_repeat(
    lines: list[str],
    notes: Counter[str],
    note: str = "doubled instructions",
    *,
    shortest: int = MIN_DOUBLED_CHARS,
) -> list[str]:
    """Drop a second copy of all or many lines, and a line that repeats the previous line.

    A line with fewer characters than `shortest` may repeat the previous line.
    """
    if len(lines) > MAX_STEPS or not _may_repeat(lines):
        return lines
    different = [
        line
        for line, before in zip(lines, ("", *lines), strict=False)
        if len(line) < shortest or _bare(line) != _bare(before)
    ]
    if len(different) < len(lines):
        notes["lines that repeat the line before"] += 1
    once = _without_first_copy(different)
    once = _without_later_copies(once)
    once = _without_doubled_parts(once)
    if once != different:
        notes[note] += 1
    return once


def _may_repeat(lines: list[str]) -> bool:
    """Return whether two lines have the same start, or a line starts within the previous line."""
    starts = [line[:_ALIKE_CHARS] for line in lines]
    if len(set(starts)) < len(starts):
        return True
    return any(map(contains, lines, starts[1:]))


def _bare(line: str) -> str:
    """Return the letters and digits of a line in lower case."""
    return _NOT_ALPHANUMERIC.sub("", line).lower()


def _without_first_copy(lines: list[str]) -> list[str]:
    """Drop lines at the beginning that the next lines repeat."""
    bare = list(map(_bare, lines))
    joined = "".join(bare)
    half = len(joined) // 2
    ends = list(accumulate(map(len, bare)))
    is_doubled = half >= MIN_DOUBLED_CHARS and joined[:half] == joined[half:]
    if is_doubled and half in ends:  # the second copy begins with a line
        at = ends.index(half) + 1
        return max(lines[:at], lines[at:], key=len)  # keep the copy with more lines
    # One paragraph may precede its text line by line.
    for at, end in enumerate(ends[:-1], start=1):
        if end >= MIN_DOUBLED_CHARS and joined.startswith(joined[:end], end):
            return lines[at:]
    return lines


def _without_later_copies(lines: list[str]) -> list[str]:
    """Drop each long run of lines that repeats a previous run."""
    bare = list(map(_bare, lines))
    first: dict[str, int] = {}
    unique_lines: list[str] = []
    start = 0
    while start < len(lines):
        earlier = first.setdefault(bare[start], start)
        n_copied = _n_equal_lines(bare, earlier, start) if earlier < start else 0
        copy = bare[start : start + n_copied]
        if sum(map(len, copy)) >= _MIN_COPY_CHARS:
            start += n_copied
        else:
            unique_lines.append(lines[start])
            start += 1
    return unique_lines


def _n_equal_lines(lines: list[str], earlier: int, start: int) -> int:
    """Return how many lines from `start` equal the lines from `earlier`."""
    n_equal = 0
    for before, line in zip(lines[earlier:], lines[start:], strict=False):
        if before != line:
            break
        n_equal += 1
    return n_equal


def _repeated_end(n: int, bare: list[str]) -> tuple[int, int]:
    """Return the index after the next lines that end line `n`, and their letters and digits."""
    after = n
    n_repeated = 0
    tail = ""
    for end in range(n + 1, len(bare)):
        tail += bare[end]
        if tail not in bare[n]:
            break
        if bare[n].endswith(tail):
            after = end + 1
            n_repeated = len(tail)
    return after, n_repeated


def _without_doubled_parts(lines: list[str]) -> list[str]:
    """Drop the end of a paragraph that the next lines repeat. Keep its heading.

    >>> bake = "Bake it until golden brown, for about an hour."
    >>> _without_doubled_parts([f"For the cake: Beat the eggs. {bake}", "Beat the eggs.", bake])
    ['For the cake: Beat the eggs.', 'Bake it until golden brown, for about an hour.']
    """
    bare = list(map(_bare, lines))
    cleaned_lines: list[str] = []
    opening = ""  # heading of a dropped paragraph, for the next line
    end = 0  # index after the dropped lines
    for n, line in enumerate(lines):
        if n < end:
            continue
        after, n_repeated = _repeated_end(n, bare)
        if n_repeated < MIN_DOUBLED_CHARS:
            cleaned_lines.append(opening + line)
            opening = ""
            continue

        letters = [at for at, character in enumerate(line) if character.isalnum()]
        start = letters[-n_repeated]
        before = (opening + line[:start]).strip()
        opening = ""
        if _NOTES_HEADING.fullmatch(before):
            # Notes are not steps, so keep their text here and drop the next lines.
            cleaned_lines.append(f"{before.rstrip(' :.')}: {line[start:]}")
            end = after
        elif len(before) > _MAX_HEADING_CHARS:
            # Without the number in "Let it cool. 2Add the peas."
            cleaned_lines.append(before.rstrip("0123456789"))
        elif before:
            mark = "" if before[-1] in ".?!:" else ":"
            opening = f"{before}{mark} "
    return cleaned_lines
