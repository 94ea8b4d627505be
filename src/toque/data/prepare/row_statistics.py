"""Statistics of a store's rows for the data report: columns, sources, kept and dropped examples.

One column is read at a time: a store of millions of rows needs tens of megabytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES, TokenStore
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import mixed
from toque.sources.records import PER_REASON, shortened

BARS = 32
"""Most bins in a histogram."""
FEW = 12
"""A column with at most this many different integers is counted value by value."""
FROM, COVERAGE = "_from", "_coverage"
"""Column `X_from` holds the origin of each row's label `X`, 0 being our own rule; `X_coverage` how
much of what that rule needs was known."""
MANY = 40
"""Up to so many are counted as well, beside a histogram: they may be classes with names."""
BY_RULE = 0
SHOWN = 20
"""Kept, and dropped, records shown in the report."""
_MAX_LABEL = 255
"""Larger integers are amounts, never labels."""
_SALT = np.uint64(0x746F7175655F6C6B)
_OWN = frozenset({"key", "title_key", "record_key", "source", "task", "starts_record"})
"""Bookkeeping columns, which every store has and no histogram shows."""


class Excerpt(msgspec.Struct, frozen=True):
    """One record, shortened for display."""

    reason: str
    """Why it was dropped; "train" or "validation" for a kept one."""
    place: str
    """File and line; "" for a row of the store."""
    text: str
    prompt: str = ""
    """Prompt of a kept example, whose `text` is the target."""


class Histogram(msgspec.Struct, frozen=True):
    """`counts[i]` values lie in [edges[i], edges[i + 1]); the last bin includes its end."""

    edges: list[float]
    counts: list[int]

    def __post_init__(self) -> None:
        """Refuse bins that are none: a report is read from a file, too."""
        rising = all(a < b for a, b in pairwise(self.edges))
        if len(self.edges) != len(self.counts) + bool(self.counts) or not rising:
            raise ValueError("edges that do not enclose the bins")

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Histogram:
        """A histogram with bins of a round width; no bins without values.

        >>> Histogram.of(np.array([0, 1, 1, 39])).edges[:3]
        [0.0, 2.0, 4.0]
        """
        if not len(values):
            return cls([], [])
        least, most = float(values.min()), float(values.max())
        whole = np.issubdtype(values.dtype, np.integer)
        width = round_width((most - least) / BARS or 1.0)
        width = max(1.0, width) if whole else width
        first = np.floor(least / width)
        # 1.0 ends a share's last bin; 20 begins another of whole numbers.
        last = np.floor(most / width) + 1 if whole else np.ceil(most / width * (1 - 1e-12))
        n = max(1, int(last - first))
        edges = (first + np.arange(n + 1)) * width
        counts, _ = np.histogram(values, bins=edges)
        return cls([round(float(edge), 9) for edge in edges], counts.tolist())


class ColumnReport(msgspec.Struct, frozen=True, kw_only=True):
    """One per-example column over the rows in use."""

    name: str
    known: int
    missing: int
    """Rows without a value."""
    mean: float
    least: float
    most: float
    histogram: Histogram | None = None
    """Histogram of a column with many values."""
    values: dict[str, int] = {}
    """Rows per value, for a column with at most `MANY` different integers."""
    origins: dict[str, dict[str, int]] = {}
    """Rows per value for each origin of the value; empty if not recorded."""


class SourceRows(msgspec.Struct, frozen=True):
    """Rows and tokens of a source, after duplicates and limits."""

    source: int
    train: int
    validation: int
    tokens: int


def round_width(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below `least`.

    >>> round_width(0.03), round_width(13), round_width(50)
    (0.05, 20.0, 50.0)
    """
    power = 10.0 ** np.floor(np.log10(least))
    # A width of exactly 5 must not become 10 by the last bit.
    step = next(step for step in (1.0, 2.0, 5.0, 10.0) if step * power >= least * (1 - 1e-12))
    return float(f"{step * power:.6g}")


def _column_report(
    name: str, values: NDArray[np.generic], origin: NDArray[np.generic] | None
) -> ColumnReport:
    """The report of a column [n], NaN where there is no value, by its values' origins [n]."""
    numbers = values.astype(np.float64)
    there = ~np.isnan(numbers)
    known = numbers[there]
    if not len(known):
        return ColumnReport(name=name, known=0, missing=len(numbers), mean=0, least=0, most=0)
    counts = _few(known)
    named = counts if counts is not None else _few(known, most=MANY)
    origins: dict[str, dict[str, int]] = {}
    if counts and origin is not None:
        kinds = origin[there].astype(np.float64)
        origins = {kind: _few(known[kinds == float(kind)]) or {} for kind in _few(kinds) or {}}
    return ColumnReport(
        name=name,
        known=len(known),
        missing=len(numbers) - len(known),
        mean=round(float(known.mean()), 4),
        least=round(float(known.min()), 4),
        most=round(float(known.max()), 4),
        histogram=None if counts else Histogram.of(known),
        values=named or {},
        origins=origins,
    )


def column_reports(
    names: Collection[str], read: Callable[[str], NDArray[np.generic]]
) -> list[ColumnReport]:
    """Reports of all measured columns.

    A column is broken down by the origin of its values, and coverage is reported for estimates
    alone: values from the source are covered by definition.

    Args:
        names: of the store's columns.
        read: a column's values in the rows in use.
    """
    reports = []
    for name in sorted(set(names) - _OWN):
        whole = name.removesuffix(FROM)
        if whole != name and whole in names:
            continue
        values = read(name)
        origin = read(name + FROM) if name + FROM in names else None
        estimate = name.removesuffix(COVERAGE) + FROM
        if name.endswith(COVERAGE) and estimate in names:
            values = np.where(read(estimate) == BY_RULE, values, np.nan)
        reports.append(_column_report(name, values, origin))
    return reports


def source_rows(store: TokenStore, lengths: NDArray[np.int32]) -> list[SourceRows]:
    """Rows and tokens of each source; `lengths`: tokens of each row in use."""
    source = store.column("source").astype(np.int64)
    n = int(source.max()) + 1 if len(source) else 0
    train, validation = (
        np.bincount(source[store.split == code], minlength=n) for code in SPLIT_CODES.values()
    )
    tokens = np.bincount(source[store.split != LEFT_OUT], weights=lengths, minlength=n)
    return [SourceRows(i, int(train[i]), int(validation[i]), int(tokens[i])) for i in range(n)]


def kept_excerpts(store: TokenStore, codec: Codec) -> list[Excerpt]:
    """Kept examples as the model sees them, sampled by a hash of their key."""
    names = {code: name for name, code in SPLIT_CODES.items()}
    rows = _drawn(store, store.split != LEFT_OUT)
    return [_excerpt(store, codec, row, names[int(store.split[row])]) for row in rows]


def dropped_excerpts(
    store: TokenStore, codec: Codec, excerpts: Sequence[Excerpt], reasons: Mapping[str, int]
) -> list[Excerpt]:
    """Dropped records: by their reader, by a limit, as duplicates.

    Args:
        store: the store.
        codec: turns ids into text.
        excerpts: records that did not become rows.
        reasons: why rows were left out, with their counts of records.
    """
    rows = _drawn(store, store.split == LEFT_OUT)
    if not rows or not reasons:
        return spread(excerpts, SHOWN)
    keys = store.column("record_key")
    again = np.isin(keys[rows], keys[store.split != LEFT_OUT]).tolist()
    rest = " or ".join(r for r in sorted(reasons) if r != "duplicate") or "duplicate"
    left_out = [
        _excerpt(store, codec, row, "duplicate" if twice and "duplicate" in reasons else rest)
        for row, twice in zip(rows, again, strict=True)
    ]
    return spread([*excerpts, *left_out], SHOWN)


def _drawn(store: TokenStore, among: NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(among)
    order = mixed(store.column("key")[rows].astype(np.uint64) ^ _SALT)
    drawn: list[int] = rows[np.argsort(order, kind="stable")[:SHOWN]].tolist()
    return drawn


def _excerpt(store: TokenStore, codec: Codec, row: int, reason: str) -> Excerpt:
    prompt, target = (codec.decode(ids.tolist()) for ids in (store.prompt(row), store.target(row)))
    return Excerpt(reason, "", shortened(target), shortened(prompt))


def _few(values: NDArray[np.float64], *, most: int = FEW) -> dict[str, int] | None:
    """Rows per value if the values are few integers, else None."""
    if not len(values):
        return {}
    if values.min() < 0 or values.max() > _MAX_LABEL or (values != np.floor(values)).any():
        return None
    counts = np.bincount(values.astype(np.int64))
    different = np.flatnonzero(counts)
    if len(different) > most:
        return None
    return {str(value): int(counts[value]) for value in different}


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
