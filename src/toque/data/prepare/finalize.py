"""Store finalization: the global pass over all rows, refusals, split, report, manifest."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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
    MOST_UNKNOWN,
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
from toque.data.prepare.duplicates import NEAR, Division, RowKeys, clusters_of, divide
from toque.data.prepare.shards import NOT_READ, ShardResult, file_entry, read_column, shard_folder
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
from toque.sources.records import NO_LABEL, NOT_UTF_8, examples_note, missing_note, most_named
from toque.sources.source_files import SourceFile
from toque.storage.atomic import atomic_file, atomic_write, sync_folder, write_array

_SHOWN = 10
_AT_ONCE = 1 << 16  # rows whose answers are read at a time
_NAME_THE_FIELDS = (
    "Name the right fields in data.sources.columns or the right data.sources.format. "
)
LONG_WORDS = f"words over {MAX_WORD_CHARS:,} characters, cut where the tokenizer was learnt"
FEWER_ENTRIES = "entries fewer in the learnt vocabulary than were asked for: its texts hold no more"
_DOCUMENTS = "documents by a hash of the document and piece number // 16"


@dataclass(frozen=True)
class StoreFinalizer:
    """Turns a complete set of shards into a store."""

    plan: StorePlan
    codec: Codec
    settings: PrepareSettings  # the plan's settings with their limits known
    limits: Sequence[str]  # sentences on the limits that were chosen
    shards: Sequence[ShardResult]  # the shards in group order
    not_read: int  # bytes of the sources left unread because `max_examples` were found
    started: float  # time at which preparing began, by `time.perf_counter`

    def finish(self) -> Report:
        """Write the split, the report and, last, the manifest; DataError if too little is left."""
        folder = self.plan.store
        refuse_bad_sources(self.plan, self.shards)
        self._refuse_missing_tasks()
        self._refuse_classes()
        first_alike, n_unchecked = None, 0
        if self.plan.settings.dedup == "near":
            names = [shard_folder(folder, shard.group) for shard in self.shards]
            first_alike, n_unchecked = clusters_of(folder, names)
        keys = ("key", "title_key", "record_key", "task", "starts_record")
        columns = {name: read_column(folder, self.shards, name) for name in keys}
        held_out, begins = None, self.plan.settings.held_out_from
        if begins is not None:
            held_out = read_column(folder, self.shards, "source") >= begins
        keys_of_rows = RowKeys(**columns, first_alike=first_alike, held_out=held_out)
        division = divide(keys_of_rows, self.plan.settings)
        dropped, lines = _dropped(self.shards)
        dropped.update(division.dropped)
        read = sum(block.read for shard in self.shards for block in shard.blocks)
        if division.records == 0:
            raise DataError(
                f"None of the {read:,} records in {self._named_sources()} is usable: "
                f"{reasons_in_words(dropped, lines)}. Look at those lines, and at the format and "
                "the limits in the data section."
            )
        assert read == division.records + sum(dropped.values()), "records were lost uncounted"
        with atomic_file(folder / "split.npy") as file:
            write_array(file, division.split)
        manifest = self._manifest(division, dropped, read=read)
        notes = self._summed("notes")
        notes[NOT_READ] = self.not_read
        notes.update(f"files left out: {why}" for why in self.plan.left_out.values())
        if self.plan.tokenizer is None:
            notes[LONG_WORDS] = int(self.codec.settings.get(WORDS_CUT, 0))
            asked = self.settings.trained_vocab_size or 0
            notes[FEWER_ENTRIES] = max(0, asked - self.codec.vocab_size)
        notes["comparisons of near-duplicates cut short"] = n_unchecked
        store = TokenStore(folder, manifest)
        self._count_in_use(store, notes)
        report = self._report(store, division, dropped, lines, notes)
        if report.unknown_share > MOST_UNKNOWN:
            raise DataError(
                f"{report.unknown_notice()} Above {MOST_UNKNOWN:.0%} no store is written: nothing "
                "of use can be learnt from such texts."
            )
        report.write(folder)
        tokens = TokenCounts(report.prompt_tokens, report.target_tokens)
        sync_folder(folder)
        manifest = msgspec.structs.replace(manifest, tokens=tokens)
        atomic_write(folder / NAME, manifest_bytes(manifest))
        return report

    def _refuse_missing_tasks(self) -> None:
        notes = self._summed("notes")
        for task in self.plan.settings.tasks:
            begins = missing_note(task)
            without = [note for note in notes if note.startswith(begins)]
            if without and not notes[examples_note(task)]:
                raise DataError(
                    f"data.tasks asks for {task}, and none of the {notes[without[0]]:,} records in "
                    f"{self._named_sources()} gives an example of it: "
                    f"{without[0].removeprefix(begins)}. Take {task} out of data.tasks, or add a "
                    "source that has what it needs."
                )

    def _count_in_use(self, store: TokenStore, notes: Counter[str]) -> None:
        """Put counts of the rows in use for those read, of each task and of each of its classes.

        Refuse a class that no row to train on has.
        """
        in_use, to_train = store.split != LEFT_OUT, store.split == SPLIT_CODES["train"]
        readers = [file.reader for file in self.plan.files]
        names = {c: n for reader in readers for c, n in getattr(reader, "task_names", {}).items()}
        own = next((reader.tasks for reader in readers if isinstance(reader, TaskReader)), {})
        for code, name in names.items():
            of_task = store.column("task") == code
            if examples_note(name) in notes:
                notes[examples_note(name)] = int((in_use & of_task).sum())
            if name not in own or not own[name].classes:
                continue
            used, trained = (
                _answers(store, self.codec, np.flatnonzero(of_task & rows))
                for rows in (in_use, to_train)
            )
            for answer in map(str.strip, own[name].classes):
                if not trained[answer]:
                    raise DataError(
                        f"data.tasks.{name}.classes names {answer!r}, and of the "
                        f"{notes[class_note(name, answer)]:,} records in {self._named_sources()} "
                        "with that answer none is trained on: they are held out, duplicates, "
                        "beyond data.max_examples or over a limit of the data section. Add some, "
                        "or take it out."
                    )
                notes[class_note(name, answer)] = used[answer]

    def _refuse_classes(self) -> None:
        """Refuse a class of a task that no row has, or that the tokenizer does not give back."""
        notes, codec, most = self._summed("notes"), self.codec, self.settings.limits[1]
        readers = [f.reader for f in self.plan.files if isinstance(f.reader, TaskReader)]
        tasks = readers[0].tasks if readers else {}
        for name, task in tasks.items():
            for answer in map(str.strip, task.classes):
                place = f"data.tasks.{name}.classes names {answer!r}"
                if not notes[class_note(name, answer)]:
                    raise DataError(
                        f"{place}, and no record in {self._named_sources()} has that answer. Take "
                        "it out, or write it as the records do, letter case included."
                    )
                ids = codec.encode(codec.normalise(answer))
                if codec.decode(ids).strip() != answer or len(ids) >= most:
                    raise DataError(
                        f"{place}, which the tokenizer {codec.name} reads back from {len(ids)} "
                        f"tokens as {codec.decode(ids)!r}; data.max_target_tokens is {most}, one "
                        "of them for its end. Choose another word for it, another model.tokenizer "
                        "or a higher limit."
                    )

    def _named_sources(self) -> str:
        return named(Path(file.name).name for file in self.plan.files)

    def _summed(self, field: str) -> Counter[str]:
        total: Counter[str] = Counter()
        for shard in self.shards:
            total.update(getattr(shard, field))
        return total

    def _cut(self, used: NDArray[np.bool_]) -> dict[str, int]:
        """The sides of the rows in use that were cut, and the text tokens they lost."""
        cut: dict[str, int] = {}
        for side, name in LOST.items():
            lost = read_column(self.plan.store, self.shards, name)[used]
            cut[f"{side}s"] = int((~np.isnan(lost)).sum())
            cut[f"{side}_tokens"] = int(np.nansum(lost, dtype=np.float64))
        return cut

    def _per_file(self) -> list[tuple[SourceFile, int, int, Counter[str]]]:
        """Each file with its records read and kept, and the fields that no example holds."""
        blocks = defaultdict(list)
        for block in chain.from_iterable(shard.blocks for shard in self.shards):
            blocks[block.source, block.path].append(block)
        found = []
        for file in self.plan.files:
            own = blocks[file.source, file.name]
            unused = sum((Counter(block.unused) for block in own), Counter[str]())
            found.append((file, sum(b.read for b in own), sum(b.kept for b in own), unused))
        return found

    def _report(
        self,
        store: TokenStore,
        division: Division,
        dropped: Counter[str],
        lines: dict[str, list[str]],
        notes: Counter[str],
    ) -> Report:
        used = division.split != LEFT_OUT
        prompts, targets = store.prompt_lengths[used], store.target_lengths[used]
        manifest = store.manifest
        excerpts = [excerpt for shard in self.shards for excerpt in shard.excerpts]
        return Report(
            tokenizer=self.codec.name,
            sources=[
                SourceReport(f.name, _schema(f), f.source, r, k, most_named(unused))
                for f, r, k, unused in self._per_file()
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
            lost_characters=dict(self._summed("lost_characters").most_common(10)),
            lost_in_all=self._summed("lost_characters").total(),
            leaked_bodies=division.leaked_bodies,
            leaked_titles=division.leaked_titles,
            split_rule="by source, data.validation being held out"
            if self.plan.held_out
            else f"by a hash of the body, {_DOCUMENTS}",
            prompt_histogram=Histogram.of(prompts),
            target_histogram=Histogram.of(targets),
            columns=column_reports(manifest.columns, lambda name: store.column(name)[used]),
            kept_examples=kept_excerpts(store, self.codec),
            dropped_examples=dropped_excerpts(store, self.codec, excerpts, division.dropped),
            limits=list(self.limits),
            seconds=round(time.perf_counter() - self.started, 2),
        )

    def _manifest(self, division: Division, dropped: Counter[str], *, read: int) -> StoreManifest:
        """The manifest, in which the tokens of the rows in use are still to be counted."""
        folder, settings = self.plan.store, self.settings
        tokenizer = sorted(p for p in (folder / "tokenizer").iterdir() if p.is_file())
        columns = {name: kind for shard in self.shards for name, kind in shard.columns.items()}
        n_train, n_validation = (
            int((division.split == SPLIT_CODES[side]).sum()) for side in SPLIT_CODES
        )
        return StoreManifest(
            format=FORMAT,
            fingerprint=self.plan.fingerprint(settings),
            family_kind=settings.family_kind,
            tokenizer=TokenizerEntry(self.codec.name, self.codec.sha256, self.codec.vocab_size),
            examples=n_train + n_validation,
            rows=len(division.split),
            tokens=TokenCounts(0, 0),
            splits=Splits(n_train, n_validation),
            records=Records(read, division.records),
            dropped=dict(sorted(dropped.items())),
            sources=[
                SourceEntry(f.name, f.reader.recorded_name, f.source, f.sha256, f.bytes, r, k)
                for f, r, k, _ in self._per_file()
            ],
            shards=[e for s in self.shards for e in s.files if Path(e.file).stem != NEAR],
            files=[file_entry(folder / "split.npy", "split.npy", len(division.split))]
            + [file_entry(path, f"tokenizer/{path.name}", 0) for path in tokenizer],
            columns=dict(sorted(columns.items())),
            settings=self.plan.recorded_with(settings),
            cut=dict(sorted(self._cut(division.split != LEFT_OUT).items())),
            self_sha256="",
        )


def _answers(store: TokenStore, codec: Codec, rows: NDArray[np.int64]) -> Counter[str]:
    """How many of these rows, which have few different targets, have each of them."""
    found: Counter[bytes] = Counter()
    dtype: np.dtype[np.generic] = np.dtype(np.uint8)
    for at in range(0, len(rows), _AT_ONCE):
        targets = store.sides(rows[at : at + _AT_ONCE])[1]
        found.update(targets.parts)
        dtype = targets.dtype
    return Counter({codec.decode(np.frombuffer(ids, dtype)).strip(): n for ids, n in found.items()})


def refuse_bad_sources(plan: StorePlan, shards: Sequence[ShardResult]) -> None:
    """Refuse a source of which too many records cannot be used."""
    most = plan.settings.max_bad_share
    for number in sorted({file.source for file in plan.files}):
        read = sum(b.read for s in shards for b in s.blocks if b.source == number)
        dropped, lines = _dropped(shards, number)
        bad = sum(n for reason, n in dropped.items() if not reason.startswith(NO_LABEL))
        if read == 0 or bad / read <= most:
            continue
        paths = [Path(f.name).name for f in plan.files if f.source == number]
        raise DataError(
            f"{bad:,} of the {read:,} records in {', '.join(paths[:3])} cannot be used, more "
            f"than the share of {most:g} that is allowed: {reasons_in_words(dropped, lines)}. "
            + (f"{ENCODING_HINT} " if 2 * dropped[NOT_UTF_8] > bad else _NAME_THE_FIELDS)
            + f"To use the {read - bad:,} good ones all the same, set "
            f"data.max_bad_share={math.ceil(bad / read * 100) / 100:g}."
        )


def _dropped(
    shards: Iterable[ShardResult], source: int | None = None
) -> tuple[Counter[str], dict[str, list[str]]]:
    """Records dropped by reason, and the first places; of a `source`, by its reader alone."""
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
                shown = lines.setdefault(reason, [])
                shown += [f"{name}:{n}" for n in numbers[: _SHOWN - len(shown)]]
    return dropped, lines


def _schema(file: SourceFile) -> str:
    with suppress(DataError):  # removed or changed since it was read: the report does without
        return file.reader.schema(file.path)
    return ""
