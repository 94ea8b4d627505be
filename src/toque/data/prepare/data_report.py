"""The data report of a store: `report.json`."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.row_statistics import ColumnReport, Excerpt, Histogram, SourceRows
from toque.sources.documents import LOST_BYTES
from toque.sources.records import NOT_UTF_8, most_named
from toque.storage.atomic import atomic_write
from toque.storage.json_files import decode_json

JSON_NAME = "report.json"
NOTED_UNKNOWN, MOST_UNKNOWN = 0.005, 0.25
"""Shares of unknown tokens that a person is told about, and that no store may have."""
ENCODING_HINT = (
    "Many bytes are not UTF-8: the files may be in an older encoding. Set data.encoding=cp1252, "
    "which most Western European exports are in, or data.encoding=latin-1."
)
_MANY_LOST_BYTES = 100
"""Lost bytes in plain text above which its encoding is suspected; fewer are damage."""
BEYOND = "beyond max_examples"
"""The reason for dropping valid records beyond `max_examples`."""


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
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
        longest = int(lengths.max())
        return cls(round(float(lengths.mean()), 1), int(p50), int(p90), int(p99), longest)


def is_of_another_encoding(read: int, dropped: Mapping[str, int], notes: Mapping[str, int]) -> bool:
    """True if so many bytes are not UTF-8 that the files are likely in an older encoding."""
    return dropped.get(NOT_UTF_8, 0) > 0.01 * read or notes.get(LOST_BYTES, 0) > _MANY_LOST_BYTES


class SourceReport(msgspec.Struct, frozen=True):
    """One source file: records read and kept by its reader."""

    path: str
    schema: str
    """Its schema by its content; "" if it can no longer be read."""
    source: int
    """Index in data.sources of the source it belongs to."""
    read: int
    kept: int
    unused: dict[str, int] = {}
    """Fields that no example holds, with the number of records that fill them."""


def unused_in_words(sources: Sequence[SourceReport]) -> list[str]:
    """A sentence for each source some of whose fields no example holds.

    >>> unused_in_words([SourceReport("a.csv", "csv", 0, 9, 9, {"id": 9, "note": 4})])
    ["Fields of a.csv that no example holds: 'id', 'note' (4 of 9 records)."]
    """
    found: list[str] = []
    for number in sorted({file.source for file in sources}):
        files = [file for file in sources if file.source == number]
        unused, read = Counter[str](), sum(file.read for file in files)
        for file in files:
            unused.update(file.unused)
        fields = [
            repr(name) + (f" ({n:,} of {read:,} records)" if n < read else "")
            for name, n in most_named(unused).items()
        ]
        more = f" and {len(files) - 1:,} more" if len(files) > 1 else ""
        if fields:
            place = f"{files[0].path}{more}"
            found.append(f"Fields of {place} that no example holds: {', '.join(fields)}.")
    return found


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The data report. `read == kept + sum(dropped)`, in records.

    Of equal stores made from the same paths, only `seconds` differs.
    `cut` counts sides cut to their limit and the tokens lost; `unknown` counts unknown tokens
    beside all tokens of each side; `lines` shows where the first dropped records stand.
    """

    tokenizer: str
    sources: list[SourceReport]
    source_rows: list[SourceRows]
    read: int
    kept: int
    dropped: dict[str, int]
    lines: dict[str, list[str]]
    notes: dict[str, int]
    examples: int
    train: int
    validation: int
    prompt_tokens: int
    target_tokens: int
    prompt_lengths: Lengths
    target_lengths: Lengths
    cut: dict[str, int]
    unknown: dict[str, int]
    lost_characters: dict[str, int]
    leaked_bodies: int
    leaked_titles: int
    split_rule: str
    prompt_histogram: Histogram
    target_histogram: Histogram
    columns: list[ColumnReport]
    kept_examples: list[Excerpt]
    dropped_examples: list[Excerpt]
    seconds: float
    """Seconds of this start only; shards kept from an earlier one are not counted."""
    limits: list[str] = []
    """Sentences on the limits that were chosen from the data."""
    lost_in_all: int = 0
    """Characters without a stand-in, those not among the `lost_characters` too."""
    left_out: dict[str, str] = {}
    """Files of a folder or pattern that were not read, with the reason."""

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
        data = msgspec.json.format(msgspec.json.encode(self), indent=1)
        atomic_write(folder / JSON_NAME, data)

    @classmethod
    def read_from(cls, folder: Path) -> Report | None:
        """The report of a store; None if it is missing or damaged."""
        try:
            return decode_json((folder / JSON_NAME).read_bytes(), cls)
        except (OSError, msgspec.DecodeError):
            return None

    def splitting(self) -> str:
        """A sentence on how the split was made and what leaks through it."""
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
        n_lost = max(1, self.lost_in_all)
        shown = [
            f"{char!r} ({unicodedata.name(char, 'no name').lower()}) {count / n_lost:.0%}"
            for char, count in list(self.lost_characters.items())[:5]
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
        sentences: list[str] = []
        for side, total in (("prompt", self.prompt_tokens), ("target", self.target_tokens)):
            lost = self.cut.get(f"{side}_tokens", 0)
            share = lost / (total + lost) if total + lost else 0.0
            sentences.append(
                f"{self.cut.get(f'{side}s', 0):,} {side}s were cut, losing {lost:,} tokens "
                f"({share:.2%} of their side)."
            )
        n_unknown = self.unknown.get("prompt", 0) + self.unknown.get("target", 0)
        share = self.unknown_share
        shown = " ".join(f"{c!r} {n}" for c, n in list(self.lost_characters.items())[:10])
        sentences.append(
            f"{n_unknown:,} tokens are unknown to the vocabulary ({share:.4%})"
            + (f"; the characters most often lost: {shown}." if shown else ".")
        )
        return [*self.limits, " ".join(sentences[:-1]), sentences[-1]]


def reasons_in_words(dropped: Mapping[str, int], lines: Mapping[str, list[str]]) -> str:
    """Counts by reason with the first places, the most frequent first, for an error message."""
    parts = []
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        first = ", ".join(lines.get(reason, [])[:3])
        parts.append(f"{count:,} {reason}" + (f" (first at {first})" if first else ""))
    return "; ".join(parts) or "no record was found"
