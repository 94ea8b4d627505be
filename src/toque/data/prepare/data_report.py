"""The data report of a store, `report.json`: counts of records, statistics of rows, excerpts.

One column is read at a time: a store of millions of rows needs tens of megabytes.
"""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES, TokenStore
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import mixed
from toque.sources.documents import LOST_BYTES
from toque.sources.records import NOT_UTF_8, PER_REASON, most_named, shortened
from toque.storage.atomic import atomic_write
from toque.storage.json_files import read_json

JSON_NAME = "report.json"
NOTED_UNKNOWN, MOST_UNKNOWN = 0.005, 0.25  # shares of unknown tokens to tell, and to refuse
ENCODING_HINT = (
    "Many bytes are not UTF-8: the files may be in an older encoding. Set data.encoding=cp1252, "
    "which most Western European exports are in, or data.encoding=latin-1."
)
_MANY_LOST_BYTES = 100  # lost bytes above which a text's encoding is suspected; fewer are damage
BEYOND = "beyond max_examples"  # the reason for dropping valid records beyond `max_examples`
FROM, COVERAGE = "_from", "_coverage"  # origin of each row's label; how much of it was known
BY_RULE = 0  # the origin of a label that our own rule gave
_BARS = 32  # most bins in a histogram
_FEW, _MANY = 12, 40  # different integers counted value by value instead of a histogram; beside one
_SHOWN = 20  # kept, and dropped, records shown in the report
_MAX_LABEL = 255  # larger integers are amounts, never labels
_SALT = np.uint64(0x746F7175655F6C6B)
LOST = {"prompt": "prompt_lost", "target": "target_lost"}
"""Columns of the text tokens that a side lost, NaN where it is whole; absent where all are."""
OWN = frozenset(
    {"key", "title_key", "record_key", "source", "task", "starts_record", *LOST.values()}
)
"""Bookkeeping columns, which no histogram shows."""


class Excerpt(msgspec.Struct, frozen=True):
    """One record, shortened for display."""

    reason: str  # why it was dropped; "train" or "validation" for a kept one
    place: str  # file and line; "" for a row of the store
    text: str
    prompt: str = ""  # prompt of a kept example, whose `text` is the target


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
        """A histogram with bins of a round width, such as 0, 2, 4; no bins without values."""
        if not len(values):
            return cls([], [])
        least, most = float(values.min()), float(values.max())
        whole = np.issubdtype(values.dtype, np.integer)
        # The smallest of 1, 2, 5 times a power of ten that is not below the range's share: of 13,
        # 20. A width of exactly 5 must not become 10 by the last bit.
        share = (most - least) / _BARS or 1.0
        power = 10.0 ** np.floor(np.log10(share))
        step = next(s for s in (1.0, 2.0, 5.0, 10.0) if s * power >= share * (1 - 1e-12))
        width = max(1.0 if whole else 0.0, float(f"{step * power:.6g}"))
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
    missing: int  # rows without a value
    mean: float
    least: float
    most: float
    histogram: Histogram | None = None  # histogram of a column with many values
    values: dict[str, int] = {}  # rows per value, of at most `_MANY` different integers
    origins: dict[str, dict[str, int]] = {}  # rows per value by the value's origin, if recorded


class SourceRows(msgspec.Struct, frozen=True):
    """Rows and tokens of a source, after duplicates and limits."""

    source: int
    train: int
    validation: int
    tokens: int


class Lengths(msgspec.Struct, frozen=True):
    """Tokens per used row of one side."""

    mean: float
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def of(cls, lengths: NDArray[np.int64]) -> Lengths:
        """Percentiles of `lengths`; all zero when there are none."""
        if not len(lengths):
            return cls(0.0, 0, 0, 0, 0)
        shares = np.percentile(lengths, [50, 90, 99, 100], method="higher")
        return cls(round(float(lengths.mean()), 1), *shares.astype(int).tolist())


def is_of_another_encoding(read: int, dropped: Mapping[str, int], notes: Mapping[str, int]) -> bool:
    """True if so many bytes are not UTF-8 that the files are likely in an older encoding."""
    return dropped.get(NOT_UTF_8, 0) > 0.01 * read or notes.get(LOST_BYTES, 0) > _MANY_LOST_BYTES


class SourceReport(msgspec.Struct, frozen=True):
    """One source file: records read and kept by its reader."""

    path: str
    schema: str  # its schema by its content; "" if it can no longer be read
    source: int  # index in data.sources of the source it belongs to
    read: int
    kept: int
    unused: dict[str, int] = {}  # fields that no example holds, with the records that fill them


def unused_in_words(sources: Sequence[SourceReport]) -> list[str]:
    """A sentence for each source some of whose fields no example holds."""
    found: list[str] = []
    for number in sorted({file.source for file in sources}):
        files = [file for file in sources if file.source == number]
        unused = sum((Counter(file.unused) for file in files), Counter[str]())
        read = sum(file.read for file in files)
        fields = [
            repr(name) + (f" ({n:,} of {read:,} records)" if n < read else "")
            for name, n in most_named(unused).items()
        ]
        if fields:
            place = files[0].path + (f" and {len(files) - 1:,} more" if len(files) > 1 else "")
            found.append(f"Fields of {place} that no example holds: {', '.join(fields)}.")
    return found


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The data report, by which equal stores differ in seconds; `read == kept + sum(dropped)`."""

    tokenizer: str
    sources: list[SourceReport]
    source_rows: list[SourceRows]
    read: int
    kept: int
    dropped: dict[str, int]
    lines: dict[str, list[str]]  # where the first dropped records stand
    notes: dict[str, int]
    examples: int
    train: int
    validation: int
    prompt_tokens: int
    target_tokens: int
    prompt_lengths: Lengths
    target_lengths: Lengths
    cut: dict[str, int]  # sides of rows in use that were cut to their limit, and the tokens lost
    unknown: dict[str, int]  # unknown tokens beside all tokens of each side
    lost_characters: dict[str, int]
    leaked_bodies: int
    leaked_titles: int
    split_rule: str
    prompt_histogram: Histogram
    target_histogram: Histogram
    columns: list[ColumnReport]
    kept_examples: list[Excerpt]
    dropped_examples: list[Excerpt]
    seconds: float  # seconds of this start only; shards kept from an earlier one are not counted
    limits: list[str] = []  # sentences on the limits that were chosen from the data
    lost_in_all: int = 0  # characters without a stand-in, those not among the `lost_characters` too
    left_out: dict[str, str] = {}  # files of a folder or pattern not read, with the reason

    @property
    def lost(self) -> int:
        """Records dropped for any reason but `max_examples`."""
        return self.read - self.kept - self.dropped.get(BEYOND, 0)

    def counted(self) -> str:
        """A clause that accounts for all records."""
        beyond = self.dropped.get(BEYOND, 0)
        more = f", left {beyond:,} beyond max_examples" if beyond else ""
        return f"Read {self.read:,} records: kept {self.kept:,}, dropped {self.lost:,}{more}."

    def write(self, folder: Path) -> None:
        """Write it into the store."""
        atomic_write(folder / JSON_NAME, msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def read_from(cls, folder: Path) -> Report | None:
        """The report of a store; None if it is missing or damaged."""
        return read_json(folder / JSON_NAME, cls)

    def splitting(self) -> str:
        """A sentence on the split and what leaks through it."""
        return (
            f"Split: {self.split_rule}. Of the held-out examples, {self.leaked_bodies:,} have "
            f"a body that is trained on and {self.leaked_titles:,} a title that is."
        )

    @property
    def unknown_share(self) -> float:
        """Share of all tokens, of both sides, that the vocabulary does not hold."""
        n_all = self.unknown.get("prompt_tokens", 0) + self.unknown.get("target_tokens", 0)
        return (self.unknown.get("prompt", 0) + self.unknown.get("target", 0)) / max(1, n_all)

    def unknown_notice(self) -> str | None:
        """Notice on unknown tokens and what to do about them; None where there are few."""
        if self.unknown_share < NOTED_UNKNOWN:
            return None
        shown = [
            f"{c!r} ({unicodedata.name(c, 'no name').lower()}) {n / max(1, self.lost_in_all):.0%}"
            for c, n in list(self.lost_characters.items())[:5]
        ]
        of_which = f" Of the characters lost: {', '.join(shown)}." if shown else ""
        return (
            f"{self.unknown_share:.1%} of all tokens are unknown to the vocabulary of "
            f"{self.tokenizer}: a model reads a gap in their place, and writes <unk>.{of_which} "
            "Take a tokenizer that holds these characters (GPT-2's holds every byte), "
            "or learn one from this data: model.tokenizer=trained:8192."
        )

    def losses(self) -> list[str]:
        """Sentences on truncation and characters outside the vocabulary."""
        cut = []
        for side, total in (("prompt", self.prompt_tokens), ("target", self.target_tokens)):
            lost = self.cut.get(f"{side}_tokens", 0)
            cut.append(
                f"{self.cut.get(f'{side}s', 0):,} {side}s were cut, losing {lost:,} tokens "
                f"({lost / max(1, total + lost):.2%} of their side)."
            )
        n_unknown = self.unknown.get("prompt", 0) + self.unknown.get("target", 0)
        shown = " ".join(f"{c!r} {n}" for c, n in list(self.lost_characters.items())[:10])
        unknown = (
            f"{n_unknown:,} tokens are unknown to the vocabulary ({self.unknown_share:.4%})"
            + (f"; the characters most often lost: {shown}." if shown else ".")
        )
        return [*self.limits, " ".join(cut), unknown]


def reasons_in_words(dropped: Mapping[str, int], lines: Mapping[str, list[str]]) -> str:
    """Counts by reason with the first places, the most frequent first, for an error message."""
    parts = []
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        first = ", ".join(lines.get(reason, [])[:3])
        parts.append(f"{count:,} {reason}" + (f" (first at {first})" if first else ""))
    return "; ".join(parts) or "no record was found"


def _column_report(
    name: str, values: NDArray[np.generic], origin: NDArray[np.generic] | None
) -> ColumnReport:
    """The report of a column [n], NaN where there is no value, by its values' origins [n]."""
    numbers = values.astype(np.float64)
    there = ~np.isnan(numbers)
    known = numbers[there]
    if not len(known):
        return ColumnReport(name=name, known=0, missing=len(numbers), mean=0, least=0, most=0)
    counts = _few(known, _FEW)
    origins: dict[str, dict[str, int]] = {}
    if counts and origin is not None:
        kinds = origin[there].astype(np.float64)
        named = _few(kinds, _FEW) or {}
        origins = {kind: _few(known[kinds == float(kind)], _FEW) or {} for kind in named}
    return ColumnReport(
        name=name,
        known=len(known),
        missing=len(numbers) - len(known),
        mean=round(float(known.mean()), 4),
        least=round(float(known.min()), 4),
        most=round(float(known.max()), 4),
        histogram=None if counts else Histogram.of(known),
        values=counts or _few(known, _MANY) or {},
        origins=origins,
    )


def column_reports(
    names: Collection[str], read: Callable[[str], NDArray[np.generic]]
) -> list[ColumnReport]:
    """Reports of measured columns, which `read` gives in the rows in use; coverage of estimates."""
    reports = []
    for name in sorted(set(names) - OWN):
        if name.endswith(FROM) and name.removesuffix(FROM) in names:
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
    """Dropped records: `excerpts` of those without rows, and rows left out for `reasons`."""
    rows = _drawn(store, store.split == LEFT_OUT) if reasons else []
    keys = store.column("record_key")
    again = np.isin(keys[rows], keys[store.split != LEFT_OUT]).tolist() if rows else []
    rest = " or ".join(r for r in sorted(reasons) if r != "duplicate") or "duplicate"
    left_out = [
        _excerpt(store, codec, row, "duplicate" if twice and "duplicate" in reasons else rest)
        for row, twice in zip(rows, again, strict=True)
    ]
    return spread([*excerpts, *left_out], _SHOWN)


def _drawn(store: TokenStore, among: NDArray[np.bool_]) -> list[int]:
    rows = np.flatnonzero(among)
    order = mixed(store.column("key")[rows].astype(np.uint64) ^ _SALT)
    drawn: list[int] = rows[np.argsort(order, kind="stable")[:_SHOWN]].tolist()
    return drawn


def _excerpt(store: TokenStore, codec: Codec, row: int, reason: str) -> Excerpt:
    prompt, target = (codec.decode(ids.tolist()) for ids in (store.prompt(row), store.target(row)))
    return Excerpt(reason, "", shortened(target), shortened(prompt))


def _few(values: NDArray[np.float64], most: int) -> dict[str, int] | None:
    """Rows per value if the values are at most `most` different integers, else None."""
    if not len(values):
        return {}
    if values.min() < 0 or values.max() > _MAX_LABEL or (values != np.floor(values)).any():
        return None
    different, counts = np.unique(values.astype(np.int64), return_counts=True)
    if len(different) > most:
        return None
    return dict(zip(map(str, different.tolist()), counts.tolist(), strict=True))


def sampled(excerpts: Iterable[Excerpt], per_reason: int = PER_REASON) -> list[Excerpt]:
    """The excerpts of each reason with the smallest hashes, by reason and hash."""
    by_reason = sorted(_by_reason(excerpts).items())
    return [excerpt for _, ranked in by_reason for excerpt in ranked[:per_reason]]


def spread(excerpts: Iterable[Excerpt], n: int) -> list[Excerpt]:
    """Choose at most `n` excerpts, of each reason in turn, so that rare reasons are shown too."""
    turns = [
        (turn, reason, excerpt)
        for reason, ranked in _by_reason(excerpts).items()
        for turn, excerpt in enumerate(ranked[:n])
    ]
    turns.sort(key=lambda at: at[:2])
    return sorted((e for _, _, e in turns[:n]), key=lambda excerpt: excerpt.reason)


def _by_reason(excerpts: Iterable[Excerpt]) -> dict[str, list[Excerpt]]:
    def rank(excerpt: Excerpt) -> tuple[int, str]:
        written = f"{excerpt.reason}\0{excerpt.place}\0{excerpt.prompt}\0{excerpt.text}"
        return xxhash.xxh3_64_intdigest(written.encode()), excerpt.place

    by_reason: dict[str, list[Excerpt]] = defaultdict(list)
    for excerpt in sorted(excerpts, key=rank):
        by_reason[excerpt.reason].append(excerpt)
    return by_reason
