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
    """Prompt of a kept example, whose `text` is the target."""


def shortened(text: str | bytes, limit: int = MAX_CHARS) -> str:
    r"""Text of at most `limit` characters, valid in JSON.

    >>> shortened(b"caf\xc3\xa9 \xff", 5)
    'café …'
    """
    if isinstance(text, bytes):
        text = text[: 4 * limit + 4].decode(errors="replace")
    # A lone surrogate, which a JSON escape can hold, cannot be encoded in UTF-8.
    whole = text[: limit + 1].encode(errors="replace").decode()
    return whole if len(whole) <= limit else whole[:limit].rstrip("\n") + "…"


def sampled(excerpts: Iterable[Excerpt], per_reason: int = PER_REASON) -> list[Excerpt]:
    """The excerpts of each reason with the smallest hashes, by reason and hash.

    >>> given = [Excerpt("no title", place, "{}") for place in ("a:1", "a:2")]
    >>> len(sampled(given, per_reason=1))
    1
    """
    by_reason = sorted(_by_reason(excerpts).items())
    return [excerpt for _, ranked in by_reason for excerpt in ranked[:per_reason]]


def spread(excerpts: Iterable[Excerpt], n: int) -> list[Excerpt]:
    """Excerpts, at most `n`, taken from each reason in turn, so that rare reasons are shown too.

    >>> given = [Excerpt(reason, str(i), "") for i, reason in enumerate("aaab")]
    >>> [e.reason for e in spread(given, 3)]
    ['a', 'a', 'b']
    """
    turns = sorted(
        (
            (turn, reason, excerpt)
            for reason, ranked in _by_reason(excerpts).items()
            for turn, excerpt in enumerate(ranked[:n])
        ),
        key=lambda at: at[:2],
    )
    return sorted((e for _, _, e in turns[:n]), key=lambda excerpt: excerpt.reason)


def _by_reason(excerpts: Iterable[Excerpt]) -> dict[str, list[Excerpt]]:
    """The excerpts of each reason, the smallest hash first."""
    by_reason: dict[str, list[Excerpt]] = defaultdict(list)
    for excerpt in sorted(excerpts, key=_rank):
        by_reason[excerpt.reason].append(excerpt)
    return by_reason


def _rank(excerpt: Excerpt) -> tuple[int, str]:
    written = f"{excerpt.reason}\0{excerpt.place}\0{excerpt.prompt}\0{excerpt.text}"
    return xxhash.xxh3_64_intdigest(written.encode()), excerpt.place
