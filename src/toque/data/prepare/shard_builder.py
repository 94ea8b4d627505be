"""Shard builder: turns the examples of a group of blocks into the rows of a shard.

    decoder-only      prompt [bos] + ids + [break]  target ids + [eos]
    encoder-decoder   prompt ids + [eos]            target ids + [eos]
    conversations     text of the chat template, see `conversation_rows`

The line break separates a prompt from its answer. A truncated target has no eos, because an eos
would teach the model to stop in the middle of a recipe.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.array_types import Ints
from toque.data.prepare.conversation_rows import ConversationRow, ConversationRows
from toque.data.prepare.data_report import (
    BOOKKEEPING,
    LOST,
    Excerpt,
    sample_excerpts,
)
from toque.data.prepare.duplicates import NEAR, Signatures, signatures
from toque.data.prepare.preference_rows import (
    SAME_TOKENS,
    has_pairs,
    mark_complete_pairs,
    mark_equal_pairs,
)
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.prepare.token_rows import ExampleRows, Ids, TokenRows, pieces, wrap
from toque.data.store.token_store import SPANS
from toque.data.tokenizer.codec import Codec, prompt_bounds
from toque.errors import ConfigError, DataError
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    RecordReader,
    examples_in,
    shortened,
)

Arrays = dict[str, NDArray[Any]]  # arrays of a shard by file name
PIECES_PER_GROUP = 16  # consecutive pieces of a document in the same split
MAX_LINES = 10  # line numbers per reason and block for the report
_MAX_LOST = 100  # maximum number of distinct unknown characters that are counted
_SHOWN_CHARACTERS = 80  # maximum number of characters of a text in a message


class BlockCounts(msgspec.Struct):
    """Counts of the records of a block."""

    path: str
    source: int
    read: int
    kept: int
    dropped: dict[str, int]
    lines: dict[str, list[int]]
    unused: dict[str, int] = {}  # records with a field that no example uses, by field


class ShardBuilder:
    """Builder of a shard's arrays from the examples of a group of blocks."""

    def __init__(
        self, codec: Codec, settings: PrepareSettings, *, talks: bool = False
    ) -> None:
        """Create a builder. `talks` is whether the store has conversations, in any group."""
        self._codec = codec
        self._settings = settings
        self._talks = talks
        self._examples: list[Example] = []
        self._sources: list[int] = []  # source of each example
        self._records: list[int] = []  # index of each example's record
        self._n_records = 0
        self._blocks: list[BlockCounts] = []
        names = ("notes", "dropped", "unknown")
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._lost: Counter[str] = Counter()  # counts of characters without a stand-in
        self._excerpts: list[Excerpt] = []
        # Reasons for leaving out examples, by example.
        self._reasons: dict[int, str] = {}
        self._spans: dict[int, list[int]] = {}  # spans of conversations, by example
        # Number of tokens cut from a side, by example.
        self._cut: dict[str, dict[int, int]] = {"prompt": {}, "target": {}}

    def add_block(self, block: Block, reader: RecordReader) -> None:
        """Add the examples of a block, and check the reader's counts."""
        parsed = examples_in(block, reader)
        _check_ids(block, parsed.examples, self._codec)
        _check_counts(block, parsed)
        self._examples += parsed.examples
        self._sources += repeat(block.source, len(parsed.examples))
        sizes = [n for n in parsed.sizes if n]  # number of examples per kept record
        records = self._n_records + np.arange(len(sizes))
        self._records += np.repeat(records, sizes).tolist()
        self._n_records += len(sizes)
        self._counts["notes"].update(parsed.notes)
        name = Path(block.path).name
        self._excerpts += [
            Excerpt(reason, f"{name}:{number}", shortened(parsed.texts[number]))
            for reason, numbers in parsed.dropped.items()
            for number in numbers
            if number in parsed.texts
        ]
        dropped = parsed.dropped.items()
        self._blocks.append(
            BlockCounts(
                path=block.path,
                source=block.source,
                read=parsed.read,
                kept=parsed.kept,
                dropped={reason: len(lines) for reason, lines in dropped},
                lines={reason: lines[:MAX_LINES] for reason, lines in dropped},
                unused=parsed.unused,
            )
        )

    def build(self) -> tuple[Arrays, dict[str, Any]]:
        """Make the arrays of the shard, by file name, and the counts of its `ShardResult`."""
        rows = self._example_rows()
        arrays = self._make_arrays(rows)
        kept_records = {self._records[i] for i in rows.example.tolist()}
        self._note_left_out(kept_records)
        counts: dict[str, Any] = {
            "records": len(kept_records),
            "blocks": self._blocks,
            "lost_characters": dict(self._lost.most_common(_MAX_LOST)),
            "excerpts": sample_excerpts(self._excerpts),
        }
        for name, counter in self._counts.items():
            counts[name] = dict(sorted(counter.items()))
        return arrays, counts

    def _make_arrays(self, rows: ExampleRows) -> Arrays:
        """Make the arrays of the rows, by file name."""
        dtype = np.uint16 if self._codec.vocab_size <= 1 << 16 else np.uint32
        arrays: Arrays = {
            "prompt_tokens": rows.prompt.tokens.astype(dtype),
            "prompt_ends": rows.prompt.ends,
            "target_tokens": rows.target.tokens.astype(dtype),
            "target_ends": rows.target.ends,
        }
        if self._talks:
            spans = [np.array(self._spans.get(i, ()), np.uint32) for i in rows.example]
            joined = TokenRows.concatenate(spans)
            arrays |= {f"{SPANS}_tokens": joined.tokens, f"{SPANS}_ends": joined.ends}
        arrays |= self._columns(rows)
        if self._settings.dedup == "near":
            starts = np.flatnonzero(arrays["starts_record"])
            arrays[NEAR] = self._record_signatures(np.split(rows.example, starts)[1:])
        return arrays

    def _record_signatures(self, records: list[Ints]) -> Signatures:
        """Compute the signatures of records from the examples of their rows.

        Records are compared by the texts of all tasks, because a task may have the same prompt for
        many records.
        """
        texts = []
        for rows in records:
            examples = dict.fromkeys(rows.tolist())  # a document may have many rows
            texts.append("\n".join(_text_of(self._examples[i]) for i in examples))
        return signatures(texts)

    def _example_rows(self) -> ExampleRows:
        """Make the rows of all examples that are in use."""
        self._refuse_split()
        min_quality = self._settings.min_quality
        if min_quality > 0:
            for i, example in enumerate(self._examples):
                if example.columns.get("quality", 1.0) < min_quality:
                    self._reasons[i] = f"quality below {min_quality:g}"

        by_kind: dict[str, list[int]] = defaultdict(list)
        for i, example in enumerate(self._examples):
            if i not in self._reasons:
                by_kind[_kind_of(example)].append(i)
        rows = self._pair_rows(by_kind["pair"])
        if by_kind["document"]:
            rows = rows.merge(self._document_rows(by_kind["document"]))
        if by_kind["conversation"]:
            rows = rows.merge(self._talk_rows(by_kind["conversation"]))
        return self._complete_pairs(rows) if has_pairs(self._examples) else rows

    def _complete_pairs(self, rows: ExampleRows) -> ExampleRows:
        """Leave out preference pairs with an unusable answer, or answers with equal tokens."""
        rows = rows.select(mark_complete_pairs(rows.example))
        is_equal = mark_equal_pairs(rows.target)
        self._leave_out(rows.example[is_equal].tolist(), SAME_TOKENS)
        return rows.select(~is_equal)

    def _refuse_split(self) -> None:
        """Refuse `on_overlong=split` if there are examples that are not documents."""
        kinds = {_kind_of(example) for example in self._examples} - {"document"}
        if not kinds or self._settings.on_overlong != "split":
            return
        name = "conversations"
        problem = "answer would have no question"
        if "pair" in kinds:
            name = "prompts and targets"
            problem = "target would have no prompt"
        raise ConfigError(
            f"data.on_overlong=split applies only to documents, but the sources have {name}: the "
            f'second half of a long {problem}. Use truncate, drop or error, or "auto", which '
            "splits only documents."
        )

    def _pair_rows(self, pairs: list[int]) -> ExampleRows:
        """Make the rows of prompts with targets."""
        codec = self._codec
        prompts = self._encode("prompt", [self._examples[i].prompt for i in pairs])
        targets = self._encode("target", [self._examples[i].target for i in pairs])
        max_prompt, max_target = self._settings.limits
        begin, end = prompt_bounds(codec, self._settings.family_kind)
        prompt = wrap(
            prompts, limit=max_prompt, begin=begin, end=end, end_after_cut=True
        )
        target = wrap(
            targets, limit=max_target, begin=None, end=codec.eos_id, end_after_cut=False
        )

        index = np.array(pairs, np.int64)
        in_use = targets.lengths > 0
        self._leave_out(index[~in_use].tolist(), "no target")
        for side, wrapped, limit in (
            ("prompt", prompt, max_prompt),
            ("target", target, max_target),
        ):
            is_over = wrapped.cut & in_use
            if self._leave_out_overlong(index[is_over].tolist(), side, limit):
                in_use &= ~is_over
        # Now `in_use` is final, so count the cuts of its rows.
        for side, wrapped in (("prompt", prompt), ("target", target)):
            is_cut = wrapped.cut & in_use
            lost = wrapped.lost[is_cut].tolist()
            self._cut[side].update(zip(index[is_cut].tolist(), lost, strict=True))

        example = index[in_use]
        return ExampleRows(
            prompt.side.select(in_use),
            target.side.select(in_use),
            example,
            np.zeros_like(example),
        )

    def _document_rows(self, documents: list[int]) -> ExampleRows:
        """Make the rows of the pieces of documents."""
        settings = self._settings
        texts = self._encode("target", [self._examples[i].target for i in documents])
        max_prompt, max_target = settings.limits
        max_piece = max_target
        if settings.family_kind == "encoder-decoder":
            max_piece += max_prompt - 1
        max_pieces = 1 if settings.on_overlong == "truncate" else None
        prompts: list[Ids] = []
        targets: list[Ids] = []
        index: list[int] = []
        parts: list[int] = []
        for i, text_ids in zip(documents, texts.split(), strict=True):
            example = self._examples[i]
            ids = ids_of(example, self._codec) if example.ids else text_ids
            if not len(ids):
                self._reasons[i] = "no target"
                continue
            is_over = len(ids) + example.ends > max_piece
            if is_over and self._leave_out_overlong([i], "target", max_piece):
                continue

            sides = pieces(
                ids,
                family_kind=settings.family_kind,
                max_prompt=max_prompt,
                max_target=max_target,
                bos_id=self._codec.bos_id,
                eos_id=self._codec.eos_id,
                ends=example.ends,
            )
            for part, (prompt, target) in enumerate(islice(sides, max_pieces)):
                prompts.append(prompt)
                targets.append(target)
                index.append(i)
                parts.append(part)
            if is_over and max_pieces:
                self._cut["target"][i] = max(0, len(ids) - max_piece)
        return ExampleRows(
            TokenRows.concatenate(prompts),
            TokenRows.concatenate(targets),
            np.array(index, np.int64),
            np.array(parts, np.int64),
        )

    def _talk_rows(self, talks: list[int]) -> ExampleRows:
        """Make the rows of conversations."""
        conversation_rows = ConversationRows(self._codec, self._settings)
        notes = self._counts["notes"]
        rows: dict[int, ConversationRow] = {}
        for i in talks:
            row = conversation_rows.encode(self._examples[i].turns, notes)
            if isinstance(row, str):
                self._reasons[i] = row
                continue
            rows[i] = row
            self._spans[i] = row.spans
            if row.lost:
                self._cut["target"][i] = row.lost
        example = np.array(list(rows), np.int64)
        return ExampleRows(
            TokenRows.concatenate([row.prompt for row in rows.values()]),
            TokenRows.concatenate([row.target for row in rows.values()]),
            example,
            np.zeros_like(example),
        )

    def _encode(self, side: str, texts: list[str]) -> TokenRows:
        """Encode the texts of one side, and count their unknown tokens."""
        encoded = self._codec.encode_flat(texts)
        unknown = self._counts["unknown"]
        unknown[f"{side}_tokens"] += len(encoded.flat)
        if self._codec.unk_id is not None:
            unknown[side] += int((encoded.flat == self._codec.unk_id).sum())
            self._lost.update(encoded.lost)
        if encoded.disagreed:
            note = "texts encoded without the word cache, which gave other ids"
            self._counts["notes"][note] += len(texts)
        return TokenRows(encoded.flat, encoded.ends)

    def _leave_out(self, examples: list[int], reason: str) -> None:
        self._reasons.update(dict.fromkeys(examples, reason))

    def _leave_out_overlong(self, examples: list[int], side: str, limit: int) -> bool:
        """Leave out examples over a limit if `on_overlong` is drop. Return True in this case.

        Raises:
            DataError: `on_overlong` is error.
        """
        on_overlong = self._settings.on_overlong
        if on_overlong == "error" and examples:
            example = self._examples[examples[0]]
            text = (example.prompt or example.target)[:_SHOWN_CHARACTERS]
            text = text.replace("\n", " ")
            raise DataError(
                f'The {side} of "{text}…" has more than {limit} tokens, and data.on_overlong is '
                f"error. Raise data.max_{side}_tokens, or set data.on_overlong to truncate or drop."
            )
        if on_overlong != "drop":
            return False
        self._leave_out(examples, f"{side} over {limit} tokens")
        return True

    def _note_left_out(self, kept_records: set[int]) -> None:
        """Count the examples left out of kept records, and the dropped records by reason.

        A record without an example in use is dropped for the reason that applies to its first
        example. Excerpts from such records are added for the report.
        """
        reason_of_record: dict[int, str] = {}
        for i, reason in sorted(self._reasons.items()):
            record = self._records[i]
            example = self._examples[i]
            if record in kept_records:
                self._counts["notes"][f"examples left out: {reason}"] += 1
            elif record not in reason_of_record:
                reason_of_record[record] = reason
                text = shortened(example.target)
                prompt = shortened(example.prompt)
                self._excerpts.append(Excerpt(reason, "", text, prompt))
        self._counts["dropped"].update(reason_of_record.values())

    def _columns(self, rows: ExampleRows) -> Arrays:
        """Make the per-example columns of the rows, by name."""
        examples = [self._examples[i] for i in rows.example.tolist()]
        records = np.array(self._records, np.int64)[rows.example]
        groups = (rows.part // PIECES_PER_GROUP).tolist()
        keys = list(map(_row_key, examples, groups))
        columns: Arrays = {
            "key": np.array(keys, np.uint64),
            "title_key": np.array([e.title_key for e in examples], np.uint64),
            "record_key": np.array([e.record_key for e in examples], np.uint64),
            "source": np.array(self._sources, np.uint16)[rows.example],
            "task": np.array([e.task for e in examples], np.uint8),
            "starts_record": (np.diff(records, prepend=-1) != 0).astype(np.uint8),
        }
        for name in sorted({n for e in examples for n in e.columns} - BOOKKEEPING):
            values = [e.columns.get(name, np.nan) for e in examples]
            columns[name] = np.array(values, np.float32)
        for side, lost in self._cut.items():
            if lost:
                values = [lost.get(i, np.nan) for i in rows.example]
                columns[LOST[side]] = np.array(values, np.float32)
        return columns


def _kind_of(example: Example) -> str:
    """Return the kind of an example: document, conversation or pair."""
    if example.document:
        return "document"
    return "conversation" if example.turns else "pair"


def _row_key(example: Example, group: int) -> int:
    """Compute the key that decides the split of a row. `group` is the index of its group of pieces.

    Pieces of a document in different groups may be in different splits.
    """
    if not example.document:
        return example.key
    return xxhash.xxh3_64_intdigest(struct.pack("<QQ", example.key, group))


def _text_of(example: Example) -> str:
    """Return the text for comparisons with other records. Examples of token files have ids only."""
    if example.ids:
        return " ".join(map(str, np.frombuffer(example.ids, "<u4").tolist()))
    return f"{example.prompt}\n{example.target}"


def _check_counts(block: Block, parsed: BlockExamples) -> None:
    """Check that the counts of a reader agree with its examples.

    This is not an assertion, because readers may be plugins, and a wrong count would hide lost
    recipes.
    """
    n_dropped = sum(map(len, parsed.dropped.values()))
    n_records = sum(size > 0 for size in parsed.sizes)
    has_all_records = parsed.read == parsed.kept + n_dropped
    has_all_examples = sum(parsed.sizes) == len(parsed.examples)
    if not has_all_records or not has_all_examples or parsed.kept != n_records:
        raise DataError(
            f"The reader of {block.path} (lines from {block.first_line}) has wrong counts: it read "
            f"{parsed.read} records, kept {parsed.kept}, dropped {n_dropped} and returned examples "
            f"from {n_records} records. This is a bug in the reader, not in the file."
        )


def _check_ids(block: Block, examples: list[Example], codec: Codec) -> None:
    """Refuse ids that are not in the vocabulary."""
    for document, example in enumerate(examples, block.first_line):
        max_id = int(np.frombuffer(example.ids, "<u4").max()) if example.ids else 0
        if max_id >= codec.vocab_size:
            raise DataError(
                f"{block.path} has the token id {max_id:,} (document {document:,}), but the "
                f"tokenizer {codec.name} has only the ids 0 to {codec.vocab_size - 1:,}. A token "
                "file needs the tokenizer that wrote it: set model.tokenizer to that tokenizer, or "
                "prepare the original texts."
            )


def ids_of(example: Example, codec: Codec) -> Ids:
    """Read an example's ids without its bos and eos, which `pieces` adds."""
    ids = np.frombuffer(example.ids, "<u4").astype(np.uint32)
    if len(ids) and codec.bos_id is not None and ids[0] == codec.bos_id:
        ids = ids[1:]
    if len(ids) and example.ends and ids[-1] == codec.eos_id:
        ids = ids[:-1]
    return ids
