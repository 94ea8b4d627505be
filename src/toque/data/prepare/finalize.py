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

import msgspec
import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.data_report import (
    ENCODING_HINT,
    LOST,
    MAX_UNKNOWN,
    Histogram,
    Lengths,
    Report,
    SourceReport,
    column_reports,
    dropped_excerpts,
    kept_excerpts,
    reasons_in_words,
    source_rows,
)
from toque.data.prepare.dedup_and_split import Division, RowKeys, divide
from toque.data.prepare.duplicates import NEAR, clusters_of
from toque.data.prepare.shards import (
    NOT_READ,
    ShardResult,
    file_entry,
    read_column,
    shard_folder,
)
from toque.data.prepare.store_plan import PrepareSettings, StorePlan, named
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
from toque.errors import DataError
from toque.sources.own_tasks import TaskReader, class_note
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

_MAX_SHOWN = 10
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
_DOCUMENTS = "documents by a hash of the document and piece number // 16"


@dataclass(frozen=True)
class StoreFinalizer:
    """Last step of preparing: a complete set of shards becomes a store."""

    plan: StorePlan
    codec: Codec
    settings: PrepareSettings  # settings of the plan with the chosen limits
    limits: Sequence[str]  # descriptions of the chosen limits
    shards: Sequence[ShardResult]  # in group order
    not_read: int  # bytes of the sources that were not needed for `max_examples`
    started: float  # start time by `time.perf_counter`

    def finish(self) -> Report:
        """Write the split, the data report and finally the manifest.

        Raises:
            DataError: Too many records are dropped, or a task or class has no example.
        """
        folder = self.plan.store
        refuse_bad_sources(self.plan, self.shards)
        self._refuse_missing_tasks()
        self._refuse_classes()
        division, n_unchecked = self._divide()
        dropped, lines = _count_dropped(self.shards)
        dropped.update(division.dropped)
        read = sum(block.read for shard in self.shards for block in shard.blocks)
        if division.records == 0:
            raise DataError(
                f"None of the {read:,} records in {self._named_sources()} is usable: "
                f"{reasons_in_words(dropped, lines)}. Check these lines, and the format and limits "
                "in the data section."
            )
        assert read == division.records + sum(dropped.values()), (
            "records were lost uncounted"
        )
        with atomic_file(folder / "split.npy") as file:
            write_array(file, division.split)

        manifest = self._manifest(division, dropped, read=read)
        store = TokenStore(folder, manifest)
        notes = self._notes(store, n_unchecked)
        report = self._report(store, division, dropped, lines, notes)
        if report.unknown_share > MAX_UNKNOWN:
            raise DataError(
                f"{report.unknown_notice()} Above {MAX_UNKNOWN:.0%} no store is written, because a "
                "model cannot learn from such texts."
            )
        report.write(folder)
        tokens = TokenCounts(report.prompt_tokens, report.target_tokens)
        sync_folder(folder)
        manifest = msgspec.structs.replace(manifest, tokens=tokens)
        atomic_write(folder / NAME, manifest_bytes(manifest))
        return report

    def _divide(self) -> tuple[Division, int]:
        """Split the rows, and count the records that were not compared with all similar records."""
        folder = self.plan.store
        settings = self.plan.settings
        first_alike = held_out = None
        n_unchecked = 0
        if settings.dedup == "near":
            shards = [shard_folder(folder, shard.group) for shard in self.shards]
            first_alike, n_unchecked = clusters_of(folder, shards)
        if settings.held_out_from is not None:
            held_out = (
                read_column(folder, self.shards, "source") >= settings.held_out_from
            )
        names = ("key", "title_key", "record_key", "task", "starts_record")
        columns = {name: read_column(folder, self.shards, name) for name in names}
        keys = RowKeys(**columns, first_alike=first_alike, held_out=held_out)
        return divide(keys, settings), n_unchecked

    def _notes(self, store: TokenStore, n_unchecked: int) -> Counter[str]:
        """Collect the counts of the report's notes."""
        notes = self._summed("notes")
        notes[NOT_READ] = self.not_read
        notes.update(f"files left out: {why}" for why in self.plan.left_out.values())
        if self.plan.tokenizer is None:
            notes[LONG_WORDS] = int(self.codec.settings.get(WORDS_CUT, 0))
            vocab_size = self.settings.trained_vocab_size or 0
            notes[FEWER_ENTRIES] = max(0, vocab_size - self.codec.vocab_size)
        notes["comparisons of near-duplicates cut short"] = n_unchecked
        self._count_in_use(store, notes)
        return notes

    def _refuse_missing_tasks(self) -> None:
        notes = self._summed("notes")
        for task in self.plan.settings.tasks:
            prefix = missing_note(task)
            missing = [note for note in notes if note.startswith(prefix)]
            if missing and not notes[examples_note(task)]:
                raise DataError(
                    f"data.tasks has {task}, but none of the {notes[missing[0]]:,} records in "
                    f"{self._named_sources()} gives an example of it: "
                    f"{missing[0].removeprefix(prefix)}. Remove {task} from data.tasks, or add a "
                    "source with the fields that it needs."
                )

    def _own_tasks(self) -> Mapping[str, TaskTemplate]:
        """Find the tasks of the settings. Every reader has the same tasks."""
        readers = [file.reader for file in self.plan.files]
        return next(
            (reader.tasks for reader in readers if isinstance(reader, TaskReader)), {}
        )

    def _count_in_use(self, store: TokenStore, notes: Counter[str]) -> None:
        """Replace the counts of read rows by counts of rows in use, for each task and class.

        Raises:
            DataError: No training row has a class of a task.
        """
        in_use = store.split != LEFT_OUT
        train = store.split == SPLIT_CODES["train"]
        readers = [file.reader for file in self.plan.files]
        names = {
            c: n
            for reader in readers
            for c, n in getattr(reader, "task_names", {}).items()
        }
        tasks = self._own_tasks()
        for code, name in names.items():
            of_task = store.column("task") == code
            if examples_note(name) in notes:
                notes[examples_note(name)] = int((in_use & of_task).sum())
            if name not in tasks or not tasks[name].classes:
                continue
            n_in_use = _count_answers(
                store, self.codec, np.flatnonzero(of_task & in_use)
            )
            n_train = _count_answers(store, self.codec, np.flatnonzero(of_task & train))
            for answer in map(str.strip, tasks[name].classes):
                note = class_note(name, answer)
                if not n_train[answer]:
                    raise DataError(
                        f"data.tasks.{name}.classes has {answer!r}, but none of the "
                        f"{notes[note]:,} records in {self._named_sources()} with this answer is a "
                        "training example: they are held out, duplicates, beyond "
                        "data.max_examples or over a limit of the data section. Add more records "
                        "with this answer, or remove the class."
                    )
                notes[note] = n_in_use[answer]

    def _refuse_classes(self) -> None:
        """Refuse a class that no row has, or that the tokenizer cannot encode."""
        notes = self._summed("notes")
        codec = self.codec
        limit = self.settings.limits[1]
        for name, task in self._own_tasks().items():
            for answer in map(str.strip, task.classes):
                what = f"data.tasks.{name}.classes has {answer!r}"
                if not notes[class_note(name, answer)]:
                    raise DataError(
                        f"{what}, but no record in {self._named_sources()} has this answer. Remove "
                        "the class, or spell it as in the records, including upper and lower case."
                    )
                ids = codec.encode(codec.normalise(answer))
                text = codec.decode(ids)
                if text.strip() != answer:
                    raise DataError(
                        f"{what}, but the tokenizer {codec.name} decodes it to {text!r}. Choose "
                        "another word for the class, or another model.tokenizer."
                    )
                if len(ids) >= limit:
                    raise DataError(
                        f"{what}, which has {len(ids)} tokens and an end token, but "
                        f"data.max_target_tokens is {limit}. Raise it, or choose a shorter word."
                    )

    def _named_sources(self) -> str:
        return named(Path(file.name).name for file in self.plan.files)

    def _summed(self, field: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(getattr(shard, field))
        return total

    def _count_cuts(self, in_use: NDArray[np.bool_]) -> dict[str, int]:
        """Count the cut sides of the rows in use, and the tokens that they lost."""
        cut: dict[str, int] = {}
        for side, name in LOST.items():
            lost = read_column(self.plan.store, self.shards, name)[in_use]
            cut[f"{side}s"] = int((~np.isnan(lost)).sum())
            cut[f"{side}_tokens"] = int(np.nansum(lost, dtype=np.float64))
        return cut

    def _files(self) -> list[tuple[SourceFile, int, int, Counter[str]]]:
        """List the files with their counts of read and kept records and of unused fields."""
        blocks_of_file = defaultdict(list)
        for block in chain.from_iterable(shard.blocks for shard in self.shards):
            blocks_of_file[block.source, block.path].append(block)
        files = []
        for file in self.plan.files:
            blocks = blocks_of_file[file.source, file.name]
            unused = sum((Counter(block.unused) for block in blocks), Counter[str]())
            read = sum(block.read for block in blocks)
            n_kept = sum(block.kept for block in blocks)
            files.append((file, read, n_kept, unused))
        return files

    def _report(
        self,
        store: TokenStore,
        division: Division,
        dropped: Counter[str],
        lines: dict[str, list[str]],
        notes: Counter[str],
    ) -> Report:
        in_use = division.split != LEFT_OUT
        prompts, targets = store.prompt_lengths[in_use], store.target_lengths[in_use]
        manifest = store.manifest

        lost_characters = self._summed("lost_characters")
        excerpts = [excerpt for shard in self.shards for excerpt in shard.excerpts]

        return Report(
            tokenizer=self.codec.name,
            sources=[
                SourceReport(
                    f.name, _schema(f), f.source, read, n_kept, most_frequent(unused)
                )
                for f, read, n_kept, unused in self._files()
            ],
            source_rows=source_rows(store, prompts + targets),
            read=manifest.records.read,
            kept=manifest.records.kept,
            dropped=dict(dropped.most_common()),
            lines=lines,
            left_out=self.plan.left_out,
            notes={what: n for what, n in sorted(notes.items()) if n},
            examples=manifest.examples,
            train=manifest.splits.train,
            validation=manifest.splits.validation,
            prompt_tokens=int(prompts.sum(dtype=np.int64)),
            target_tokens=int(targets.sum(dtype=np.int64)),
            prompt_lengths=Lengths.of(prompts),
            target_lengths=Lengths.of(targets),
            cut=manifest.cut,
            unknown=dict(self._summed("unknown")),
            lost_characters=dict(lost_characters.most_common(10)),
            lost_in_all=lost_characters.total(),
            leaked_bodies=division.leaked_bodies,
            leaked_titles=division.leaked_titles,
            split_rule="by source, with data.validation held out"
            if self.plan.settings.held_out_from is not None
            else f"by a hash of the body, {_DOCUMENTS}",
            prompt_histogram=Histogram.of(prompts),
            target_histogram=Histogram.of(targets),
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

    def _manifest(
        self, division: Division, dropped: Counter[str], *, read: int
    ) -> StoreManifest:
        """Create the manifest, without the counts of tokens."""
        folder = self.plan.store
        settings = self.settings
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
            rows=len(division.split),
            tokens=TokenCounts(0, 0),
            splits=Splits(n_train, n_validation),
            records=Records(read, division.records),
            dropped=dict(sorted(dropped.items())),
            sources=[
                SourceEntry(
                    f.name,
                    f.reader.recorded_name,
                    f.source,
                    f.sha256,
                    f.bytes,
                    n,
                    n_kept,
                )
                for f, n, n_kept, _ in self._files()
            ],
            shards=[
                e for s in self.shards for e in s.files if Path(e.file).stem != NEAR
            ],
            files=[file_entry(folder / "split.npy", "split.npy", len(division.split))]
            + [file_entry(path, f"tokenizer/{path.name}", 0) for path in tokenizer],
            columns=dict(sorted(columns.items())),
            settings=self.plan.recorded_with(settings),
            cut=dict(sorted(self._count_cuts(division.split != LEFT_OUT).items())),
            self_sha256="",
        )


def _count_answers(
    store: TokenStore, codec: Codec, rows: NDArray[np.int64]
) -> Counter[str]:
    """Count the rows per target. There are few different targets."""
    counts: Counter[bytes] = Counter()
    dtype: np.dtype[np.generic] = np.dtype(np.uint8)
    for start in range(0, len(rows), _CHUNK_ROWS):
        _, targets = store.sides(rows[start : start + _CHUNK_ROWS])
        counts.update(targets.parts)
        dtype = targets.dtype
    return Counter(
        {
            codec.decode(np.frombuffer(ids, dtype)).strip(): n
            for ids, n in counts.items()
        }
    )


def refuse_bad_sources(plan: StorePlan, shards: Sequence[ShardResult]) -> None:
    """Refuse a source with too many unusable records."""
    limit = plan.settings.max_bad_share
    for number in sorted({file.source for file in plan.files}):
        read = sum(b.read for s in shards for b in s.blocks if b.source == number)
        dropped, lines = _count_dropped(shards, number)
        bad = sum(n for reason, n in dropped.items() if not reason.startswith(NO_LABEL))
        if read == 0 or bad / read <= limit:
            continue
        paths = [Path(f.name).name for f in plan.files if f.source == number]
        advice = (
            f"{ENCODING_HINT} " if 2 * dropped[NOT_UTF_8] > bad else _NAME_THE_FIELDS
        )
        raise DataError(
            f"{bad:,} of the {read:,} records in {', '.join(paths[:3])} cannot be used, more than "
            f"the share of {limit:g} in data.max_bad_share: {reasons_in_words(dropped, lines)}. "
            f"{advice}To use only the {read - bad:,} good records, set "
            f"data.max_bad_share={math.ceil(bad / read * 100) / 100:g}."
        )


def _count_dropped(
    shards: Iterable[ShardResult], source: int | None = None
) -> tuple[Counter[str], dict[str, list[str]]]:
    """Count dropped records by reason, and list the first ones.

    For a `source`, count only the records that its reader dropped.
    """
    dropped: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    for shard in shards:
        if source is None:
            dropped.update(shard.dropped)
        for block in shard.blocks:
            if source not in (None, block.source):
                continue
            dropped.update(block.dropped)
            name = Path(block.path).name
            for reason, numbers in block.lines.items():
                first = lines.setdefault(reason, [])
                first += [f"{name}:{n}" for n in numbers[: _MAX_SHOWN - len(first)]]
    return dropped, lines


def _schema(file: SourceFile) -> str:
    with suppress(DataError):  # the file was removed or changed since it was read
        return file.reader.schema(file.path)
    return ""
