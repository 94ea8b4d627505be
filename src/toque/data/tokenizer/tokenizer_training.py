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
from pathlib import Path
from typing import Any, Literal, TypeVar

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.trainers import BpeTrainer, UnigramTrainer

from toque.config.schema import TRAINED
from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.tokenizer_folder import TokenizerFolder
from toque.errors import DataError
from toque.sources.documents import to_nfc

Kind = Literal["unigram", "bpe"]
_END = "<|endoftext|>"
_UNIGRAM_SPECIALS = ("<pad>", "</s>", "<unk>")
_N_EXTRA = 100
MAX_WORD_CHARS = 1000
"""Characters between blanks that training uses."""
WORDS_CUT = "toque_words_cut"
"""Setting of the tokenizer folder with the count of longer words."""
_WORD = re.compile(r"\S+|\s+")
_T = TypeVar("_T")


def train_codec(texts: Iterable[str], *, vocab_size: int, kind: Kind) -> Codec:
    """Train a tokenizer of at most `vocab_size` entries. Equal texts give equal tokenizers.

    "unigram" has T5's layout: `<pad>`, `</s>`, `<unk>`, the pieces, then `<extra_id_99>` to
    `<extra_id_0>`. "bpe" is byte-level, and `<|endoftext|>` with the id 0 is the begin, end and
    padding token.
    """
    cut: Counter[str] = Counter()
    # Keep line breaks, so that a byte-level vocabulary learns "\n".
    lines = [
        _cut_long_words(line, cut)
        for text in texts
        for line in to_nfc(text).splitlines(keepends=True)
    ]
    if not lines:
        raise DataError("Cannot train a tokenizer: the sources have no text.")
    if kind == "bpe":  # counts are integers, so threads do not change the result
        tokenizer = interruptible(partial(_train_bpe, lines, vocab_size))
        specials = {"eos_token": _END, "pad_token": _END, "bos_token": _END}
    else:  # threads would change the order of floating-point sums
        with one_tokenizer_thread():
            tokenizer = interruptible(partial(_train_unigram, lines, vocab_size))
        specials = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

    name = f"{TRAINED}{vocab_size}"
    text = tokenizer.to_str()
    settings: dict[str, Any] = {"toque_name": name}
    if cut:
        settings[WORDS_CUT] = cut.total()
    return Codec(
        TokenizerFolder(name, text, Tokenizer.from_str(text), specials, settings)
    )


@contextmanager
def one_tokenizer_thread() -> Iterator[None]:
    """Limit the tokenizers library to one thread, in this process and in new child processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def interruptible(work: Callable[[], _T]) -> _T:
    """Run `work` in a thread and return its result, so that Ctrl-C interrupts native code."""
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised below, in the main thread
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()

    # A process forks workers only if it has no other thread. The kernel's thread may exist a moment
    # longer than Python's.
    task = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(1000):
        if not task.exists():
            break
        time.sleep(0.001)
    return outcome.result()


def _cut_long_words(line: str, cut: Counter[str]) -> str:
    """Cut and count the long words of a line. Training time grows with the square of a word."""
    if len(line) <= MAX_WORD_CHARS:
        return line

    def shorten(word: re.Match[str]) -> str:
        cut["words"] += len(word[0]) > MAX_WORD_CHARS
        return word[0][:MAX_WORD_CHARS]

    return _WORD.sub(shorten, line)


def _train_bpe(lines: list[str], vocab_size: int) -> Tokenizer:
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


def _train_unigram(lines: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    n_pieces = vocab_size - _N_EXTRA - len(_UNIGRAM_SPECIALS)
    trainer = UnigramTrainer(
        vocab_size=n_pieces
        + len(_UNIGRAM_SPECIALS)
        + n_pieces // 16,  # `_reproducible` drops the excess
        special_tokens=list(_UNIGRAM_SPECIALS),
        unk_token=_UNIGRAM_SPECIALS[2],
        show_progress=False,
    )

    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Metaspace(prepend_scheme="always"),
        ]
    )

    # Drop the rarest characters, so that they do not take the entries of words.
    counts = Counter(char for line in lines for char in line if not char.isspace())
    rare = sorted(counts, key=lambda char: (-counts[char], char))[n_pieces // 2 :]
    without_rare = dict.fromkeys(map(ord, rare), "")

    tokenizer.train_from_iterator(
        [line.translate(without_rare) for line in lines], trainer
    )
    tokenizer.model = _reproducible(tokenizer, n_pieces)

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    names = [
        *_UNIGRAM_SPECIALS,
        *(f"<extra_id_{n}>" for n in reversed(range(_N_EXTRA))),
    ]
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in names]
    )
    return tokenizer


def _reproducible(tokenizer: Tokenizer, n_pieces: int) -> models.Unigram:
    """Round the scores of a trained model, sort its pieces, and drop the excess.

    The trainer's hash tables are seeded at random. So in every process equal scores differ in their
    last bits and come in another order.
    """
    trained = json.loads(tokenizer.to_str())["model"]["vocab"][len(_UNIGRAM_SPECIALS) :]
    # The trainer appends characters without a score: each gets 0.0001 more than the last,
    # starting at the lowest score.
    lowest = min((score for _, score in trained), default=0.0)
    max_appended = lowest + 1e-4 * (1 + sum(len(piece) == 1 for piece, _ in trained))
    scores = {
        piece: round(lowest if len(piece) == 1 and score < max_appended else score, 3)
        for piece, score in trained
    }
    ranked = sorted(scores, key=lambda p: (-scores[p], p))
    letters = [piece for piece in ranked if len(piece) == 1]
    words = [piece for piece in ranked if len(piece) > 1][
        : max(0, n_pieces - len(letters))
    ]
    pieces = sorted(letters + words, key=lambda p: (-scores[p], p))
    vocabulary = [(special, 0.0) for special in _UNIGRAM_SPECIALS]
    return models.Unigram(
        vocabulary + [(p, scores[p]) for p in pieces], 2, byte_fallback=False
    )
