"""Data report of a store, `report.json`: counts of records, statistics of rows, and excerpts.

The columns are read one at a time, so a store of millions of rows needs tens of megabytes of
memory.
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

from toque.data.array_types import Bools, Floats, Ints
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES, TokenStore
from toque.data.tokenizer.codec import Codec
from toque.keyed_random import mixed
from toque.sources.documents import LOST_BYTES
from toque.sources.preference_pairs import CHOSEN, PREFERRED, REJECTED
from toque.sources.records import NOT_UTF_8, PER_REASON, most_frequent, shortened
from toque.storage.atomic import atomic_write
from toque.storage.json_files import read_json

JSON_NAME = "report.json"
MIN_UNKNOWN = 0.005
"""Smallest fraction of unknown tokens for which a notice is shown."""
MAX_UNKNOWN = 0.25
"""Largest fraction of unknown tokens for which a store is written."""
ENCODING_HINT = (
    "Many bytes are not UTF-8, so the files may have an older encoding. Set data.encoding=cp1252, "
    "the encoding of most Western European exports, or data.encoding=latin-1. Programs for DOS "
    "use data.encoding=cp437."
)
_MAX_DAMAGED_BYTES = 100
"""Largest number of lost bytes that may be damage. If there are more, the encoding is probably
wrong."""
_MAX_DAMAGED_RECORDS = 0.01
"""Largest fraction of records with invalid UTF-8 that may be damage."""
BEYOND = "beyond max_examples"
"""Reason for dropping valid records beyond `max_examples`."""
FROM = "_from"
"""Suffix of the column with the origin of each label."""
COVERAGE = "_coverage"
"""Suffix of the column with the fraction of a record on which an estimated label is based."""
BY_RULE = 0  # origin of a label that a rule of Toque estimated
_MAX_BINS = 32
_MAX_VALUES_ALONE = 12  # distinct integers that are listed without a histogram
_MAX_VALUES = 40  # distinct integers that are listed next to a histogram
_SHOWN_RECORDS = 20  # number of excerpts of kept records, and of dropped records
_SHOWN_LINES = 3  # maximum number of lines per reason in a message
_NAMED_CHARACTERS = 5  # maximum number of unknown characters in the notice
_MAX_LABEL = 255  # larger integers are amounts, not labels
_SALT = np.uint64(0x746F7175655F6C6B)
LOST = {"prompt": "prompt_lost", "target": "target_lost"}
"""Columns with the number of tokens cut from each side. NaN means that the side was not cut. A
shard without cuts does not have these columns.
"""
BOOKKEEPING = frozenset(
    {
        "key",
        "title_key",
        "record_key",
        "source",
        "task",
        "starts_record",
        *LOST.values(),
    }
)
"""Columns without a histogram."""


class Excerpt(msgspec.Struct, frozen=True):
    """Record or example, shortened for display."""

    reason: str  # reason for dropping it, or its split, e.g. "train" or "train, chosen"
    place: str  # file and line; "" for a row of the store
    text: str  # text of a dropped record, or target of an example
    prompt: str = ""  # prompt of an example


class Histogram(msgspec.Struct, frozen=True):
    """Counts of values in the bins [edges[i], edges[i + 1]). The last bin includes its end."""

    edges: list[float]
    counts: list[int]

    def __post_init__(self) -> None:
        """Check the bins, because the file of a report may be damaged."""
        is_ascending = all(a < b for a, b in pairwise(self.edges))
        if len(self.edges) != len(self.counts) + bool(self.counts) or not is_ascending:
            raise ValueError("edges that do not enclose the bins")

    @classmethod
    def from_values(cls, values: NDArray[np.generic]) -> Histogram:
        """Count values in bins of a round width, such as 0, 2, 4. No values give no bins."""
        if not len(values):
            return cls([], [])
        lowest = float(values.min())
        highest = float(values.max())
        is_integer = np.issubdtype(values.dtype, np.integer)
        width = _round_width((highest - lowest) / _MAX_BINS or 1.0)
        if is_integer:
            width = max(1.0, width)

        first = np.floor(lowest / width)
        # The integer 20 begins a new bin, but the fraction 1.0 ends the last bin.
        end = highest / width
        last = np.floor(end) + 1 if is_integer else np.ceil(end * (1 - _TOLERANCE))
        n = max(1, int(last - first))
        edges = (first + np.arange(n + 1)) * width
        counts, _ = np.histogram(values, bins=edges)
        return cls([round(float(edge), 9) for edge in edges], counts.tolist())


_TOLERANCE = 1e-12  # relative rounding error of a bin's edge


def _round_width(min_width: float) -> float:
    """Round a width up to 1, 2 or 5 times a power of ten: 13 becomes 20."""
    power = 10.0 ** np.floor(np.log10(min_width))
    # The tolerance keeps a width of 5 from becoming 10.
    tolerated = min_width * (1 - _TOLERANCE)
    step = next(s for s in (1.0, 2.0, 5.0, 10.0) if s * power >= tolerated)
    return float(f"{step * power:.6g}")


class ColumnReport(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a per-example column over the rows in use."""

    name: str
    known: int  # number of rows with a value
    missing: int  # number of rows without a value
    mean: float
    least: float
    most: float
    histogram: Histogram | None = None  # histogram of a column with many values
    values: dict[str, int] = {}  # number of rows per value, if there are few values
    origins: dict[str, dict[str, int]] = {}  # rows per value, by the values' origin


class SourceRows(msgspec.Struct, frozen=True):
    """Number of rows in use of a source, and of their tokens."""

    source: int
    train: int
    validation: int
    tokens: int


class Lengths(msgspec.Struct, frozen=True):
    """Statistics of the number of tokens per row on one side, over the rows in use."""

    mean: float
    p50: int
    p90: int
    p99: int
    longest: int

    @classmethod
    def from_values(cls, lengths: Ints) -> Lengths:
        """Compute the mean and the percentiles of lengths. Without lengths, all are 0."""
        if not len(lengths):
            return cls(0.0, 0, 0, 0, 0)
        percentiles = np.percentile(lengths, [50, 90, 99, 100], method="higher")
        mean = round(float(lengths.mean()), 1)
        return cls(mean, *percentiles.astype(int).tolist())


def is_of_another_encoding(
    read: int, dropped: Mapping[str, int], notes: Mapping[str, int]
) -> bool:
    """Check if the number of invalid UTF-8 bytes suggests that the files have an older encoding."""
    n_damaged = dropped.get(NOT_UTF_8, 0)
    n_lost_bytes = notes.get(LOST_BYTES, 0)
    return n_damaged > _MAX_DAMAGED_RECORDS * read or n_lost_bytes > _MAX_DAMAGED_BYTES


class SourceReport(msgspec.Struct, frozen=True):
    """Source file, with the counts of its records."""

    path: str
    schema: str  # schema according to the file's content; "" if the file cannot be read any more
    source: int  # index in data.sources
    read: int
    kept: int
    unused: dict[
        str, int
    ] = {}  # number of records with a field that no example uses, by field


def describe_unused_fields(sources: Sequence[SourceReport]) -> list[str]:
    """Describe the unused fields, in one sentence per source that has any."""
    sentences: list[str] = []
    for number in sorted({file.source for file in sources}):
        files = [file for file in sources if file.source == number]
        unused = sum((Counter(file.unused) for file in files), Counter[str]())
        read = sum(file.read for file in files)
        fields = []
        for name, n in most_frequent(unused).items():
            # The count shows that other records do not have the field.
            count = f" ({n:,} of {read:,} records)" if n < read else ""
            fields.append(f"{name!r}{count}")
        if fields:
            more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
            place = f"{files[0].path}{more}"
            sentences.append(f"Unused fields of {place}: {', '.join(fields)}.")
    return sentences


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Data report of a store. `read` is `kept` plus the sum of `dropped`."""

    tokenizer: str
    sources: list[SourceReport]
    source_rows: list[SourceRows]
    read: int
    kept: int
    dropped: dict[str, int]
    # Files and lines of the first dropped records, by reason for dropping them.
    lines: dict[str, list[str]]
    notes: dict[str, int]
    examples: int
    train: int
    validation: int
    prompt_tokens: int
    target_tokens: int
    prompt_lengths: Lengths
    target_lengths: Lengths
    # Number of sides that were cut to their limit, and of the tokens that were cut.
    cut: dict[str, int]
    unknown: dict[str, int]  # number of unknown tokens and of all tokens on each side
    lost_characters: dict[str, int]
    leaked_bodies: int
    leaked_titles: int
    split_rule: str
    prompt_histogram: Histogram
    target_histogram: Histogram
    columns: list[ColumnReport]
    kept_examples: list[Excerpt]
    dropped_examples: list[Excerpt]
    seconds: float  # seconds of this start, without the shards of an earlier start
    limits: list[str] = []  # descriptions of limits that were chosen from the data
    lost_in_all: int = 0  # count of all characters without a stand-in
    # Reasons for files of a folder or pattern that were not read, by file.
    left_out: dict[str, str] = {}

    @property
    def lost(self) -> int:
        """Number of records that were dropped, except those beyond `max_examples`."""
        return self.read - self.kept - self.dropped.get(BEYOND, 0)

    def describe_counts(self) -> str:
        """Describe the counts of all records in one sentence."""
        beyond = self.dropped.get(BEYOND, 0)
        more = f", left {beyond:,} beyond max_examples" if beyond else ""
        return f"Read {self.read:,} records: kept {self.kept:,}, dropped {self.lost:,}{more}."

    def write(self, folder: Path) -> None:
        """Write the report to the store."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)
        atomic_write(folder / JSON_NAME, content)

    @classmethod
    def read_from(cls, folder: Path) -> Report | None:
        """Read the report of a store. None if the report is missing or damaged."""
        return read_json(folder / JSON_NAME, cls)

    def describe_split(self) -> str:
        """Describe the split, and the texts that are in both training and validation."""
        return (
            f"Split: {self.split_rule}. The training examples also have the body of "
            f"{self.leaked_bodies:,} held-out examples, and the title of {self.leaked_titles:,}."
        )

    @property
    def _n_unknown(self) -> int:
        return self.unknown.get("prompt", 0) + self.unknown.get("target", 0)

    @property
    def unknown_share(self) -> float:
        """Fraction of unknown tokens, on both sides together."""
        sides = ("prompt_tokens", "target_tokens")
        n_tokens = sum(self.unknown.get(side, 0) for side in sides)
        return self._n_unknown / max(1, n_tokens)

    def unknown_notice(self) -> str | None:
        """Describe a large number of unknown tokens, with advice. Return None if there are few."""
        if self.unknown_share < MIN_UNKNOWN:
            return None
        lost = ""
        if self.lost_characters:
            shares = []
            for char, n in list(self.lost_characters.items())[:_NAMED_CHARACTERS]:
                name = unicodedata.name(char, "no name").lower()
                shares.append(f"{char!r} ({name}) {n / max(1, self.lost_in_all):.0%}")
            lost = f" Most frequent unknown characters: {', '.join(shares)}."
        return (
            f"{self.unknown_share:.1%} of all tokens are unknown to the vocabulary of "
            f"{self.tokenizer}, so the model cannot read or write them.{lost} Use a tokenizer with "
            "these characters (GPT-2's has every byte), or train a tokenizer on this data: "
            "model.tokenizer=trained:8192."
        )

    def describe_losses(self) -> list[str]:
        """Describe cut texts and characters outside the vocabulary, in sentences."""
        cuts = []
        sides = {"prompt": self.prompt_tokens, "target": self.target_tokens}
        for side, n_tokens in sides.items():
            n_cut = self.cut.get(f"{side}s", 0)
            lost = self.cut.get(f"{side}_tokens", 0)
            share = lost / max(1, n_tokens + lost)
            cuts.append(
                f"{n_cut:,} {side}s were cut and lost {lost:,} tokens ({share:.2%} of all {side} "
                "tokens)."
            )
        unknown = (
            f"{self._n_unknown:,} tokens are unknown to the vocabulary "
            f"({self.unknown_share:.4%})"
        )
        if self.lost_characters:
            items = self.lost_characters.items()
            chars = " ".join(f"{char!r} {n}" for char, n in items)
            unknown += f". Most frequent unknown characters: {chars}"
        return [*self.limits, " ".join(cuts), f"{unknown}."]


def add_first_lines(
    lines: dict[str, list[str]], path: str, numbers: Mapping[str, list[int]], limit: int
) -> None:
    """Add the file and lines of dropped records to `lines`, at most `limit` lines per reason."""
    name = Path(path).name
    for reason, line_numbers in numbers.items():
        first = lines.setdefault(reason, [])
        n_missing = limit - len(first)
        first += [f"{name}:{n}" for n in line_numbers[:n_missing]]


def describe_reasons(dropped: Mapping[str, int], lines: Mapping[str, list[str]]) -> str:
    """List the counts of dropped records by reason, the largest first, with their first lines."""
    parts = []
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        first = ", ".join(lines.get(reason, [])[:_SHOWN_LINES])
        place = f" (first at {first})" if first else ""
        parts.append(f"{count:,} {reason}{place}")
    return "; ".join(parts) or "no record was found"


def _column_report(
    name: str, column: NDArray[np.generic], origin: NDArray[np.generic] | None
) -> ColumnReport:
    """Compute the statistics of a column [n] with NaN for missing values.

    `origin` [n] is the origin of each value.
    """
    numbers = column.astype(np.float64)
    has_value = ~np.isnan(numbers)
    values = numbers[has_value]
    if not len(values):
        return ColumnReport(
            name=name, known=0, missing=len(numbers), mean=0, least=0, most=0
        )
    counts = _count_values(values, _MAX_VALUES_ALONE)
    origins: dict[str, dict[str, int]] = {}
    if counts and origin is not None:
        origins = _count_by_origin(values, origin[has_value].astype(np.float64))
    return ColumnReport(
        name=name,
        known=len(values),
        missing=len(numbers) - len(values),
        mean=round(float(values.mean()), 4),
        least=round(float(values.min()), 4),
        most=round(float(values.max()), 4),
        histogram=None if counts else Histogram.from_values(values),
        values=counts or _count_values(values, _MAX_VALUES) or {},
        origins=origins,
    )


def _count_by_origin(values: Floats, origins: Floats) -> dict[str, dict[str, int]]:
    """Count the rows per value for each origin. `origins` is the origin of each value."""
    counts = {}
    for origin in _count_values(origins, _MAX_VALUES_ALONE) or ():
        of_origin = values[origins == float(origin)]
        counts[origin] = _count_values(of_origin, _MAX_VALUES_ALONE) or {}
    return counts


def column_reports(
    names: Collection[str], read: Callable[[str], NDArray[np.generic]]
) -> list[ColumnReport]:
    """Compute the statistics of columns. `read` reads a column for the rows in use."""
    reports = []
    for name in sorted(set(names) - BOOKKEEPING):
        if name.endswith(FROM) and name.removesuffix(FROM) in names:
            continue  # the origins are a part of the label's report
        column = read(name)
        origin = read(name + FROM) if name + FROM in names else None
        origins_of_estimate = name.removesuffix(COVERAGE) + FROM
        if name.endswith(COVERAGE) and origins_of_estimate in names:
            # The coverage of a label matters only if the label was estimated.
            is_estimated = read(origins_of_estimate) == BY_RULE
            column = np.where(is_estimated, column, np.nan)
        reports.append(_column_report(name, column, origin))
    return reports


def source_rows(store: TokenStore, lengths: NDArray[np.int32]) -> list[SourceRows]:
    """Count the rows and tokens of each source. `lengths` are the tokens of each row in use."""
    source = store.column("source").astype(np.int64)
    n = int(source.max()) + 1 if len(source) else 0
    n_train, n_validation = (
        np.bincount(source[store.split == code], minlength=n)
        for code in SPLIT_CODES.values()
    )
    in_use = store.split != LEFT_OUT
    n_tokens = np.bincount(source[in_use], weights=lengths, minlength=n)
    return [
        SourceRows(i, int(n_train[i]), int(n_validation[i]), int(n_tokens[i]))
        for i in range(n)
    ]


def kept_excerpts(store: TokenStore, codec: Codec) -> list[Excerpt]:
    """Sample examples of the store by a hash of their key, decoded from the stored ids."""
    names = {code: name for name, code in SPLIT_CODES.items()}
    rows = _sample_rows(store, store.split != LEFT_OUT)
    labels = [str(names[int(store.split[row])]) for row in rows]
    if store.has_pairs:
        preferred = store.column(PREFERRED)[rows].tolist()
        sides = [CHOSEN if value else REJECTED for value in preferred]
        labels = [f"{a}, {b}" for a, b in zip(labels, sides, strict=True)]
    return [
        _decode_excerpt(store, codec, row, label)
        for row, label in zip(rows, labels, strict=True)
    ]


def dropped_excerpts(
    store: TokenStore,
    codec: Codec,
    excerpts: Sequence[Excerpt],
    reasons: Mapping[str, int],
) -> list[Excerpt]:
    """Sample dropped records.

    Args:
        store: The store, including the rows that are left out.
        codec: The store's codec.
        excerpts: Excerpts of records without rows.
        reasons: Number of records that are left out with their rows, by reason.
    """
    left_out: list[Excerpt] = []
    if reasons:
        is_left_out = store.split == LEFT_OUT
        rows = _sample_rows(store, is_left_out)
        keys = store.column("record_key")
        has_copy = np.isin(keys[rows], keys[~is_left_out]).tolist()
        # The store does not record the reason. A row with a copy in use is a duplicate.
        other_reasons = [reason for reason in sorted(reasons) if reason != "duplicate"]
        others = " or ".join(other_reasons) or "duplicate"
        for row, is_copy in zip(rows, has_copy, strict=True):
            reason = "duplicate" if is_copy and "duplicate" in reasons else others
            left_out.append(_decode_excerpt(store, codec, row, reason))
    return spread_over_reasons([*excerpts, *left_out], _SHOWN_RECORDS)


def _sample_rows(store: TokenStore, is_candidate: Bools) -> list[int]:
    """Sample some of the rows that `is_candidate` [rows] marks, by a hash of their key."""
    rows = np.flatnonzero(is_candidate)
    hashes = mixed(store.column("key")[rows].astype(np.uint64) ^ _SALT)
    order = np.argsort(hashes, kind="stable")
    sample: list[int] = rows[order[:_SHOWN_RECORDS]].tolist()
    return sample


def _decode_excerpt(store: TokenStore, codec: Codec, row: int, reason: str) -> Excerpt:
    prompt = codec.decode(store.prompt(row).tolist())
    target = codec.decode(store.target(row).tolist())
    return Excerpt(reason, "", shortened(target), shortened(prompt))


def _count_values(values: Floats, limit: int) -> dict[str, int] | None:
    """Count the rows per value. None if a value is not a label, or over `limit` values occur.

    A label is an integer from 0 to `_MAX_LABEL`.
    """
    if not len(values):
        return {}
    has_fraction = bool((values != np.floor(values)).any())
    if values.min() < 0 or values.max() > _MAX_LABEL or has_fraction:
        return None
    labels, counts = np.unique(values.astype(np.int64), return_counts=True)
    if len(labels) > limit:
        return None
    return dict(zip(map(str, labels.tolist()), counts.tolist(), strict=True))


def sample_excerpts(excerpts: Iterable[Excerpt]) -> list[Excerpt]:
    """Sample `PER_REASON` excerpts of each reason by a hash, sorted by reason and hash."""
    by_reason = sorted(_group_by_reason(excerpts).items())
    return [excerpt for _, ranked in by_reason for excerpt in ranked[:PER_REASON]]


def spread_over_reasons(excerpts: Iterable[Excerpt], n: int) -> list[Excerpt]:
    """Choose at most `n` excerpts, one per reason in turn, so that rare reasons are included."""
    turns = [
        (turn, reason, excerpt)
        for reason, ranked in _group_by_reason(excerpts).items()
        for turn, excerpt in enumerate(ranked[:n])
    ]
    turns.sort(key=lambda entry: entry[:2])
    chosen = [excerpt for _, _, excerpt in turns[:n]]
    return sorted(chosen, key=lambda excerpt: excerpt.reason)


def _group_by_reason(excerpts: Iterable[Excerpt]) -> dict[str, list[Excerpt]]:
    """Group excerpts by reason. The excerpts of a reason are sorted by a hash."""

    def rank(excerpt: Excerpt) -> tuple[int, str]:
        content = f"{excerpt.reason}\0{excerpt.place}\0{excerpt.prompt}\0{excerpt.text}"
        return xxhash.xxh3_64_intdigest(content.encode()), excerpt.place

    by_reason: dict[str, list[Excerpt]] = defaultdict(list)
    for excerpt in sorted(excerpts, key=rank):
        by_reason[excerpt.reason].append(excerpt)
    return by_reason
