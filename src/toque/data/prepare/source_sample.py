"""Sample of the sources, from which the tokenizer and the limits on lengths are learnt.

A limit is the 99th percentile of a sample's lengths, rounded up, within the model's positions. If
these are too few for both sides, they are divided so that the fewest records of the sample are cut.
With `max_examples` the sample is of about what the store will hold, so that a trial reads no more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.conversation_rows import ConversationRows
from toque.data.prepare.data_report import ENCODING_HINT, reasons_in_words
from toque.data.prepare.shard_builder import ids_of
from toque.data.prepare.shards import in_turns
from toque.data.prepare.store_plan import USUAL_PROMPT, USUAL_TARGET, PrepareSettings
from toque.data.tokenizer.codec import Codec, FamilyKind, prompt_bounds
from toque.data.tokenizer.tokenizer_training import Kind, train_codec
from toque.errors import DataError
from toque.sources.decompress import CHUNK_BYTES
from toque.sources.records import (
    NOT_UTF_8,
    Block,
    BlockExamples,
    Example,
    RecordReader,
    examples_in,
)
from toque.sources.source_files import SourceFile, blocks_of

MAX_EXAMPLES = 20_000
MAX_CHARACTERS = 8_000_000
_PLACES = 3
_BLOCKS = 12  # blocks that the sample is spread over, more where they are small
SAMPLED = 6_000  # examples measured, spread evenly over the sources
READ_BYTES, MOST_PLACES = 16 << 20, 400  # bytes parsed for it, about, and blocks
_TRIED_BYTES = 1 << 20  # bytes parsed to find how many hold `max_examples`
PERCENTILE = 99
STEP = 64  # limits are multiples of this, so that a little more data does not change them
MOST = 2_048  # the largest limit that is chosen: longer rows take memory that nobody asked for
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Tokens of sampled examples, with what begins and ends them."""

    pairs: Lengths  # [2, n] prompts and targets
    talks: Lengths  # [2, n] the same of conversations
    documents: Lengths  # [n] those that are not split

    @property
    def sides(self) -> Lengths:
        """Prompts and targets of all, [2, n]; a decoder's document is asked with one token."""
        documents = np.stack([np.ones_like(self.documents), self.documents])
        return np.concatenate([self.pairs, self.talks, documents], axis=1)


def learn_tokenizer(
    files: Sequence[SourceFile],
    *,
    vocab_size: int,
    family_kind: FamilyKind,
    max_examples: int | None = None,
) -> Codec:
    """Train a tokenizer on examples spread over the sources: BPE for a decoder, else Unigram."""
    dropped: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    places = _places(files, _BLOCKS * CHUNK_BYTES, MAX_EXAMPLES)
    chosen = list(_spread_blocks(files, places, _first_bytes(files, max_examples)))
    texts = list(_sample(chosen, dropped, lines))
    if not texts:
        hint = f" {ENCODING_HINT}" if 2 * dropped[NOT_UTF_8] > dropped.total() else ""
        raise DataError(
            f"No tokenizer can be learnt: none of the {len(files)} source files gives an example. "
            f"Of the records looked at: {reasons_in_words(dropped, lines)}.{hint} Look at a line "
            "of them, and at the format of data.sources."
        )
    kind: Kind = "bpe" if family_kind == "decoder" else "unigram"
    return train_codec(texts, vocab_size=vocab_size, kind=kind)


def _sample(
    chosen: Sequence[tuple[Block, RecordReader]],
    dropped: Counter[str],
    lines: dict[str, list[str]],
) -> Iterator[str]:
    """Prompts and targets of the sample; refused records are counted in `dropped`, by reason."""
    n_bytes = sum(len(block.payload) for block, _ in chosen)
    for block, reader in chosen:
        found = examples_in(block, reader)
        for reason, numbers in found.dropped.items():
            dropped[reason] += len(numbers)
            places = lines.setdefault(reason, [])
            places += [f"{Path(block.path).name}:{n}" for n in numbers[: _PLACES - len(places)]]
        n: float = len(chosen)
        if n > _BLOCKS:  # of many a long one gives more, by how many of its size the sample is
            n = n_bytes / max(1, len(block.payload))
        characters = int(MAX_CHARACTERS // n)
        every = int(-(-len(found.examples) * n // MAX_EXAMPLES)) or 1
        for example in every_nth_record(found, every):
            for text in (example.prompt, example.target):
                yield text[: max(0, characters)]
                characters -= len(text)


def every_nth_record(found: BlockExamples, n: int) -> Iterator[Example]:
    """All examples of one record in `n`, from the first on; every n-th one might skip a task."""
    return chain.from_iterable(islice(found.by_record, 0, None, n))


def _first_bytes(files: Sequence[SourceFile], max_examples: int | None) -> int | None:
    """Plain bytes of the first blocks in turn that hold about so many examples; None for all."""
    if max_examples is None:
        return None
    n_bytes, found = 0, 0
    for block, reader in _read_in_turns(files):
        n_bytes += len(block.payload)
        found += len(examples_in(block, reader).examples)
        if found >= max_examples:
            return n_bytes
        if n_bytes >= _TRIED_BYTES:
            break
    return n_bytes * max_examples // max(1, found)


def _places(files: Sequence[SourceFile], n_bytes: int, most: int) -> int:
    """Number of blocks that hold about so many bytes: more where files are small, as pages are."""
    of_a_file = sum(file.plain_bytes for file in files) // max(1, len(files))
    return min(most, n_bytes // max(1, min(CHUNK_BYTES, of_a_file)))


def _read_in_turns(files: Sequence[SourceFile]) -> Iterator[tuple[Block, RecordReader]]:
    readers = {(file.source, file.name): file.reader for file in files}
    return ((block, readers[block.source, block.path]) for block in in_turns(files))


def _spread_blocks(
    files: Sequence[SourceFile], n: int, first_bytes: int | None
) -> Iterator[tuple[Block, RecordReader]]:
    """The blocks that hold one of `n` evenly spaced positions of the first bytes, or of all."""
    total = sum(file.plain_bytes for file in files)
    blocks: Iterator[tuple[Block, RecordReader]]
    if first_bytes is None:
        blocks = ((block, file.reader) for file in files for block in blocks_of(file))
    else:
        total, blocks = max(1, min(total, first_bytes)), _read_in_turns(files)
    at, wanted = 0, 0
    for block, reader in blocks:
        at += len(block.payload)
        if at * n > wanted * total:
            yield block, reader
            wanted = at * n // total + 1
        if first_bytes is not None and at >= total:
            return


class ChosenLimits(NamedTuple):
    """Limits on lengths, chosen from a sample of the sources."""

    settings: PrepareSettings  # with the limits that were open
    sentences: list[str]  # one for each limit that was chosen
    tokens_each: float | None
    """Tokens of a sampled prompt with its target, or of a conversation, once the limits cut them;
    None if the sample has neither."""


def choose_limits(
    files: Sequence[SourceFile],
    codec: Codec,
    settings: PrepareSettings,
    *,
    percentile: int = PERCENTILE,
) -> ChosenLimits:
    """Choose the limits that the settings leave open.

    `percentile` % of the sample fit in them; of all of it, up to the model's positions.
    """
    sample = _measured(files, codec, settings)
    most = settings.room or MOST if percentile == 100 else MOST
    prompts = np.concatenate([sample.pairs[0], sample.talks[0]])
    wished = tuple(
        _wish(lengths, usual, percentile, most)
        for lengths, usual in ((prompts, USUAL_PROMPT), (sample.sides[1], USUAL_TARGET))
    )
    prompt = settings.max_prompt_tokens or wished[0]
    target = settings.max_target_tokens or wished[1]
    if settings.room is not None:
        prompt, target = _within(prompt, target, settings, sample.sides)
    targets = np.concatenate([sample.pairs[1], sample.documents])
    sentences = [
        _sentence(side, lengths, limit, usual, wish, percentile)
        for side, lengths, limit, usual, wish in (
            ("prompt", sample.pairs[0], prompt, USUAL_PROMPT, wished[0]),
            ("target", targets, target, USUAL_TARGET, wished[1]),
        )
        if f"max_{side}_tokens" in settings.open_limits and len(lengths)
    ]
    rows, both = sample.talks.sum(axis=0), prompt + target
    if len(rows):
        wish = both if settings.room != both else _wish(rows, both, percentile, 2 * most)
        usual = USUAL_PROMPT + USUAL_TARGET
        sentences.append(_sentence("conversation", rows, both, usual, wish, percentile))
    cut_pairs = np.minimum(sample.pairs, [[prompt], [target]]).sum(axis=0)
    cut = np.concatenate([cut_pairs, np.minimum(rows, both)])
    return ChosenLimits(
        replace(settings, max_prompt_tokens=prompt, max_target_tokens=target),
        sentences,
        float(cut.mean()) if len(cut) else None,
    )


def _measured(files: Sequence[SourceFile], codec: Codec, settings: PrepareSettings) -> Sample:
    """Tokens of each sampled prompt and target, with what begins and ends them."""
    total, places = sum(file.plain_bytes for file in files), MOST_PLACES
    first_bytes = _first_bytes(files, settings.max_examples)
    if (first_bytes or total) > READ_BYTES:
        places = _places(files, READ_BYTES, MOST_PLACES)
    chosen = list(_spread_blocks(files, places, first_bytes))
    around = sum(i is not None for i in prompt_bounds(codec, settings.family_kind))
    splits = settings.on_overlong in ("auto", "split")
    none = np.empty((2, 0), np.int64)
    of_pairs, of_talks, of_documents = [none], [none], [none[0]]
    for block, reader in chosen:
        found = examples_in(block, reader)
        every = -(-len(found.examples) * len(chosen) // SAMPLED) or 1
        sample = list(every_nth_record(found, every))
        pairs = [e for e in sample if not e.document and not e.turns]
        prompts = _lengths(codec, [e.prompt for e in pairs]) + around
        of_pairs.append(np.stack([prompts, _lengths(codec, [e.target for e in pairs]) + 1]))
        if talks := [e for e in sample if e.turns]:
            rows_of = ConversationRows(codec, settings)
            made = [rows_of.row(e.turns, Counter(), cut=False) for e in talks]
            rows = [row for row in made if not isinstance(row, str)]
            sides = [[len(row.prompt) for row in rows], [len(row.target) for row in rows]]
            of_talks.append(np.array(sides, np.int64))
        if not splits:
            documents = [e for e in sample if e.document]
            of_ids = [len(ids_of(e, codec)) for e in documents if e.ids]
            of_documents.append(np.array(of_ids, np.int64) + 1)
            texts = [e.target for e in documents if not e.ids]
            of_documents.append(_lengths(codec, texts) + 1)
    return Sample(
        np.concatenate(of_pairs, axis=1),
        np.concatenate(of_talks, axis=1),
        np.concatenate(of_documents),
    )


def _lengths(codec: Codec, texts: list[str]) -> Lengths:
    if not texts:
        return np.empty(0, np.int64)
    return np.diff(codec.encode_flat(texts).ends, prepend=0).astype(np.int64)


def _wish(lengths: Lengths, usual: int, percentile: int, most: int) -> int:
    if not len(lengths):
        return usual
    found = int(np.percentile(lengths, percentile, method="higher"))
    return min(most, -(-found // STEP) * STEP)


def _within(prompt: int, target: int, settings: PrepareSettings, sides: Lengths) -> tuple[int, int]:
    """The limits within the model's positions; only open ones give way."""
    room = settings.room or 0
    if not sides.size:  # documents alone: a decoder's piece is asked with one token
        return prompt, target if settings.max_target_tokens else max(8, min(target, room - 1))
    if prompt + target <= room:
        return prompt, target
    if settings.max_prompt_tokens is None and settings.max_target_tokens is None:
        target = min(target, room - _fewest_cut(sides, room))
        return max(8, min(prompt, room - target)), max(8, target)
    if settings.max_prompt_tokens is None:
        return max(8, room - target), target
    return prompt, max(8, room - prompt)


def _fewest_cut(sides: Lengths, room: int) -> int:
    """The longest prompt that leaves the most records whole where the target has the rest.

    Of two that do the one is better that cuts fewer targets, which lose their ends then, and at
    last the one that costs fewer tokens.

    >>> short_questions, long_questions = np.array([[9, 60], [400, 300]]), np.array([[400], [99]])
    >>> _fewest_cut(short_questions, 513), _fewest_cut(long_questions, 513)
    (64, 400)
    """
    prompts, targets = sides

    def cost(prompt: int) -> tuple[int, int, int]:
        lost = np.maximum(sides - [[prompt], [room - prompt]], 0)
        cut = int(((prompts > prompt) | (targets > room - prompt)).sum())
        return cut, int((targets > room - prompt).sum()), int(lost.sum())

    step = max(1, min(STEP, room // 4))
    return min(range(step, room, max(1, step // 8)), key=cost)


def _sentence(
    side: str, lengths: Lengths, limit: int, usual: int, wish: int, percentile: int
) -> str:
    longest = int(np.percentile(lengths, percentile, method="higher"))
    told = (
        f"Longest {side}: {limit:,} tokens, chosen from the data: {percentile} % of "
        f"{len(lengths):,} sampled {side}s have at most {longest:,}."
    )
    if limit < min(wish, longest):  # a wish is rounded up
        told += f" The model has room for no more; {wish:,} would be enough."
    elif limit < longest:
        name = "data.max_prompt_tokens" if side == "prompt" else "data.max_target_tokens"
        told += f" No limit above {MOST:,} is chosen; set {name} for a larger one."
    if limit != usual and _cut(lengths, usual) >= 0.001:
        told += f" {usual:,} would cut {_cut(lengths, usual):.1%} of the {side} tokens;"
        told += f" {limit:,} cuts {_cut(lengths, limit):.1%}."
    elif _cut(lengths, limit) >= 0.001:
        told += f" It cuts {_cut(lengths, limit):.1%} of the {side} tokens."
    return told


def _cut(lengths: Lengths, limit: int) -> float:
    return float(np.maximum(lengths - limit, 0).sum() / max(1, lengths.sum()))
