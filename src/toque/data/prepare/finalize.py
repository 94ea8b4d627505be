"""Ending a store: one look at all rows, the refusals, the split, the report, the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.dedup_and_split import Columns, Division, divide
from toque.data.prepare.histograms import Histogram
from toque.data.prepare.minhash import Clusters
from toque.data.prepare.near_duplicates import NEAR, clusters_of
from toque.data.prepare.report import Lengths, Report, SourceReport, reasons_in_words
from toque.data.prepare.settings import PrepareSettings
from toque.data.prepare.shards import NOT_READ
from toque.data.prepare.survey import StoreSurvey
from toque.data.prepare.worker import ShardResult, load_reader, shard_folder
from toque.data.store.manifest import (
    FORMAT,
    NAME,
    FileEntry,
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
from toque.errors import DataError
from toque.sources.files import SourceFile
from toque.sources.records import NO_LABEL, NamesSchemas, examples_note, missing_note
from toque.storage.atomic import atomic_write, save_array, sync_folder
from toque.storage.checksums import sha256_of

_SHOWN = 10
_DOCUMENTS = "documents by a hash of the document and piece number // 16"


@dataclass(frozen=True)
class StoreFinalizer:
    """What a finished set of shards is made into a store from."""

    store: Path
    fingerprint: str
    settings: PrepareSettings
    recorded: dict[str, Any]
    """The settings as the manifest records them."""
    codec: Codec
    files: Sequence[SourceFile]
    shards: Sequence[ShardResult]
    """In group order."""
    not_read: int = 0
    """Bytes of the sources left unread because `max_examples` were found."""

    def finish(self, *, seconds: float) -> Report:
        """Write the split, the report and, last, the manifest.

        Raises:
            DataError: too large a share of a source was refused by its reader, or nothing
                usable is left; with the counts by reason.
        """
        dropped, lines = self._dropped()
        self._refuse_bad_sources()
        self._refuse_missing_tasks()
        division = divide(self._columns(), self.settings)
        dropped.update(division.dropped)
        read = sum(block.read for shard in self.shards for block in shard.blocks)
        if division.records == 0:
            raise DataError(
                f"None of the {read:,} records in {self._named_sources()} is usable: "
                f"{reasons_in_words(dropped, lines)}. Look at those lines, and at the format and "
                "the limits in the data section."
            )
        assert read == division.records + sum(dropped.values()), "records were lost uncounted"
        lengths = {side: self._lengths(side, division) for side in ("prompt", "target")}
        report = self._report(division, dropped, lines, lengths, read=read, seconds=seconds)
        save_array(self.store / "split.npy", division.split)
        report.write(self.store)
        manifest = self._manifest(division, dropped, lengths, read)
        sync_folder(self.store)
        atomic_write(self.store / NAME, manifest_bytes(manifest))
        return report

    def _columns(self) -> Columns:
        def joined(name: str) -> NDArray[Any]:
            paths = [folder / f"{name}.npy" for folder in self._folders()]
            return np.concatenate([np.load(path, allow_pickle=False) for path in paths])

        alike = self._alike
        return Columns(
            key=joined("key"),
            title_key=joined("title_key"),
            record_key=joined("record_key"),
            task=joined("task"),
            starts_record=joined("starts_record"),
            first_alike=None if alike is None else alike.first,
        )

    @cached_property
    def _alike(self) -> Clusters | None:
        if self.settings.dedup != "near":
            return None
        return clusters_of(self.store, self._folders())

    def _notes(self) -> dict[str, int]:
        notes = self._summed("notes")
        notes[NOT_READ] = self.not_read
        notes["comparisons of near-duplicates cut short"] = (
            self._alike.unchecked if self._alike else 0
        )
        return {what: n for what, n in sorted(notes.items()) if n}

    def _folders(self) -> list[Path]:
        return [shard_folder(self.store, shard.group) for shard in self.shards]

    def _lengths(self, side: str, division: Division) -> NDArray[np.int64]:
        paths = [folder / f"{side}_ends.npy" for folder in self._folders()]
        parts = [np.diff(np.load(path, allow_pickle=False), prepend=0) for path in paths]
        used: NDArray[np.int64] = np.concatenate(parts)[division.split != LEFT_OUT]
        return used

    def _dropped(self) -> tuple[Counter[str], dict[str, list[str]]]:
        dropped: Counter[str] = Counter()
        lines: dict[str, list[str]] = {}
        for shard in self.shards:
            dropped.update(shard.dropped)
            for block in shard.blocks:
                dropped.update(block.dropped)
                name = Path(block.path).name
                for reason, numbers in block.lines.items():
                    shown = lines.setdefault(reason, [])
                    shown += [f"{name}:{n}" for n in numbers[: _SHOWN - len(shown)]]
        return dropped, lines

    def _refuse_bad_sources(self) -> None:
        most = self.settings.max_bad_share
        for number in sorted({file.source for file in self.files}):
            blocks = [b for s in self.shards for b in s.blocks if b.source == number]
            read = sum(b.read for b in blocks)
            unlabelled = sum(
                n for b in blocks for why, n in b.dropped.items() if why.startswith(NO_LABEL)
            )
            bad = read - sum(b.kept for b in blocks) - unlabelled
            if read == 0 or bad / read <= most:
                continue
            dropped: Counter[str] = Counter()
            lines: dict[str, list[str]] = {}
            for block in blocks:
                dropped.update(block.dropped)
                for reason, numbers in block.lines.items():
                    places = [f"{Path(block.path).name}:{n}" for n in numbers]
                    lines.setdefault(reason, []).extend(places)
            paths = [Path(f.name).name for f in self.files if f.source == number]
            raise DataError(
                f"{bad:,} of the {read:,} records in {', '.join(paths[:3])} cannot be used, more "
                f"than the share of {most:g} that is allowed: {reasons_in_words(dropped, lines)}. "
                "Name the right fields in data.sources.columns or the right data.sources.format, "
                "or take the records that cannot be used out of the source."
            )

    def _refuse_missing_tasks(self) -> None:
        """A task that no record has an example of was asked for in vain."""
        notes = self._summed("notes")
        for task in self.settings.tasks:
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

    def _per_file(self) -> list[tuple[SourceFile, int, int]]:
        read: Counter[tuple[int, str]] = Counter()
        kept: Counter[tuple[int, str]] = Counter()
        for shard in self.shards:
            for block in shard.blocks:
                read[block.source, block.path] += block.read
                kept[block.source, block.path] += block.kept
        keys = [(file, (file.source, file.name)) for file in self.files]
        return [(file, read[key], kept[key]) for file, key in keys]

    def _report(
        self,
        division: Division,
        dropped: Counter[str],
        lines: dict[str, list[str]],
        lengths: dict[str, NDArray[np.int64]],
        *,
        read: int,
        seconds: float,
    ) -> Report:
        look = StoreSurvey(self.store, self.shards, division.split, self.codec)
        return Report(
            tokenizer=self.codec.name,
            sources=[
                SourceReport(f.name, self._schema(f), f.source, r, k)
                for f, r, k in self._per_file()
            ],
            source_rows=look.sources(lengths),
            read=read,
            kept=division.records,
            dropped=dict(dropped.most_common()),
            lines=lines,
            notes=self._notes(),
            examples=len(lengths["target"]),
            train=int((division.split == SPLIT_CODES["train"]).sum()),
            validation=int((division.split == SPLIT_CODES["validation"]).sum()),
            prompt_tokens=int(lengths["prompt"].sum()),
            target_tokens=int(lengths["target"].sum()),
            prompt_lengths=Lengths.of(lengths["prompt"]),
            target_lengths=Lengths.of(lengths["target"]),
            cut=dict(self._summed("cut")),
            unknown=dict(self._summed("unknown")),
            lost_characters=dict(self._summed("lost_characters").most_common(10)),
            leaked_bodies=division.leaked_bodies,
            leaked_titles=division.leaked_titles,
            split_rule=f"by a hash of the body, {_DOCUMENTS}",
            prompt_histogram=Histogram.of(lengths["prompt"]),
            target_histogram=Histogram.of(lengths["target"]),
            columns=look.columns(),
            kept_examples=look.kept(),
            dropped_examples=look.dropped(division.dropped),
            seconds=round(seconds, 2),
        )

    def _schema(self, file: SourceFile) -> str:
        """What the file's reader takes it for; "" when it does not say."""
        reader = load_reader(file.reader, self.settings.tasks)
        try:
            return str(reader.schema(file.path)) if isinstance(reader, NamesSchemas) else ""
        except DataError:  # removed or changed since it was read: a report needs no more
            return ""

    def _manifest(
        self,
        division: Division,
        dropped: Counter[str],
        lengths: dict[str, NDArray[np.int64]],
        read: int,
    ) -> StoreManifest:
        tokenizer = sorted(p for p in (self.store / "tokenizer").iterdir() if p.is_file())
        columns: dict[str, str] = {}
        for shard in self.shards:
            columns |= shard.columns
        codes = division.split
        return StoreManifest(
            format=FORMAT,
            fingerprint=self.fingerprint,
            family_kind=self.settings.family_kind,
            tokenizer=TokenizerEntry(self.codec.name, self.codec.sha256, self.codec.vocab_size),
            examples=len(lengths["target"]),
            rows=len(codes),
            tokens=Tokens(int(lengths["prompt"].sum()), int(lengths["target"].sum())),
            splits=Splits(
                int((codes == SPLIT_CODES["train"]).sum()),
                int((codes == SPLIT_CODES["validation"]).sum()),
            ),
            records=Records(read, division.records),
            dropped=dict(sorted(dropped.items())),
            sources=[
                SourceEntry(f.name, f.reader, f.source, f.sha256, f.bytes, r, k)
                for f, r, k in self._per_file()
            ],
            shards=[
                entry
                for shard in self.shards
                for entry in shard.files
                if Path(entry.file).stem != NEAR
            ],
            files=[self._entry("split.npy", len(codes))]
            + [self._entry(f"tokenizer/{path.name}", 0) for path in tokenizer],
            columns=dict(sorted(columns.items())),
            settings=self.recorded,
            cut=dict(sorted(self._summed("cut").items())),
        )

    def _entry(self, name: str, examples: int) -> FileEntry:
        path = self.store / name
        return FileEntry(name, path.stat().st_size, sha256_of(path), examples)
