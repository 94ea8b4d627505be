"""Sample of the sources, for training a tokenizer and choosing length limits.

A limit is the 99th percentile of the sample's lengths, rounded up. If the model's context length is
too short for both limits, it is divided so that the fewest records of the sample are cut. With
`max_examples`, the sample is from about the same bytes as the store, so that a trial is fast.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.conversation_rows import ConversationRows
from toque.data.prepare.data_report import (
    ENCODING_HINT,
    add_first_lines,
    describe_reasons,
)
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

MAX_EXAMPLES = 20_000  # maximum number of examples for training a tokenizer
MAX_CHARACTERS = 8_000_000  # maximum number of characters for training a tokenizer
_MAX_LINES = 3  # maximum number of lines per reason in an error
_MIN_BLOCKS = 12  # number of blocks for training a tokenizer; more if they are small
SAMPLED = 6_000  # number of examples that are measured for limits
READ_BYTES = 16 << 20  # approximate bytes that are read for limits
MAX_BLOCKS = 400  # number of blocks that are read for limits
_TRIAL_BYTES = 1 << 20  # bytes that are read to estimate the size of `max_examples`
PERCENTILE = 99
STEP = 64  # tokens; limits are multiples of it, so that more data rarely changes them
MAX_LIMIT = 2_048  # tokens; longer rows would take too much memory
_MIN_LIMIT = 8  # tokens; a shorter text teaches nothing
_MIN_CUT_SHARE = 0.001  # smallest fraction of cut tokens that is reported
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """Lengths of sampled examples in tokens, including special tokens."""

    pairs: Lengths  # [2, n] prompts and targets
    talks: Lengths  # [2, n] lengths of the prompts and targets of conversations
    documents: Lengths  # [n] lengths of documents that are not split

    @property
    def sides(self) -> Lengths:
        """Prompts and targets of all examples, [2, n]. The prompt of a document has one token."""
        documents = np.stack([np.ones_like(self.documents), self.documents])
        return np.concatenate([self.pairs, self.talks, documents], axis=1)


def learn_tokenizer(
    files: Sequence[SourceFile],
    *,
    vocab_size: int,
    family_kind: FamilyKind,
    max_examples: int | None = None,
) -> Codec:
    """Train a tokenizer on examples of all sources: BPE for a decoder, otherwise Unigram.

    Raises:
        DataError: The sample has no example.
    """
    dropped: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    n_blocks = _count_blocks(files, _MIN_BLOCKS * CHUNK_BYTES, MAX_EXAMPLES)
    blocks = list(_spread_blocks(files, n_blocks, _first_bytes(files, max_examples)))
    texts = list(_sample_texts(blocks, dropped, lines))
    if not texts:
        hint = f" {ENCODING_HINT}" if 2 * dropped[NOT_UTF_8] > dropped.total() else ""
        raise DataError(
            f"Cannot train a tokenizer: none of the {len(files)} source files contains a usable "
            f"example. The sampled records: {describe_reasons(dropped, lines)}.{hint} Check one of "
            "these lines, and the format in data.sources."
        )
    kind: Kind = "bpe" if family_kind == "decoder" else "unigram"
    return train_codec(texts, vocab_size=vocab_size, kind=kind)


def _sample_texts(
    blocks: Sequence[tuple[Block, RecordReader]],
    dropped: Counter[str],
    lines: dict[str, list[str]],
) -> Iterator[str]:
    """Yield prompts and targets of the blocks, cut to `MAX_CHARACTERS` in total.

    Also add the dropped records to `dropped`, by reason, and their first lines to `lines`.
    """
    n_bytes = sum(len(block.payload) for block, _ in blocks)
    for block, reader in blocks:
        parsed = examples_in(block, reader)
        dropped.update({reason: len(n) for reason, n in parsed.dropped.items()})
        add_first_lines(lines, block.path, parsed.dropped, _MAX_LINES)

        # If there are few blocks, each contributes equally to the sample. Otherwise a longer block
        # contributes more.
        inverse_share: float = len(blocks)
        if len(blocks) > _MIN_BLOCKS:
            inverse_share = n_bytes / max(1, len(block.payload))
        chars_left = int(MAX_CHARACTERS // inverse_share)
        # The two signs turn the floor division into a ceiling.
        step = int(-(-len(parsed.examples) * inverse_share // MAX_EXAMPLES)) or 1
        for example in every_nth_record(parsed, step):
            for text in (example.prompt, example.target):
                yield text[: max(0, chars_left)]
                chars_left -= len(text)


def every_nth_record(block: BlockExamples, n: int) -> Iterator[Example]:
    """Yield all examples of every n-th record.

    Every n-th example would miss a task if each record has n examples.
    """
    return chain.from_iterable(islice(block.examples_by_record, 0, None, n))


def _first_bytes(files: Sequence[SourceFile], max_examples: int | None) -> int | None:
    """Estimate the bytes of the first blocks with `max_examples` examples. None means all bytes."""
    if max_examples is None:
        return None
    n_bytes = 0
    n_examples = 0
    for block, reader in _read_in_turns(files):
        n_bytes += len(block.payload)
        n_examples += len(examples_in(block, reader).examples)
        if n_examples >= max_examples:
            return n_bytes
        if n_bytes >= _TRIAL_BYTES:
            break
    return n_bytes * max_examples // max(1, n_examples)


def _count_blocks(files: Sequence[SourceFile], n_bytes: int, limit: int) -> int:
    """Estimate the number of blocks with `n_bytes` bytes, at most `limit`.

    A small file, such as a page, is one block.
    """
    mean_bytes = sum(file.plain_bytes for file in files) // max(1, len(files))
    block_bytes = max(1, min(CHUNK_BYTES, mean_bytes))
    return min(limit, n_bytes // block_bytes)


def _read_in_turns(files: Sequence[SourceFile]) -> Iterator[tuple[Block, RecordReader]]:
    """Yield a block of each file in turn, with the file's reader."""
    readers = {(file.source, file.name): file.reader for file in files}
    return ((block, readers[block.source, block.path]) for block in in_turns(files))


def _spread_blocks(
    files: Sequence[SourceFile], n: int, first_bytes: int | None
) -> Iterator[tuple[Block, RecordReader]]:
    """Yield the blocks at `n` evenly spaced positions in the first bytes, or in all files."""
    total = sum(file.plain_bytes for file in files)
    blocks: Iterator[tuple[Block, RecordReader]]
    if first_bytes is None:
        blocks = ((block, file.reader) for file in files for block in blocks_of(file))
    else:
        total = max(1, min(total, first_bytes))
        blocks = _read_in_turns(files)
    end = 0
    next_position = 0
    for block, reader in blocks:
        end += len(block.payload)
        # Position k of n is at byte k * total / n.
        if end * n > next_position * total:
            yield block, reader
            next_position = end * n // total + 1
        if first_bytes is not None and end >= total:
            return


class ChosenLimits(NamedTuple):
    """Length limits that were chosen from a sample of the sources."""

    settings: PrepareSettings  # settings with all limits
    sentences: list[str]  # descriptions of the chosen limits
    tokens_each: float | None
    """Mean tokens of a sampled pair or conversation within the limits. None for documents."""


def choose_limits(
    files: Sequence[SourceFile],
    codec: Codec,
    settings: PrepareSettings,
    *,
    percentile: int = PERCENTILE,
) -> ChosenLimits:
    """Choose the length limits that are not set.

    `percentile` % of the sample are within the limits. With 100 %, a limit may be as long as the
    model's context.
    """
    sample = _measure_sample(files, codec, settings)
    max_limit = MAX_LIMIT
    if percentile == 100 and settings.room:
        max_limit = settings.room
    prompts = np.concatenate([sample.pairs[0], sample.talks[0]])
    ideal_prompt = _ideal_limit(prompts, USUAL_PROMPT, percentile, max_limit)
    ideal_target = _ideal_limit(sample.sides[1], USUAL_TARGET, percentile, max_limit)
    prompt = settings.max_prompt_tokens or ideal_prompt
    target = settings.max_target_tokens or ideal_target
    if settings.room is not None:
        prompt, target = _fit_context(prompt, target, settings, sample.sides)

    # A conversation uses both limits together.
    conversations = sample.talks.sum(axis=0)
    both = prompt + target
    ideal_both = both
    if settings.room == both:
        ideal_both = _ideal_limit(conversations, both, percentile, 2 * max_limit)
    usual_both = USUAL_PROMPT + USUAL_TARGET
    targets = np.concatenate([sample.pairs[1], sample.documents])
    limits: list[_Limit] = []
    if settings.max_prompt_tokens is None:
        limits.append(
            _Limit("prompt", sample.pairs[0], prompt, USUAL_PROMPT, ideal_prompt)
        )
    if settings.max_target_tokens is None:
        limits.append(_Limit("target", targets, target, USUAL_TARGET, ideal_target))
    limits.append(_Limit("conversation", conversations, both, usual_both, ideal_both))
    sentences = [
        limit.describe(percentile, settings.room)
        for limit in limits
        if len(limit.lengths)
    ]

    cut_pairs = np.minimum(sample.pairs, [[prompt], [target]]).sum(axis=0)
    cut = np.concatenate([cut_pairs, np.minimum(conversations, both)])
    chosen = replace(settings, max_prompt_tokens=prompt, max_target_tokens=target)
    return ChosenLimits(chosen, sentences, float(cut.mean()) if len(cut) else None)


def _measure_sample(
    files: Sequence[SourceFile], codec: Codec, settings: PrepareSettings
) -> Sample:
    """Sample the sources, and count the tokens of the sampled examples."""
    n_blocks = MAX_BLOCKS
    first_bytes = _first_bytes(files, settings.max_examples)
    if (first_bytes or sum(file.plain_bytes for file in files)) > READ_BYTES:
        n_blocks = _count_blocks(files, READ_BYTES, MAX_BLOCKS)
    blocks = list(_spread_blocks(files, n_blocks, first_bytes))

    n_special = sum(i is not None for i in prompt_bounds(codec, settings.family_kind))
    splits_documents = settings.on_overlong in ("auto", "split")
    empty = np.empty((2, 0), np.int64)
    pair_lengths = [empty]
    talk_lengths = [empty]
    document_lengths = [empty[0]]
    for block, reader in blocks:
        parsed = examples_in(block, reader)
        step = -(-len(parsed.examples) * len(blocks) // SAMPLED) or 1
        sample = list(every_nth_record(parsed, step))
        pairs = [e for e in sample if not e.document and not e.turns]
        prompts = _count_tokens(codec, [e.prompt for e in pairs]) + n_special
        targets = _count_tokens(codec, [e.target for e in pairs]) + 1
        pair_lengths.append(np.stack([prompts, targets]))
        if talks := [e for e in sample if e.turns]:
            talk_lengths.append(_measure_talks(talks, codec, settings))
        if not splits_documents:
            documents = [e for e in sample if e.document]
            n_ids = [len(ids_of(e, codec)) for e in documents if e.ids]
            document_lengths.append(np.array(n_ids, np.int64) + 1)
            texts = [e.target for e in documents if not e.ids]
            document_lengths.append(_count_tokens(codec, texts) + 1)
    return Sample(
        np.concatenate(pair_lengths, axis=1),
        np.concatenate(talk_lengths, axis=1),
        np.concatenate(document_lengths),
    )


def _measure_talks(
    talks: Sequence[Example], codec: Codec, settings: PrepareSettings
) -> Lengths:
    """Count the tokens of the prompts and targets of conversations, [2, n]."""
    conversation_rows = ConversationRows(codec, settings)
    results = [conversation_rows.encode(e.turns, Counter(), cut=False) for e in talks]
    rows = [row for row in results if not isinstance(row, str)]
    prompts = [len(row.prompt) for row in rows]
    targets = [len(row.target) for row in rows]
    return np.array([prompts, targets], np.int64)


def _count_tokens(codec: Codec, texts: list[str]) -> Lengths:
    """Count the tokens of each text."""
    if not texts:
        return np.empty(0, np.int64)
    return np.diff(codec.encode_flat(texts).ends, prepend=0).astype(np.int64)


def _ideal_limit(lengths: Lengths, usual: int, percentile: int, max_limit: int) -> int:
    """Round a percentile up to a multiple of `STEP`, without regard to the context length."""
    if not len(lengths):
        return usual
    length = int(np.percentile(lengths, percentile, method="higher"))
    return min(max_limit, -(-length // STEP) * STEP)


def _fit_context(
    prompt: int, target: int, settings: PrepareSettings, sides: Lengths
) -> tuple[int, int]:
    """Lower the limits that are not set, so that their sum fits into the model's context length."""
    room = settings.room or 0
    if not sides.size:  # only documents, with prompts of one token
        if settings.max_target_tokens is None:
            target = max(_MIN_LIMIT, min(target, room - 1))
        return prompt, target
    if prompt + target <= room:
        return prompt, target
    if settings.max_prompt_tokens is None and settings.max_target_tokens is None:
        target = min(target, room - _fewest_cut(sides, room))
        prompt = min(prompt, room - target)
        return max(_MIN_LIMIT, prompt), max(_MIN_LIMIT, target)
    if settings.max_prompt_tokens is None:
        return max(_MIN_LIMIT, room - target), target
    return prompt, max(_MIN_LIMIT, room - prompt)


def _fewest_cut(sides: Lengths, room: int) -> int:
    """Find the prompt limit for which the fewest records are cut.

    The target limit is the rest of `room`. If several limits cut equally few records, choose
    the limit with the fewest cut targets, because a cut target loses its end, and then the limit
    with the fewest cut tokens.

    >>> short_questions, long_questions = np.array([[9, 60], [400, 300]]), np.array([[400], [99]])
    >>> _fewest_cut(short_questions, 513), _fewest_cut(long_questions, 513)
    (64, 400)
    """

    def cost(limit: int) -> tuple[int, int, int]:
        lost = np.maximum(sides - [[limit], [room - limit]], 0)
        is_cut = lost > 0
        return int(is_cut.any(axis=0).sum()), int(is_cut[1].sum()), int(lost.sum())

    step = max(1, min(STEP, room // 4))
    return min(range(step, room, max(1, step // 8)), key=cost)


@dataclass(frozen=True)
class _Limit:
    """Chosen limit on one kind of text, with the numbers that describe it."""

    kind: str  # prompt, target or conversation
    lengths: Lengths  # [n] number of tokens in each sampled text
    limit: int
    usual: int  # default limit
    ideal: int  # limit for a model without a limited context

    def describe(self, percentile: int, room: int | None) -> str:
        """Describe the limit, and the tokens that it cuts.

        `room` is the model's context length plus one, because the last token is not read.
        """
        kind = self.kind
        longest = int(np.percentile(self.lengths, percentile, method="higher"))
        text = (
            f"Longest {kind}: {self.limit:,} tokens, chosen from the data: {percentile} % of "
            f"{len(self.lengths):,} sampled {kind}s have at most {longest:,}."
        )
        cut_share = self._cut_share(self.limit)
        if room is not None and self.limit < min(self.ideal, longest):
            return (
                f"{text} The model's context length is only {room - 1:,} tokens for prompt and "
                f"target together, so {cut_share:.1%} of the {kind} tokens will be cut. To cut "
                "fewer, use a base model with a longer context length (model.start_from) or, for a "
                "model from scratch, set a longer one in model.shape."
            )
        if self.limit < longest:
            side = "prompt" if kind == "prompt" else "target"
            text += (
                f" The largest limit that is chosen is {MAX_LIMIT:,}. Set data.max_{side}_tokens "
                "for a larger one."
            )
        usual_cut_share = self._cut_share(self.usual)
        if self.limit != self.usual and usual_cut_share >= _MIN_CUT_SHARE:
            text += (
                f" {self.usual:,} would cut {usual_cut_share:.1%} of the {kind} tokens, and "
                f"{self.limit:,} cuts {cut_share:.1%}."
            )
        elif cut_share >= _MIN_CUT_SHARE:
            text += f" It cuts {cut_share:.1%} of the {kind} tokens."
        return text

    def _cut_share(self, limit: int) -> float:
        """Compute the fraction of the tokens that a limit cuts."""
        n_cut = np.maximum(self.lengths - limit, 0).sum()
        return float(n_cut / max(1, self.lengths.sum()))
