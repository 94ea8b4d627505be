"""Excerpts of kept and dropped records for the data report.

The sample is a bounded number of records for each reason, those with the smallest hashes. So it
depends on the data alone: not on the workers, their order, or where a `prepare` was interrupted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
import xxhash

MAX_CHARS = 600
"""Characters shown of a text; a record may be megabytes long."""
PER_REASON = 5
"""Dropped records per reason whose text a shard, or a reader's block, keeps."""


class Excerpt(msgspec.Struct, frozen=True):
    """One record, shortened for display."""

    reason: str
    """Why it was dropped; "train" or "validation" for a kept one."""
    place: str
    """File and line; "" for a row of the store."""
    text: str
    prompt: str = ""
    """Of a kept example, whose `text` is the target."""


def shortened(text: str | bytes, limit: int = MAX_CHARS) -> str:
    r"""At most `limit` characters of a text, valid in JSON.

    >>> shortened(b"caf\xc3\xa9 \xff", 5)
    'café …'
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit + 4].decode(errors="replace")
    # A lone surrogate, which a JSON escape can hold, cannot be encoded in UTF-8.
    whole = text[: limit + 1].encode(errors="replace").decode()
    return whole if len(whole) <= limit else whole[:limit].rstrip("\n") + "…"


class ExcerptSample:
    """Keeps `per_reason` excerpts of each reason: those with the smallest hashes.

    >>> sample = ExcerptSample(per_reason=1)
    >>> for place in ("a:1", "a:2"):
    ...     sample.add(Excerpt("no title", place, "{}"))
    >>> len(sample.chosen())
    1
    """

    def __init__(self, per_reason: int = PER_REASON) -> None:
        self._per_reason = per_reason
        self._held: dict[str, list[tuple[int, Excerpt]]] = defaultdict(list)

    def add(self, excerpt: Excerpt) -> None:
        """Add an excerpt, if its hash is small enough."""
        held = self._held[excerpt.reason]
        held.append((_rank(excerpt), excerpt))
        if len(held) >= 4 * self._per_reason:
            self._held[excerpt.reason] = _smallest(held, self._per_reason)

    def chosen(self) -> list[Excerpt]:
        """The sample, sorted by reason and hash."""
        return [
            excerpt
            for _, held in sorted(self._held.items())
            for _, excerpt in _smallest(held, self._per_reason)
        ]


def spread(excerpts: Iterable[Excerpt], n: int) -> list[Excerpt]:
    """At most `n`, taken from each reason in turn, so that rare reasons are shown too.

    >>> given = [Excerpt(reason, str(i), "") for i, reason in enumerate("aaab")]
    >>> [e.reason for e in spread(given, 3)]
    ['a', 'a', 'b']
    """
    by_reason: dict[str, list[tuple[int, Excerpt]]] = defaultdict(list)
    for excerpt in excerpts:
        by_reason[excerpt.reason].append((_rank(excerpt), excerpt))
    turns = sorted(
        (
            (turn, reason, excerpt)
            for reason, held in by_reason.items()
            for turn, (_, excerpt) in enumerate(_smallest(held, n))
        ),
        key=lambda at: at[:2],
    )
    return sorted((e for _, _, e in turns[:n]), key=lambda excerpt: excerpt.reason)


def _smallest(held: list[tuple[int, Excerpt]], n: int) -> list[tuple[int, Excerpt]]:
    return sorted(held, key=lambda pair: (pair[0], pair[1].place))[:n]


def _rank(excerpt: Excerpt) -> int:
    written = f"{excerpt.reason}\0{excerpt.place}\0{excerpt.prompt}\0{excerpt.text}"
    return xxhash.xxh3_64_intdigest(written.encode())
