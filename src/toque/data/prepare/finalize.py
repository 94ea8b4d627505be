"""Completion of a store from its shards: checks, split, data report and manifest."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from toque.data.array_types import Bools, Ints
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    LOST,
    MAX_UNKNOWN,
    Histogram,
    Lengths,
    Report,
    SourceReport,
    add_first_lines,
    column_reports,
    describe_reasons,
    dropped_excerpts,
    kept_excerpts,
    source_rows,
)
from toque.data.prepare.dedup_and_split import Division, RowKeys, dedup_and_split
from toque.data.prepare.duplicates import NEAR, cluster_shards
from toque.data.prepare.preference_rows import CUT_PAIRS, count_cut_pairs
from toque.data.prepare.shards import (
    NOT_READ,
    ShardResult,
    file_entry,
    read_column,
    shard_folder,
)
from toque.data.prepare.store_plan import PrepareSettings, StorePlan
from toque.data.store.store_manifest import (
    FORMAT,
    NAME,
    Records,
    SourceEntry,
    Splits,
    StoreManifest,
    TokenCounts,
    TokenizerEntry,
    manifest_bytes,
)
from toque.data.store.token_store import LEFT_OUT, SPLIT_CODES, TokenStore
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_training import MAX_WORD_CHARS, WORDS_CUT
from toque.errors import DataError, join_first
from toque.sources.own_tasks import TaskReader, class_note
from toque.sources.preference_pairs import PREFERRED
from toque.sources.records import (
    NO_LABEL,
    NOT_UTF_8,
    TaskTemplate,
    examples_note,
    missing_note,
    most_frequent,
)
from toque.sources.source_files import SourceFile
from toque.storage.atomic import atomic_file, atomic_write, sync_folder, write_array

_MAX_LINES = 10  # maximum number of lines per reason in the report
_MAX_PATHS = 3  # maximum number of files in a message
_SHOWN_CHARACTERS = 10  # maximum number of unknown characters in the report
_CHUNK_ROWS = 1 << 16
_NAME_THE_FIELDS = (
    "Name the right fields in data.sources.columns or the right data.sources.format. "
)
LONG_WORDS = (
    f"words over {MAX_WORD_CHARS:,} characters, cut for the training of the tokenizer"
)
FEWER_ENTRIES = (
    "entries missing from the trained vocabulary: its texts have too few words"
)
Counts = Counter[str]
Lines = dict[str, list[str]]  # files and lines of the first records, by reason


class _FileCounts(NamedTuple):
    """Source file, with the counts of its records."""

    file: SourceFile
    read: int
    kept: int
    unused: Counts  # records with a field that no example uses, by field


@dataclass(frozen=True)
class StoreFinalizer:
    """Last step of preparing: turns a complete set of shards into a store."""

    plan: StorePlan
    codec: Codec
    settings: PrepareSettings  # settings of the plan with the chosen limits
    limits: Sequence[str]  # descriptions of the chosen limits
    shards: Sequence[ShardResult]  # in group order
    not_read: int  # number of source bytes that were not needed for `max_examples`
    started: float  # start time by `time.perf_counter`

    def finish(self) -> Report:
        """Write the split, the data report and finally the manifest. Return the report.

        Raises:
            DataError: Too many records are dropped, or a task or class has no example.
        """
        folder = self.plan.store
        refuse_bad_sources(self.plan, self.shards)
        self._refuse_missing_tasks()
        self._refuse_classes()

        division, n_unchecked = self._divide_rows()
        dropped, lines = _count_dropped(self.shards)
        dropped.update(division.dropped)
        read = sum(block.read for shard in self.shards for block in shard.blocks)
        if division.records == 0:
            raise DataError(
                f"None of the {read:,} records in {self._named_sources()} is usable: "
                f"{describe_reasons(dropped, lines)}. Check these lines, and the format and limits "
                "in the data section."
            )
        assert read == division.records + sum(dropped.values()), (
            "a record is neither used nor counted as dropped"
        )
        with atomic_file(folder / "split.npy") as file:
            write_array(file, division.split)

        manifest = self._make_manifest(division, dropped, read=read)
        store = TokenStore(folder, manifest)
        notes = self._count_notes(store, n_unchecked)
        report = self._make_report(store, division, dropped, lines, notes)
        if report.unknown_share > MAX_UNKNOWN:
            raise DataError(
                f"{report.unknown_notice()} No store is written if the share is above "
                f"{MAX_UNKNOWN:.0%}, because a model cannot learn from such text."
            )
        report.write(folder)

        # The manifest completes the store, so it is written after everything else.
        sync_folder(folder)
        tokens = TokenCounts(report.prompt_tokens, report.target_tokens)
        manifest = msgspec.structs.replace(manifest, tokens=tokens)
        atomic_write(folder / NAME, manifest_bytes(manifest))
        return report

    def _divide_rows(self) -> tuple[Division, int]:
        """Split the rows, and count the rows that were not compared with all similar rows."""
        folder = self.plan.store
        settings = self.plan.settings
        first_alike = held_out = None
        n_unchecked = 0
        if settings.dedup == "near":
            shards = [shard_folder(folder, shard.group) for shard in self.shards]
            first_alike, n_unchecked = cluster_shards(folder, shards)
        if settings.held_out_from is not None:
            source = read_column(folder, self.shards, "source")
            held_out = source >= settings.held_out_from
        names = ("key", "title_key", "record_key", "task", "starts_record")
        columns = {name: read_column(folder, self.shards, name) for name in names}
        has_pairs = any(PREFERRED in shard.columns for shard in self.shards)
        keys = RowKeys(
            **columns, first_alike=first_alike, held_out=held_out, has_pairs=has_pairs
        )
        return dedup_and_split(keys, settings), n_unchecked

    def _count_notes(self, store: TokenStore, n_unchecked: int) -> Counts:
        """Collect the counts of the report's notes."""
        notes = self._sum_counts("notes")
        notes[NOT_READ] = self.not_read
        notes.update(f"files left out: {why}" for why in self.plan.left_out.values())
        if self.plan.tokenizer is None:
            notes[LONG_WORDS] = int(self.codec.settings.get(WORDS_CUT, 0))
            vocab_size = self.settings.trained_vocab_size or 0
            notes[FEWER_ENTRIES] = max(0, vocab_size - self.codec.vocab_size)
        notes["comparisons of near-duplicates cut short"] = n_unchecked
        notes[CUT_PAIRS] = count_cut_pairs(store)
        self._recount_tasks(store, notes)
        return notes

    def _refuse_missing_tasks(self) -> None:
        """Refuse a task without an example."""
        notes = self._sum_counts("notes")
        for task in self.plan.settings.tasks:
            prefix = missing_note(task)
            missing = [note for note in notes if note.startswith(prefix)]
            if missing and not notes[examples_note(task)]:
                reason = missing[0].removeprefix(prefix)
                raise DataError(
                    f"data.tasks has {task}, but none of the {notes[missing[0]]:,} records in "
                    f"{self._named_sources()} gives an example of it: {reason}. Remove {task} from "
                    "data.tasks, or add a source with the fields that it needs."
                )

    def _own_tasks(self) -> Mapping[str, TaskTemplate]:
        """Return the tasks that the user defined. Every reader has the same tasks."""
        readers = [file.reader for file in self.plan.files]
        return next(
            (reader.tasks for reader in readers if isinstance(reader, TaskReader)), {}
        )

    def _recount_tasks(self, store: TokenStore, notes: Counts) -> None:
        """Replace the counts of read rows by counts of rows in use, for each task and class."""
        in_use = store.split != LEFT_OUT
        names: dict[int, str] = {}
        for file in self.plan.files:
            names |= getattr(file.reader, "task_names", {})
        tasks = self._own_tasks()
        for code, name in names.items():
            is_of_task = store.column("task") == code
            if examples_note(name) in notes:
                notes[examples_note(name)] = int((in_use & is_of_task).sum())
            if name in tasks and tasks[name].classes:
                self._recount_classes(store, notes, name, is_of_task)

    def _recount_classes(
        self,
        store: TokenStore,
        notes: Counts,
        task: str,
        is_of_task: Bools,
    ) -> None:
        """Replace the counts of a task's classes by counts of rows in use.

        Raises:
            DataError: No training row has a class of the task.
        """
        used_rows = np.flatnonzero(is_of_task & (store.split != LEFT_OUT))
        train_rows = np.flatnonzero(is_of_task & (store.split == SPLIT_CODES["train"]))
        n_in_use = _count_answers(store, self.codec, used_rows)
        n_train = _count_answers(store, self.codec, train_rows)
        for answer in map(str.strip, self._own_tasks()[task].classes):
            note = class_note(task, answer)
            if not n_train[answer]:
                raise DataError(
                    f"data.tasks.{task}.classes has {answer!r}, but none of the {notes[note]:,} "
                    f"records in {self._named_sources()} with this answer is a training example: "
                    "they are held out, duplicates, beyond data.max_examples or over a limit of "
                    "the data section. Add more records with this answer, or remove the class."
                )
            notes[note] = n_in_use[answer]

    def _refuse_classes(self) -> None:
        """Refuse a class that no row has, or that the tokenizer cannot encode."""
        notes = self._sum_counts("notes")
        codec = self.codec
        max_target = self.settings.limits[1]
        for name, task in self._own_tasks().items():
            for answer in map(str.strip, task.classes):
                problem = f"data.tasks.{name}.classes has {answer!r}"
                if not notes[class_note(name, answer)]:
                    raise DataError(
                        f"{problem}, but no record in {self._named_sources()} has this answer. "
                        "Remove the class, or spell it as in the records, including upper and "
                        "lower case."
                    )
                ids = codec.encode(codec.normalise(answer))
                text = codec.decode(ids)
                if text.strip() != answer:
                    raise DataError(
                        f"{problem}, but the tokenizer {codec.name} decodes it to {text!r}. Choose "
                        "another word for the class, or another model.tokenizer."
                    )
                if len(ids) >= max_target:
                    raise DataError(
                        f"{problem}, which takes {len(ids) + 1} tokens including the end token, "
                        f"but data.max_target_tokens is {max_target}. Raise "
                        "data.max_target_tokens, or choose a shorter word."
                    )

    def _named_sources(self) -> str:
        return join_first(Path(file.name).name for file in self.plan.files)

    def _sum_counts(self, field: str) -> Counts:
        """Sum a field with counts over all shards."""
        total: Counts = Counter()
        for shard in self.shards:
            total.update(getattr(shard, field))
        return total

    def _count_cuts(self, in_use: Bools) -> dict[str, int]:
        """Count the cut sides of the rows in use, and the tokens that were cut."""
        cut: dict[str, int] = {}
        for side, name in LOST.items():
            lost = read_column(self.plan.store, self.shards, name)[in_use]
            cut[f"{side}s"] = int((~np.isnan(lost)).sum())
            cut[f"{side}_tokens"] = int(np.nansum(lost, dtype=np.float64))
        return cut

    def _count_files(self) -> list[_FileCounts]:
        """Count the records of each file."""
        blocks_of_file = defaultdict(list)
        for block in chain.from_iterable(shard.blocks for shard in self.shards):
            blocks_of_file[block.source, block.path].append(block)
        counts = []
        for file in self.plan.files:
            blocks = blocks_of_file[file.source, file.name]
            unused = sum((Counter(block.unused) for block in blocks), Counts())
            read = sum(block.read for block in blocks)
            n_kept = sum(block.kept for block in blocks)
            counts.append(_FileCounts(file, read, n_kept, unused))
        return counts

    def _make_report(
        self,
        store: TokenStore,
        division: Division,
        dropped: Counts,
        lines: Lines,
        notes: Counts,
    ) -> Report:
        """Create the data report."""
        in_use = division.split != LEFT_OUT
        prompts = store.prompt_lengths[in_use]
        targets = store.target_lengths[in_use]
        manifest = store.manifest
        lost_characters = self._sum_counts("lost_characters")
        excerpts = [excerpt for shard in self.shards for excerpt in shard.excerpts]
        split_rule = (
            "by a hash of the body, documents by a hash of the document and "
            "piece number // 16"
        )
        if self.plan.settings.held_out_from is not None:
            split_rule = "by source, with data.validation held out"

        return Report(
            tokenizer=self.codec.name,
            sources=[
                SourceReport(
                    path=counts.file.name,
                    schema=_schema(counts.file),
                    source=counts.file.source,
                    read=counts.read,
                    kept=counts.kept,
                    unused=most_frequent(counts.unused),
                )
                for counts in self._count_files()
            ],
            source_rows=source_rows(store, prompts + targets),
            read=manifest.records.read,
            kept=manifest.records.kept,
            dropped=dict(dropped.most_common()),
            lines=lines,
            left_out=self.plan.left_out,
            notes={note: n for note, n in sorted(notes.items()) if n},
            examples=manifest.examples,
            train=manifest.splits.train,
            validation=manifest.splits.validation,
            prompt_tokens=int(prompts.sum(dtype=np.int64)),
            target_tokens=int(targets.sum(dtype=np.int64)),
            prompt_lengths=Lengths.from_values(prompts),
            target_lengths=Lengths.from_values(targets),
            cut=manifest.cut,
            unknown=dict(self._sum_counts("unknown")),
            lost_characters=dict(lost_characters.most_common(_SHOWN_CHARACTERS)),
            lost_in_all=lost_characters.total(),
            leaked_bodies=division.leaked_bodies,
            leaked_titles=division.leaked_titles,
            split_rule=split_rule,
            prompt_histogram=Histogram.from_values(prompts),
            target_histogram=Histogram.from_values(targets),
            columns=column_reports(
                manifest.columns, lambda name: store.column(name)[in_use]
            ),
            kept_examples=kept_excerpts(store, self.codec),
            dropped_examples=dropped_excerpts(
                store, self.codec, excerpts, division.dropped
            ),
            limits=list(self.limits),
            seconds=round(time.perf_counter() - self.started, 2),
        )

    def _make_manifest(
        self, division: Division, dropped: Counts, *, read: int
    ) -> StoreManifest:
        """Create the manifest, without the counts of tokens."""
        folder = self.plan.store
        settings = self.settings
        n_rows = len(division.split)
        shard_files = chain.from_iterable(shard.files for shard in self.shards)
        tokenizer = sorted(p for p in (folder / "tokenizer").iterdir() if p.is_file())

        columns = {
            name: kind for shard in self.shards for name, kind in shard.columns.items()
        }
        n_train, n_validation = (
            int((division.split == SPLIT_CODES[side]).sum()) for side in SPLIT_CODES
        )

        return StoreManifest(
            format=FORMAT,
            fingerprint=self.plan.fingerprint(settings),
            family_kind=settings.family_kind,
            tokenizer=TokenizerEntry(
                self.codec.name, self.codec.sha256, self.codec.vocab_size
            ),
            examples=n_train + n_validation,
            rows=n_rows,
            tokens=TokenCounts(0, 0),
            splits=Splits(n_train, n_validation),
            records=Records(read, division.records),
            dropped=dict(sorted(dropped.items())),
            sources=[
                SourceEntry(
                    path=counts.file.name,
                    reader=counts.file.reader.recorded_name,
                    source=counts.file.source,
                    sha256=counts.file.sha256,
                    bytes=counts.file.bytes,
                    read=counts.read,
                    kept=counts.kept,
                )
                for counts in self._count_files()
            ],
            # The signatures of near-duplicates are removed after the split.
            shards=[entry for entry in shard_files if Path(entry.file).stem != NEAR],
            files=[
                file_entry(folder / "split.npy", "split.npy", n_rows),
                *(file_entry(path, f"tokenizer/{path.name}", 0) for path in tokenizer),
            ],
            columns=dict(sorted(columns.items())),
            settings=self.plan.recorded_with(settings),
            cut=dict(sorted(self._count_cuts(division.split != LEFT_OUT).items())),
            self_sha256="",
        )


def _count_answers(store: TokenStore, codec: Codec, rows: Ints) -> Counts:
    """Count the rows per target text. There are few different targets."""
    counts: Counter[bytes] = Counter()
    dtype: np.dtype[np.generic] = np.dtype(np.uint8)
    for start in range(0, len(rows), _CHUNK_ROWS):
        _, targets = store.sides(rows[start : start + _CHUNK_ROWS])
        counts.update(targets.parts)
        dtype = targets.dtype
    answers: Counts = Counter()
    for ids, n in counts.items():
        answers[codec.decode(np.frombuffer(ids, dtype)).strip()] = n
    return answers


def refuse_bad_sources(plan: StorePlan, shards: Sequence[ShardResult]) -> None:
    """Refuse a source if its fraction of unusable records exceeds `max_bad_share`."""
    limit = plan.settings.max_bad_share
    for number in sorted({file.source for file in plan.files}):
        read = sum(b.read for s in shards for b in s.blocks if b.source == number)
        dropped, lines = _count_dropped(shards, number)
        # A missing label does not mean that the format is wrong.
        bad = sum(n for reason, n in dropped.items() if not reason.startswith(NO_LABEL))
        if read == 0 or bad / read <= limit:
            continue
        paths = [Path(f.name).name for f in plan.files if f.source == number]
        names = ", ".join(paths[:_MAX_PATHS])
        reasons = describe_reasons(dropped, lines)
        advice = _NAME_THE_FIELDS
        if 2 * dropped[NOT_UTF_8] > bad:
            advice = f"{ENCODING_HINT} "
        if bad < read:
            sufficient_share = math.ceil(bad / read * 100) / 100
            advice += (
                f"To use only the {read - bad:,} good records, set "
                f"data.max_bad_share={sufficient_share:g}."
            )
        raise DataError(
            f"{bad:,} of the {read:,} records in {names} cannot be used, more than "
            f"data.max_bad_share={limit:g} allows: {reasons}. {advice.rstrip()}"
        )


def _count_dropped(
    shards: Iterable[ShardResult], source: int | None = None
) -> tuple[Counts, Lines]:
    """Count dropped records by reason, and list the lines of the first ones.

    For a `source`, count only the records that its reader dropped.
    """
    dropped: Counts = Counter()
    lines: Lines = {}
    for shard in shards:
        if source is None:
            dropped.update(shard.dropped)
        for block in shard.blocks:
            if source not in (None, block.source):
                continue
            dropped.update(block.dropped)
            add_first_lines(lines, block.path, block.lines, _MAX_LINES)
    return dropped, lines


def _schema(file: SourceFile) -> str:
    """Return the schema of a file, or "" if the file was removed or changed since it was read."""
    with suppress(DataError):
        return file.reader.schema(file.path)
    return ""
