"""Tokenizer training: byte-level BPE, or Unigram for the T5 family."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from toque.config.schema import TRAINED
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_folder import SpecialForms, TokenizerFolder
from toque.errors import DataError
from toque.sources.documents import composed

Kind = Literal["unigram", "bpe"]
_END = "<|endoftext|>"
_UNIGRAM_SPECIALS = ("<pad>", "</s>", "<unk>")
_N_EXTRA = 100
MAX_WORD_CHARS = 1000  # characters between blanks that a vocabulary is learnt from
WORDS_CUT = "toque_words_cut"  # the folder's setting that counts longer words
_WORD = re.compile(r"\S+|\s+")
_T = TypeVar("_T")


def train_codec(texts: Iterable[str], *, vocab_size: int, kind: Kind) -> Codec:
    """Learn a vocabulary of at most `vocab_size` entries; the same texts give the same one.

    "unigram" has T5's layout: `<pad>` 0, `</s>` 1, `<unk>` 2, pieces, and 100 `<extra_id_N>` at the
    end, 99 first. "bpe" is byte-level with `<|endoftext|>` as 0 for begin, end and padding.
    """
    cut: Counter[str] = Counter()
    # With their line breaks: a byte-level vocabulary learns "\n" from them.
    whole = chain.from_iterable(composed(text).splitlines(keepends=True) for text in texts)
    lines = [_without_long_words(line, cut) for line in whole]
    if not lines:
        raise DataError("A tokenizer cannot be learnt from nothing: the sources hold no text.")
    if kind == "bpe":  # counts are whole numbers: threads change nothing
        tokenizer = interruptible(partial(_bpe, lines, vocab_size))
        specials = SpecialForms(eos=_END, pad=_END, bos=_END, unk=None)
    else:  # threads would add floating-point sums in another order every time
        with one_tokenizer_thread():
            tokenizer = interruptible(partial(_unigram, lines, vocab_size))
        specials = SpecialForms(eos="</s>", pad="<pad>", bos=None, unk="<unk>")
    name, text = f"{TRAINED}{vocab_size}", tokenizer.to_str()
    settings: dict[str, Any] = {"toque_name": name}
    if cut:
        settings[WORDS_CUT] = cut.total()
    return Codec(TokenizerFolder(name, text, Tokenizer.from_str(text), specials, settings))


@contextmanager
def one_tokenizer_thread() -> Iterator[None]:
    """Keep the tokenizers library to one thread, here and in processes started inside."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def interruptible(work: Callable[[], _T]) -> _T:
    """The result of `work`, done in a thread so that Ctrl-C is answered, which waits for Python."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    # Workers are forked when no thread is left; the system's may outlive Python's for a moment.
    task = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(1000):
        if not task.exists():
            break
        time.sleep(0.001)
    return done.result()


def _without_long_words(line: str, cut: Counter[str]) -> str:
    """A line with its long words cut, and counted: learning takes the square of their length."""
    if len(line) <= MAX_WORD_CHARS:
        return line

    def shorter(word: re.Match[str]) -> str:
        cut["words"] += len(word[0]) > MAX_WORD_CHARS
        return word[0][:MAX_WORD_CHARS]

    return _WORD.sub(shorter, line)


def _bpe(lines: list[str], vocab_size: int) -> Tokenizer:
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


def _unigram(lines: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    n_pieces = vocab_size - _N_EXTRA - len(_UNIGRAM_SPECIALS)
    trainer = UnigramTrainer(
        vocab_size=n_pieces + len(_UNIGRAM_SPECIALS) + n_pieces // 16,  # the excess is cut below
        special_tokens=list(_UNIGRAM_SPECIALS),
        unk_token=_UNIGRAM_SPECIALS[2],
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    # The rarest characters would crowd out the words.
    counts = Counter(char for line in lines for char in line if not char.isspace())
    rare = sorted(counts, key=lambda char: (-counts[char], char))[n_pieces // 2 :]
    without_rare = dict.fromkeys(map(ord, rare), "")
    tokenizer.train_from_iterator([line.translate(without_rare) for line in lines], trainer)
    tokenizer.model = _settled(tokenizer, n_pieces)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    names = [*_UNIGRAM_SPECIALS, *(f"<extra_id_{n}>" for n in reversed(range(_N_EXTRA)))]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    return tokenizer


def _settled(tokenizer: Tokenizer, n_pieces: int) -> models.Unigram:
    """The learnt pieces in an order that does not depend on the process.

    The trainer walks hash tables with a seed of their own: equal scores come in another order, and
    differ in their last bits. So scores are rounded, ties sorted by piece, and the list cut here.
    """
    learnt = json.loads(tokenizer.to_str())["model"]["vocab"][len(_UNIGRAM_SPECIALS) :]
    # Characters without a score of their own get the lowest and a ten-thousandth more each.
    lowest = min((score for _, score in learnt), default=0.0)
    appended = lowest + 1e-4 * (1 + sum(len(piece) == 1 for piece, _ in learnt))
    scores = {
        piece: round(lowest if len(piece) == 1 and score < appended else score, 3)
        for piece, score in learnt
    }
    ranked = sorted(scores, key=lambda p: (-scores[p], p))
    letters = [piece for piece in ranked if len(piece) == 1]
    words = [piece for piece in ranked if len(piece) > 1][: max(0, n_pieces - len(letters))]
    pieces = sorted(letters + words, key=lambda p: (-scores[p], p))
    vocabulary = [(special, 0.0) for special in _UNIGRAM_SPECIALS]
    return models.Unigram(vocabulary + [(p, scores[p]) for p in pieces], 2, byte_fallback=False)
