"""Shard builder: the examples of a group of blocks to the rows of a shard.

    decoder-only      prompt [bos] + ids + [break]  target ids + [eos]
    encoder-decoder   prompt ids + [eos]            target ids + [eos]
    conversations     as their chat template writes them: see `conversation_rows`

The line break separates the prompt from its answer. A truncated target gets no eos, which would
teach the model to stop in mid-recipe.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from toque.data.prepare.conversation_rows import ConversationRow, ConversationRows
from toque.data.prepare.data_report import LOST, OWN, Excerpt, sampled
from toque.data.prepare.duplicates import NEAR, signatures
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.token_store import SPANS
from toque.data.tokenizer.codec import Codec, FamilyKind, prompt_bounds
from toque.errors import ConfigError, DataError
from toque.sources.records import Block, Example, RecordReader, examples_in, shortened

Ids = NDArray[np.uint32]
PIECES_PER_GROUP = 16  # consecutive pieces of a document that go to the same split
SHOWN_LINES = 10  # line numbers kept per reason and block, for the report
Rows = tuple["TokenRows", "TokenRows", NDArray[np.int64], NDArray[np.int64]]
"""Prompts and targets; of each row, the index of its example and its piece of a document."""


class BlockCounts(msgspec.Struct):
    """A block's counts of records."""

    path: str
    source: int
    read: int
    kept: int
    dropped: dict[str, int]
    lines: dict[str, list[int]]
    unused: dict[str, int] = {}  # fields that no example holds, with the records that fill them


class ShardBuilder:
    """Collects the examples of a group and turns them into rows."""

    def __init__(self, codec: Codec, settings: PrepareSettings, *, talks: bool = False) -> None:
        """`talks`: the store has conversations, in this group or another."""
        self._codec, self._talks = codec, talks
        self._settings = settings
        self._examples: list[Example] = []
        self._sources: list[int] = []
        self._records: list[int] = []  # ordinal of each example's record
        self._n_records = 0
        self._kept_records = 0
        self._blocks: list[BlockCounts] = []
        names = ("notes", "dropped", "unknown")
        self._counts: dict[str, Counter[str]] = {name: Counter() for name in names}
        self._lost: Counter[str] = Counter()
        self._excerpts: list[Excerpt] = []
        self._spans: dict[int, list[int]] = {}  # of conversations, by example
        # Text tokens that a side lost, by example; one that is cut has one row.
        self._cut: dict[str, dict[int, int]] = {"prompt": {}, "target": {}}

    def read(self, block: Block, reader: RecordReader) -> None:
        """Add a block's examples, checked against the reader's own counts."""
        given = examples_in(block, reader)
        _check_ids(block, given.examples, self._codec)
        each = [n for n in given.sizes if n]
        n_records = len(each)
        n_dropped, n_all = sum(map(len, given.dropped.values())), len(given.examples)
        # An error and no assert: readers are plugged in, and a wrong count would hide lost recipes.
        if given.read != given.kept + n_dropped or [n_records, sum(each)] != [given.kept, n_all]:
            raise DataError(
                f"The reader of {block.path} (lines from {block.first_line}) read {given.read} "
                f"records, kept {given.kept}, dropped {n_dropped} and gave examples of {n_records}"
                ": it lost count. This is a fault of the reader, not of the file."
            )
        self._examples += given.examples
        self._sources += [block.source] * len(given.examples)
        self._records += np.repeat(self._n_records + np.arange(n_records), each).tolist()
        self._n_records += n_records
        self._counts["notes"].update(given.notes)
        name = Path(block.path).name
        self._excerpts += [
            Excerpt(reason, f"{name}:{number}", shortened(given.texts[number]))
            for reason, numbers in given.dropped.items()
            for number in numbers
            if number in given.texts
        ]
        self._blocks.append(
            BlockCounts(
                path=block.path,
                source=block.source,
                read=given.read,
                kept=given.kept,
                dropped={reason: len(lines) for reason, lines in given.dropped.items()},
                lines={reason: lines[:SHOWN_LINES] for reason, lines in given.dropped.items()},
                unused=given.unused,
            )
        )

    def counts(self) -> dict[str, Any]:
        """The fields of a ShardResult that are known after `rows`."""
        return {
            "records": self._kept_records,
            "blocks": self._blocks,
            "lost_characters": dict(self._lost.most_common(100)),
            "excerpts": sampled(self._excerpts),
        } | {name: dict(sorted(counts.items())) for name, counts in self._counts.items()}

    def rows(self) -> dict[str, NDArray[Any]]:
        """Arrays to store, by file name."""
        talks = [i for i, example in enumerate(self._examples) if example.turns]
        pairs = [i for i, e in enumerate(self._examples) if not e.document and not e.turns]
        documents = [i for i, example in enumerate(self._examples) if example.document]
        if (pairs or talks) and self._settings.on_overlong == "split":
            held = "pairs of a prompt and a target: the second half of a recipe has no prompt"
            if not pairs:
                held = "conversations: the second half of an answer has no question"
            raise ConfigError(
                f"data.on_overlong is split, and the sources hold {held} of its own. Use "
                'truncate, drop or error, or "auto", which splits documents and truncates others.'
            )
        reasons: dict[int, str] = {}
        if (least := self._settings.min_quality) > 0:
            low = [e.columns.get("quality", 1.0) < least for e in self._examples]
            reasons = {i: f"quality below {least:g}" for i, is_low in enumerate(low) if is_low}
        made = self._pair_rows([i for i in pairs if i not in reasons], reasons)
        for of_kind, make in ((documents, self._document_rows), (talks, self._talk_rows)):
            if of_kind:
                more = make([i for i in of_kind if i not in reasons], reasons)
                made = _merged(made, more) if len(made[2]) else more
        prompt, target, of, part = made
        self._count_records(of, reasons)
        dtype = np.uint16 if self._codec.vocab_size <= 1 << 16 else np.uint32
        arrays: dict[str, NDArray[Any]] = {
            "prompt_tokens": prompt.tokens.astype(dtype),
            "prompt_ends": prompt.ends,
            "target_tokens": target.tokens.astype(dtype),
            "target_ends": target.ends,
        }
        if self._talks:
            spans = TokenRows.joined([np.array(self._spans.get(i, ()), np.uint32) for i in of])
            arrays |= {f"{SPANS}_tokens": spans.tokens, f"{SPANS}_ends": spans.ends}
        arrays |= self._columns(of, part)
        if self._settings.dedup == "near":
            starts = np.flatnonzero(arrays["starts_record"])
            # A record is compared by all of its tasks: one may ask the same of many records.
            records = [dict.fromkeys(rows.tolist()) for rows in np.split(of, starts)[1:]]
            arrays[NEAR] = signatures(
                ["\n".join(_words_of(self._examples[i]) for i in record) for record in records]
            )
        return arrays

    def _pair_rows(self, pairs: list[int], reasons: dict[int, str]) -> Rows:
        codec, settings = self._codec, self._settings
        prompts = self._encoded("prompt", [self._examples[i].prompt for i in pairs])
        targets = self._encoded("target", [self._examples[i].target for i in pairs])
        most_prompt, most_target = settings.limits
        begin, end = prompt_bounds(codec, settings.family_kind)
        prompt = wrap(prompts, limit=most_prompt, begin=begin, end=end, end_after_cut=True)
        target = wrap(targets, limit=most_target, begin=None, end=codec.eos_id, end_after_cut=False)
        keep = targets.lengths > 0
        index = np.array(pairs, np.int64)
        reasons.update(dict.fromkeys(index[~keep].tolist(), "no target"))
        for side, wrapped, limit in (
            ("prompt", prompt, most_prompt),
            ("target", target, most_target),
        ):
            over = wrapped.cut & keep
            if settings.on_overlong == "error" and over.any():
                self._raise_overlong(int(index[over][0]), side, limit)
            if settings.on_overlong == "drop":
                reason = f"{side} over {limit} tokens"
                reasons.update(dict.fromkeys(index[over].tolist(), reason))
                keep &= ~over
        for side, wrapped in (("prompt", prompt), ("target", target)):
            over = wrapped.cut & keep
            cut = zip(index[over].tolist(), wrapped.lost[over].tolist(), strict=True)
            self._cut[side].update(cut)
        of = index[keep]
        return prompt.side.select(keep), target.side.select(keep), of, np.zeros_like(of)

    def _document_rows(self, documents: list[int], reasons: dict[int, str]) -> Rows:
        settings = self._settings
        texts = self._encoded("target", [self._examples[i].target for i in documents])
        rows: list[tuple[Ids, Ids, int, int]] = []
        most_prompt, most_target = settings.limits
        limit = most_target + (most_prompt - 1) * (settings.family_kind == "encoder-decoder")
        for at, i in enumerate(documents):
            example = self._examples[i]
            ids = ids_of(example, self._codec) if example.ids else texts.row(at)
            if not len(ids):
                reasons[i] = "no target"
                continue
            over = len(ids) + example.ends > limit
            if over and settings.on_overlong == "error":
                self._raise_overlong(i, "target", limit)
            if over and settings.on_overlong == "drop":
                reasons[i] = f"target over {limit} tokens"
                continue
            cuts = pieces(
                ids,
                family_kind=settings.family_kind,
                max_prompt=most_prompt,
                max_target=most_target,
                bos_id=self._codec.bos_id,
                eos_id=self._codec.eos_id,
                whole=example.ends,
            )
            n_pieces = 1 if settings.on_overlong == "truncate" else None
            rows += [(*sides, i, part) for part, sides in enumerate(islice(cuts, n_pieces))]
            if over and n_pieces:
                self._cut["target"][i] = max(0, len(ids) - limit)
        prompts, targets = [row[0] for row in rows], [row[1] for row in rows]
        of, parts = (np.array([row[field] for row in rows], np.int64) for field in (2, 3))
        return TokenRows.joined(prompts), TokenRows.joined(targets), of, parts

    def _talk_rows(self, talks: list[int], reasons: dict[int, str]) -> Rows:
        made, rows = ConversationRows(self._codec, self._settings), list[ConversationRow]()
        kept: list[int] = []
        for i in talks:
            row = made.row(self._examples[i].turns, self._counts["notes"])
            if isinstance(row, str):
                reasons[i] = row
                continue
            kept.append(i)
            rows.append(row)
            self._spans[i] = row.spans
            if row.lost:
                self._cut["target"][i] = row.lost
        of = np.array(kept, np.int64)
        prompts, targets = [row.prompt for row in rows], [row.target for row in rows]
        return TokenRows.joined(prompts), TokenRows.joined(targets), of, np.zeros_like(of)

    def _encoded(self, side: str, texts: list[str]) -> TokenRows:
        encoded = self._codec.encode_flat(texts)
        unknown, notes = self._counts["unknown"], self._counts["notes"]
        unknown[f"{side}_tokens"] += len(encoded.flat)
        if self._codec.unk_id is not None:
            unknown[side] += int((encoded.flat == self._codec.unk_id).sum())
            self._lost.update(encoded.lost)
        if encoded.disagreed:
            notes["texts tokenised the long way: the fast one gave other ids"] += len(texts)
        return TokenRows(encoded.flat, encoded.ends)

    def _raise_overlong(self, index: int, side: str, limit: int) -> None:
        example = self._examples[index]
        text = (example.prompt or example.target)[:80].replace("\n", " ")
        raise DataError(
            f'The {side} of "{text}…" has more than {limit} tokens, and data.on_overlong is error. '
            f"Raise data.max_{side}_tokens, or let data.on_overlong be truncate or drop."
        )

    def _count_records(self, of: NDArray[np.int64], reasons: dict[int, str]) -> None:
        """A record is dropped when none of its examples is left; its first reason counts."""
        kept = {self._records[i] for i in of.tolist()}
        self._kept_records = len(kept)
        why: dict[int, str] = {}
        for i in sorted(reasons):
            record, example = self._records[i], self._examples[i]
            if record in kept:
                self._counts["notes"][f"examples left out: {reasons[i]}"] += 1
            elif record not in why:
                why[record] = reasons[i]
                text, prompt = shortened(example.target), shortened(example.prompt)
                self._excerpts.append(Excerpt(reasons[i], "", text, prompt))
        self._counts["dropped"].update(why.values())

    def _columns(self, of: NDArray[np.int64], part: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
        chosen = [self._examples[i] for i in of.tolist()]
        records = np.array(self._records, np.int64)[of]
        groups = (part // PIECES_PER_GROUP).tolist()
        keys = [
            xxhash.xxh3_64_intdigest(struct.pack("<QQ", e.key, group)) if e.document else e.key
            for e, group in zip(chosen, groups, strict=True)
        ]
        columns: dict[str, NDArray[Any]] = {
            "key": np.array(keys, np.uint64),
            "title_key": np.array([e.title_key for e in chosen], np.uint64),
            "record_key": np.array([e.record_key for e in chosen], np.uint64),
            "source": np.array(self._sources, np.uint16)[of],
            "task": np.array([e.task for e in chosen], np.uint8),
            "starts_record": (np.diff(records, prepend=-1) != 0).astype(np.uint8),
        }
        for name in sorted({n for e in chosen for n in e.columns} - OWN):
            values = [e.columns.get(name, np.nan) for e in chosen]
            columns[name] = np.array(values, np.float32)
        for side, lost in self._cut.items():
            if lost:
                columns[LOST[side]] = np.array([lost.get(i, np.nan) for i in of], np.float32)
        return columns


def _merged(some: Rows, others: Rows) -> Rows:
    """Rows of two kinds of examples of one group, merged in the order of the examples."""
    of, part = (np.concatenate([some[i], others[i]]) for i in (2, 3))
    order = np.argsort(of, kind="stable")

    def merged(a: TokenRows, b: TokenRows) -> TokenRows:
        rows = [*np.split(a.tokens, a.ends[:-1]), *np.split(b.tokens, b.ends[:-1])]
        return TokenRows.joined([rows[i] for i in order])

    return merged(some[0], others[0]), merged(some[1], others[1]), of[order], part[order]


def _words_of(example: Example) -> str:
    """Text by which an example is compared; of a token file, which has no words, its ids."""
    if example.ids:
        return " ".join(map(str, np.frombuffer(example.ids, "<u4").tolist()))
    return f"{example.prompt}\n{example.target}"


def _check_ids(block: Block, examples: list[Example], codec: Codec) -> None:
    for document, example in enumerate(examples, block.first_line):
        most = int(np.frombuffer(example.ids, "<u4").max()) if example.ids else 0
        if most >= codec.vocab_size:
            raise DataError(
                f"{block.path} holds the token id {most:,} (document {document:,}), and the "
                f"tokenizer {codec.name} has only the ids 0 to {codec.vocab_size - 1:,}. A token "
                "file can only be read with the tokenizer it was written with: name that one in "
                "model.tokenizer, or prepare the texts themselves."
            )


def ids_of(example: Example, codec: Codec) -> Ids:
    """An example's ids without bos and eos, which `pieces` adds."""
    ids = np.frombuffer(example.ids, "<u4").astype(np.uint32)
    if len(ids) and codec.bos_id is not None and ids[0] == codec.bos_id:
        ids = ids[1:]
    if len(ids) and example.ends and ids[-1] == codec.eos_id:
        ids = ids[:-1]
    return ids


@dataclass(frozen=True)
class TokenRows:
    """Rows of one side, concatenated: row i is tokens[ends[i - 1] : ends[i]]."""

    tokens: Ids
    ends: NDArray[np.int64]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens in each row."""
        return np.diff(self.ends, prepend=0)

    def select(self, keep: NDArray[np.bool_]) -> TokenRows:
        """The rows where `keep` is true."""
        lengths = self.lengths
        return TokenRows(self.tokens[np.repeat(keep, lengths)], np.cumsum(lengths[keep]))

    def row(self, index: int) -> Ids:
        """One row; a view."""
        return self.tokens[int(self.ends[index - 1]) if index else 0 : int(self.ends[index])]

    @classmethod
    def joined(cls, rows: list[Ids]) -> TokenRows:
        """Side made from a list of rows."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return cls(np.concatenate([np.empty(0, np.uint32), *rows]), np.cumsum(lengths))


@dataclass(frozen=True)
class Wrapped:
    """Rows with their special tokens."""

    side: TokenRows
    cut: NDArray[np.bool_]  # rows that lost tokens
    lost: NDArray[np.int64]  # text tokens each row lost


def wrap(
    side: TokenRows, *, limit: int, begin: int | None, end: int | None, end_after_cut: bool
) -> Wrapped:
    """Put `begin` before and `end` after every row, and cut rows to `limit` tokens."""
    n_begin, n_end = int(begin is not None), int(end is not None)
    lengths = side.lengths
    cut = lengths + n_begin + n_end > limit
    room_when_cut = limit - n_begin - (n_end if end_after_cut else 0)
    kept = np.where(cut, np.minimum(lengths, room_when_cut), lengths)
    has_end = np.full(len(lengths), bool(n_end)) & (~cut | end_after_cut)
    out_lengths = n_begin + kept + has_end
    out_ends = np.cumsum(out_lengths)
    starts = out_ends - out_lengths
    tokens = np.empty(int(out_ends[-1]) if len(out_ends) else 0, np.uint32)
    is_text = np.ones(len(tokens), np.bool_)
    if begin is not None:
        is_text[starts] = False
        tokens[starts] = begin
    if end is not None:
        is_text[out_ends[has_end] - 1] = False
        tokens[out_ends[has_end] - 1] = end
    text = side.tokens
    if cut.any():  # the first `kept` tokens of each row are taken
        parts = np.stack([kept, lengths - kept], axis=1).ravel()
        text = text[np.repeat(np.tile([True, False], len(kept)), parts)]
    tokens[is_text] = text
    # A row that lost only its eos counts as cut too.
    return Wrapped(TokenRows(tokens, out_ends), cut, lengths - kept)


def pieces(
    ids: Ids,
    *,
    family_kind: FamilyKind,
    max_prompt: int,
    max_target: int,
    bos_id: int | None,
    eos_id: int,
    whole: bool,
) -> Iterator[tuple[Ids, Ids]]:
    """(prompt, target) pieces of a document; `whole` when `ids` reach its true end.

    Decoder-only: every token is a target once. The prompt is [bos] for the first piece and then the
    last token of the piece before. With max_target 3 and ids 5 6 7 8:

        [bos] -> 5 6 7        [7] -> 8 eos

    Encoder-decoder: prefix language modelling (Raffel et al. 2020, section 3.2.1 and figure 4):
    each run of max_prompt - 1 + max_target tokens gives its beginning as the prompt; a shorter
    last run is divided in the same proportion.
    """
    tail = np.array([eos_id] if whole else [], np.uint32)
    text = np.concatenate([ids, tail])
    if family_kind == "decoder":
        before = np.array([] if bos_id is None else [bos_id], np.uint32)
        for at in range(0, len(text), max_target):
            piece = text[at : at + max_target]
            yield before, piece
            before = piece[-1:]
        return
    prefix = max_prompt - 1
    end = np.array([eos_id], np.uint32)
    for at in range(0, len(text), prefix + max_target):
        piece = text[at : at + prefix + max_target]
        divide = min(len(piece) - 1, prefix * len(piece) // (prefix + max_target))
        yield np.concatenate([piece[:divide], end]), piece[divide:]
