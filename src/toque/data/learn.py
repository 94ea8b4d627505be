"""Learning a tokenizer from the data: byte-level BPE, or Unigram as T5's."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from toque.data.codec import Codec
from toque.data.tokenizer_folder import SpecialTokens
from toque.errors import DataError

Kind = Literal["unigram", "bpe"]
_END = "<|endoftext|>"
_N_EXTRA = 100
SMALLEST: dict[Kind, int] = {"bpe": 257, "unigram": 300}
"""Fewest entries: all bytes and the end; or T5's specials and room for an alphabet."""


def train_codec(texts: Iterable[str], *, vocab_size: int, kind: Kind) -> Codec:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    "unigram" has T5's layout: `<pad>` 0, `</s>` 1, `<unk>` 2, pieces, and 100 `<extra_id_N>` at the
    end, 99 first. "bpe" is byte-level with `<|endoftext|>` as 0 for begin, end and padding.

    Raises:
        DataError: `vocab_size` is too small for the kind, or there is no text.
    """
    if vocab_size < SMALLEST[kind]:
        raise DataError(
            f"A {kind} vocabulary of {vocab_size} is too small: it needs at least {SMALLEST[kind]} "
            "entries for its alphabet and special tokens. A usual size is trained:8192."
        )
    lines = _lines(texts)
    first = next(lines, None)
    if first is None:
        raise DataError("A tokenizer cannot be learnt from nothing: the sources hold no text.")
    # Threads would add floating-point sums in another order every time.
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        train = _bpe if kind == "bpe" else _unigram
        tokenizer = train(_chain(first, lines), vocab_size)
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before
    specials = (
        SpecialTokens(eos=_END, pad=_END, bos=_END, unk=None)
        if kind == "bpe"
        else SpecialTokens(eos="</s>", pad="<pad>", bos=None, unk="<unk>")
    )
    name = f"trained:{vocab_size}"
    settings = {"toque_name": name}
    return Codec(tokenizer.to_str(), name=name, specials=specials, settings=settings)


def _bpe(lines: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(_END, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def _unigram(lines: Iterator[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = UnigramTrainer(
        vocab_size=vocab_size - _N_EXTRA,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",  # noqa: S106 - a vocabulary entry
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens(
        [
            AddedToken(f"<extra_id_{n}>", special=True, normalized=False)
            for n in reversed(range(_N_EXTRA))
        ]
    )
    return tokenizer


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Lines with their newline, composed; what a byte-level vocabulary should learn "\\n" from."""
    for text in texts:
        yield from unicodedata.normalize("NFC", text).splitlines(keepends=True)


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest
