"""Training sample of a tokenizer: examples spread evenly over the sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from toque.data.prepare.report import ENCODING_HINT, reasons_in_words
from toque.data.prepare.settings import FamilyKind
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.train import Kind, train_codec
from toque.errors import DataError
from toque.sources.blocks import NOT_UTF_8
from toque.sources.files import SourceFile, blocks_of, plain_bytes
from toque.sources.records import Block, Example, examples_in

MAX_EXAMPLES = 20_000
MAX_CHARACTERS = 8_000_000
_PLACES = 3
_BLOCKS = 12
"""Blocks that the sample is spread over."""


def learn_tokenizer(
    files: Sequence[SourceFile], *, vocab_size: int, family_kind: FamilyKind
) -> Codec:
    """Train a tokenizer on examples spread evenly over the sources; deterministic.

    Byte-level BPE for a decoder, Unigram in T5's layout for an encoder-decoder.

    Raises:
        DataError: no source gives an example, or the vocabulary is too small.
    """
    dropped: Counter[str] = Counter()
    lines: dict[str, list[str]] = {}
    texts = list(sample(files, dropped, lines))
    if not texts:
        hint = f" {ENCODING_HINT}" if 2 * dropped[NOT_UTF_8] > dropped.total() else ""
        raise DataError(
            f"No tokenizer can be learnt: none of the {len(files)} source files gives an example. "
            f"Of the records looked at: {reasons_in_words(dropped, lines)}.{hint} Look at a line "
            "of them, and at the format of data.sources."
        )
    kind: Kind = "bpe" if family_kind == "decoder" else "unigram"
    return train_codec(texts, vocab_size=vocab_size, kind=kind)


def sample(
    files: Sequence[SourceFile], dropped: Counter[str], lines: dict[str, list[str]]
) -> Iterator[str]:
    """Prompts and targets of at most MAX_EXAMPLES examples and MAX_CHARACTERS characters.

    What readers refuse is added to `dropped`, by reason, and its first places to `lines`.
    """
    chosen = list(spread_blocks(files))
    for file, block in chosen:
        found = examples_in(block, file.reader)
        examples = found.examples
        for reason, numbers in found.dropped.items():
            dropped[reason] += len(numbers)
            places = lines.setdefault(reason, [])
            places += [f"{Path(file.name).name}:{n}" for n in numbers[: _PLACES - len(places)]]
        characters = MAX_CHARACTERS // len(chosen)
        every = -(-len(examples) * len(chosen) // MAX_EXAMPLES) or 1
        for example in every_nth_record(examples, every):
            for text in (example.prompt, example.target):
                yield text[: max(0, characters)]
                characters -= len(text)


def every_nth_record(examples: Sequence[Example], n: int) -> Iterator[Example]:
    """All examples of one record in `n`, from the first on.

    Not every n-th example: of two tasks, every second example is of the same one.
    """
    records, before = 0, 0
    for example in examples:
        if not records or example.task <= before:  # a record's examples carry rising numbers
            records += 1
        before = example.task
        if (records - 1) % n == 0:
            yield example


def spread_blocks(
    files: Sequence[SourceFile], n: int = _BLOCKS
) -> Iterator[tuple[SourceFile, Block]]:
    """The blocks that hold one of `n` evenly spaced positions of all plain bytes."""
    total = sum(map(plain_bytes, files))
    at, wanted = 0, 0
    for file in files:
        for block in blocks_of(file):
            at += len(block.payload)
            if at * n > wanted * total:
                yield file, block
                wanted = at * n // total + 1
