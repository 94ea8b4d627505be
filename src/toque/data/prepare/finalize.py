"""Store finalization: the global pass over all rows, refusals, split, report, manifest."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.dedup_and_split import Columns, Division, divide
from toque.data.prepare.histograms import Histogram
from toque.data.prepare.minhash import Clusters
from toque.data.prepare.near_duplicates import NEAR, clusters_of
from toque.data.prepare.report import (
    ENCODING_HINT,
    MOST_UNKNOWN,
    Lengths,
    Report,
    SourceReport,
    reasons_in_words,
)
from toque.data.prepare.shards import NOT_READ
from toque.data.prepare.survey import StoreSurvey
from toque.data.prepare.worker import Job, ShardResult, file_entry, read_column, shard_folder
from toque.data.store.manifest import (
    FORMAT,
    NAME,
    Records,
    SourceEntry,
    Splits,
    StoreManifest,
    TokenizerEntry,
    Tokens,
    manifest_bytes,
)
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.train import MAX_WORD_CHARS, WORDS_CUT
from toque.errors import DataError
from toque.sources.blocks import NOT_UTF_8, most_named
from toque.sources.files import SourceFile
from toque.sources.records import NO_LABEL, examples_note, missing_note
from toque.storage.atomic import atomic_file, atomic_write, sync_folder, write_array

_SHOWN = 10
_NAME_THE_FIELDS = (
    "Name the right fields in data.sources.columns or the right data.sources.format. "
)
LONG_WORDS = f"words over {MAX_WORD_CHARS:,} characters, cut where the tokenizer was learnt"
_DOCUMENTS = "documents by a hash of the document and piece number // 16"


@dataclass(frozen=True)
class StoreFinalizer:
    """Turns a complete set of shards into a store."""

    job: Job
    recorded: dict[str, Any]
    """The settings as the manifest records them."""
    codec: Codec
    files: Sequence[SourceFile]
    shards: Sequence[ShardResult]
    """In group order."""
    not_read: int = 0
    """Bytes of the sources left unread because `max_examples` were found."""
    limits: Sequence[str] = ()
    """Sentences on the limits that were chosen from the data."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Files beside those that were read, with the reason."""

    def finish(self, *, seconds: float) -> Report:
        """Write the split, the report and, last, the manifest.

        Raises:
            DataError: its reader refused too large a share of a source, or nothing
                usable is left; with counts by reason.
        """
        store, settings = self.job.store, self.job.settings
        dropped, lines = self._dropped()
        self.refuse_bad_sources()
        self._refuse_missing_tasks()
        alike = clusters_of(store, self._folders()) if settings.dedup == "near" else None
        division = divide(self._columns(alike), settings)
        dropped.update(division.dropped)
        read = sum(block.read for shard in self.shards for block in shard.blocks)
        if division.records == 0:
            raise DataError(
                f"None of the {read:,} records in {self._named_sources()} is usable: "
                f"{reasons_in_words(dropped, lines)}. Look at those lines, and at the format and "
                "the limits in the data section."
            )
        assert read == division.records + sum(dropped.values()), "records were lost uncounted"
        notes = self._summed("notes")
        notes[NOT_READ] = self.not_read
        notes.update(f"files left out: {why}" for why in self.left_out.values())
        if settings.trained_vocab_size is not None:
            notes[LONG_WORDS] = int(self.codec.settings.get(WORDS_CUT, 0))
        notes["comparisons of near-duplicates cut short"] = alike.unchecked if alike else 0
        report = self._report(division, dropped, lines, notes, read=read, seconds=seconds)
        if report.unknown_share > MOST_UNKNOWN:
            raise DataError(
                f"{report.unknown_notice()} Above {MOST_UNKNOWN:.0%} no store is written: nothing "
                "of use can be learnt from such texts."
            )
        with atomic_file(store / "split.npy") as file:
            write_array(file, division.split)
        report.write(store)
        manifest = self._manifest(report, n_rows=len(division.split))
        sync_folder(store)
        atomic_write(store / NAME, manifest_bytes(manifest))
        return report

    def _columns(self, alike: Clusters | None) -> Columns:
        names = ("key", "title_key", "record_key", "task", "starts_record")
        columns = {name: read_column(self.job.store, self.shards, name) for name in names}
        return Columns(**columns, first_alike=None if alike is None else alike.first)

    def _folders(self) -> list[Path]:
        return [shard_folder(self.job.store, shard.group) for shard in self.shards]

    def _lengths(self, side: str, division: Division) -> NDArray[np.int64]:
        paths = [folder / f"{side}_ends.npy" for folder in self._folders()]
        parts = [np.diff(np.load(path, allow_pickle=False), prepend=0) for path in paths]
        used: NDArray[np.int64] = np.concatenate(parts)[division.split != LEFT_OUT]
        return used

    def _dropped(self, source: int | None = None) -> tuple[Counter[str], dict[str, list[str]]]:
        """Records dropped by reason, and the first places; of a `source`, by its reader alone."""
        dropped: Counter[str] = Counter()
        lines: dict[str, list[str]] = {}
        for shard in self.shards:
            if source is None:
                dropped.update(shard.dropped)
            for block in shard.blocks:
                if source not in (None, block.source):
                    continue
                dropped.update(block.dropped)
                name = Path(block.path).name
                for reason, numbers in block.lines.items():
                    shown = lines.setdefault(reason, [])
                    shown += [f"{name}:{n}" for n in numbers[: _SHOWN - len(shown)]]
        return dropped, lines

    def refuse_bad_sources(self) -> None:
        """Refuse a source of which too many records cannot be used.

        Raises:
            DataError: with counts by reason, the first lines and what to set.
        """
        most = self.job.settings.max_bad_share
        for number in sorted({file.source for file in self.files}):
            read = sum(b.read for s in self.shards for b in s.blocks if b.source == number)
            dropped, lines = self._dropped(number)
            bad = sum(n for reason, n in dropped.items() if not reason.startswith(NO_LABEL))
            if read == 0 or bad / read <= most:
                continue
            paths = [Path(f.name).name for f in self.files if f.source == number]
            raise DataError(
                f"{bad:,} of the {read:,} records in {', '.join(paths[:3])} cannot be used, more "
                f"than the share of {most:g} that is allowed: {reasons_in_words(dropped, lines)}. "
                + (f"{ENCODING_HINT} " if 2 * dropped[NOT_UTF_8] > bad else _NAME_THE_FIELDS)
                + f"To use the {read - bad:,} good ones all the same, set "
                f"data.max_bad_share={_rounded_up(bad / read):g}."
            )

    def _refuse_missing_tasks(self) -> None:
        """Raise if no record has an example of one of the tasks."""
        notes = self._summed("notes")
        for task in self.job.settings.tasks:
            without = [
                (note.removeprefix(missing_note(task)), n)
                for note, n in notes.items()
                if note.startswith(missing_note(task))
            ]
            if without and not notes[examples_note(task)]:
                needs, n = without[0]
                raise DataError(
                    f"data.tasks asks for {task}, and none of the {n:,} recipes in "
                    f"{self._named_sources()} gives an example of it: {needs}. Take {task} out of "
                    "data.tasks, or add a source that has what it needs."
                )

    def _named_sources(self) -> str:
        names = [Path(file.name).name for file in self.files]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def _summed(self, field: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(getattr(shard, field))
        return total

    def _per_file(self) -> list[tuple[SourceFile, int, int, Counter[str]]]:
        read: Counter[tuple[int, str]] = Counter()
        kept: Counter[tuple[int, str]] = Counter()
        unused: defaultdict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        for shard in self.shards:
            for block in shard.blocks:
                read[block.source, block.path] += block.read
                kept[block.source, block.path] += block.kept
                unused[block.source, block.path].update(block.unused)
        keys = [(file, (file.source, file.name)) for file in self.files]
        return [(file, read[key], kept[key], unused[key]) for file, key in keys]

    def _report(
        self,
        division: Division,
        dropped: Counter[str],
        lines: dict[str, list[str]],
        notes: Counter[str],
        *,
        read: int,
        seconds: float,
    ) -> Report:
        look = StoreSurvey(self.job.store, self.shards, division.split, self.codec)
        prompts, targets = (self._lengths(side, division) for side in ("prompt", "target"))
        return Report(
            tokenizer=self.codec.name,
            sources=[
                SourceReport(f.name, _schema(f), f.source, r, k, most_named(unused))
                for f, r, k, unused in self._per_file()
            ],
            source_rows=look.sources(prompts + targets),
            read=read,
            kept=division.records,
            dropped=dict(dropped.most_common()),
            lines=lines,
            left_out=dict(self.left_out),
            notes={what: n for what, n in sorted(notes.items()) if n},
            examples=len(targets),
            train=int((division.split == SPLIT_CODES["train"]).sum()),
            validation=int((division.split == SPLIT_CODES["validation"]).sum()),
            prompt_tokens=int(prompts.sum()),
            target_tokens=int(targets.sum()),
            prompt_lengths=Lengths.of(prompts),
            target_lengths=Lengths.of(targets),
            cut=dict(self._summed("cut")),
            unknown=dict(self._summed("unknown")),
            lost_characters=dict(self._summed("lost_characters").most_common(10)),
            lost_in_all=self._summed("lost_characters").total(),
            leaked_bodies=division.leaked_bodies,
            leaked_titles=division.leaked_titles,
            split_rule=f"by a hash of the body, {_DOCUMENTS}",
            prompt_histogram=Histogram.of(prompts),
            target_histogram=Histogram.of(targets),
            columns=look.columns(),
            kept_examples=look.kept(),
            dropped_examples=look.dropped(division.dropped),
            limits=list(self.limits),
            seconds=round(seconds, 2),
        )

    def _manifest(self, report: Report, *, n_rows: int) -> StoreManifest:
        tokenizer = sorted(p for p in (self.job.store / "tokenizer").iterdir() if p.is_file())
        columns: dict[str, str] = {}
        for shard in self.shards:
            columns |= shard.columns
        return StoreManifest(
            format=FORMAT,
            fingerprint=self.job.fingerprint,
            family_kind=self.job.settings.family_kind,
            tokenizer=TokenizerEntry(self.codec.name, self.codec.sha256, self.codec.vocab_size),
            examples=report.examples,
            rows=n_rows,
            tokens=Tokens(report.prompt_tokens, report.target_tokens),
            splits=Splits(report.train, report.validation),
            records=Records(report.read, report.kept),
            dropped=dict(sorted(report.dropped.items())),
            sources=[
                SourceEntry(f.name, f.reader.recorded_name, f.source, f.sha256, f.bytes, r, k)
                for f, r, k, _ in self._per_file()
            ],
            shards=[
                entry
                for shard in self.shards
                for entry in shard.files
                if Path(entry.file).stem != NEAR
            ],
            files=[file_entry(self.job.store / "split.npy", "split.npy", n_rows)]
            + [file_entry(path, f"tokenizer/{path.name}", 0) for path in tokenizer],
            columns=dict(sorted(columns.items())),
            settings=self.recorded,
            cut=dict(sorted(report.cut.items())),
        )


def _rounded_up(share: float) -> float:
    """A share with two digits that is not below it.

    >>> _rounded_up(0.501), _rounded_up(1.0)
    (0.51, 1.0)
    """
    return math.ceil(share * 100) / 100


def _schema(file: SourceFile) -> str:
    try:
        return file.reader.schema(file.path)
    except DataError:  # removed or changed since it was read: the report does without
        return ""
