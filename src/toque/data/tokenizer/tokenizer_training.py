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
_N_EXTRA = 100  # sentinels
MAX_WORD_CHARS = 1000
"""Maximum number of characters of a word that training uses. A word ends at white space."""
WORDS_CUT = "toque_words_cut"
"""Setting of the tokenizer folder with the number of longer words."""
_WORD = re.compile(r"\S+|\s+")
# One spare piece per 16 pieces, because some trained pieces are dropped
_SPARE_SHARE = 16
# Difference between the scores of two characters that the Unigram trainer appends
_APPENDED_STEP = 1e-4
_SCORE_DIGITS = 3  # more digits differ between two trainings
_MAX_WAITS = 1000  # milliseconds
_T = TypeVar("_T")


def train_codec(texts: Iterable[str], *, vocab_size: int, kind: Kind) -> Codec:
    """Train a tokenizer of at most `vocab_size` entries. Equal texts give equal tokenizers.

    "unigram" has T5's layout: `<pad>`, `</s>`, `<unk>`, the pieces, then `<extra_id_99>` to
    `<extra_id_0>`. "bpe" is byte-level, and `<|endoftext|>` with id 0 is the begin, end and padding
    token.
    """
    cut: Counter[str] = Counter()
    # Keep line breaks, so that a byte-level vocabulary learns "\n".
    lines = [
        _cut_long_words(line, cut)
        for text in texts
        for line in to_nfc(text).splitlines(keepends=True)
    ]
    if not lines:
        raise DataError(
            "Cannot train a tokenizer: the sources have no text. Add texts to data.sources."
        )
    if kind == "bpe":
        # BPE counts with integers, so threads do not change the result.
        tokenizer = interruptible(partial(_train_bpe, lines, vocab_size))
        specials = {"eos_token": _END, "pad_token": _END, "bos_token": _END}
    else:
        # Threads would change the order of floating-point sums.
        with one_tokenizer_thread():
            tokenizer = interruptible(partial(_train_unigram, lines, vocab_size))
        specials = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

    name = f"{TRAINED}{vocab_size}"
    text = tokenizer.to_str()
    settings: dict[str, Any] = {"toque_name": name}
    if cut:
        settings[WORDS_CUT] = cut.total()
    folder = TokenizerFolder(name, text, Tokenizer.from_str(text), specials, settings)
    return Codec(folder)


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
    # longer than Python's, so wait for its end.
    task = Path(f"/proc/self/task/{thread.native_id}")
    for _ in range(_MAX_WAITS):
        if not task.exists():
            break
        time.sleep(0.001)
    return outcome.result()


def _cut_long_words(line: str, cut: Counter[str]) -> str:
    """Cut and count the long words of a line, because the training time is quadratic in a word."""
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
    n_specials = len(_UNIGRAM_SPECIALS)
    n_pieces = vocab_size - _N_EXTRA - n_specials
    trainer = UnigramTrainer(
        vocab_size=n_pieces + n_specials + n_pieces // _SPARE_SHARE,
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

    # Drop the rarest characters, so that characters take at most half of the pieces.
    counts = Counter(char for line in lines for char in line if not char.isspace())
    by_count = sorted(counts, key=lambda char: (-counts[char], char))
    without_rare = dict.fromkeys(map(ord, by_count[n_pieces // 2 :]), "")
    common_lines = [line.translate(without_rare) for line in lines]
    tokenizer.train_from_iterator(common_lines, trainer)
    tokenizer.model = _reproducible_model(tokenizer, n_pieces)

    tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    sentinels = [f"<extra_id_{n}>" for n in reversed(range(_N_EXTRA))]
    tokenizer.add_special_tokens(
        [
            AddedToken(name, special=True, normalized=False)
            for name in (*_UNIGRAM_SPECIALS, *sentinels)
        ]
    )
    return tokenizer


def _reproducible_model(tokenizer: Tokenizer, n_pieces: int) -> models.Unigram:
    """Return the trained model with its best `n_pieces`, with rounded scores and in a fixed order.

    The trainer's hash tables are seeded at random. So in every process, equal scores differ in
    their last bits and come in another order. All characters are kept.
    """
    vocab = json.loads(tokenizer.to_str())["model"]["vocab"]
    scores = _round_scores(vocab[len(_UNIGRAM_SPECIALS) :])

    def rank(piece: str) -> tuple[float, str]:
        return -scores[piece], piece

    ranked = sorted(scores, key=rank)
    characters = [piece for piece in ranked if len(piece) == 1]
    words = [piece for piece in ranked if len(piece) > 1]
    n_words = max(0, n_pieces - len(characters))
    pieces = sorted(characters + words[:n_words], key=rank)
    entries = [(special, 0.0) for special in _UNIGRAM_SPECIALS]
    entries += [(piece, scores[piece]) for piece in pieces]
    unk_id = _UNIGRAM_SPECIALS.index("<unk>")
    return models.Unigram(entries, unk_id, byte_fallback=False)


def _round_scores(trained: list[tuple[str, float]]) -> dict[str, float]:
    """Return the rounded score of each piece, and the lowest score for each appended character.

    The trainer appends characters without a score. The first gets the lowest score, and each
    further character `_APPENDED_STEP` more than the previous character, in a random order.
    """
    lowest = min((score for _, score in trained), default=0.0)
    n_characters = sum(len(piece) == 1 for piece, _ in trained)
    max_appended = lowest + _APPENDED_STEP * (1 + n_characters)
    scores = {}
    for piece, score in trained:
        is_appended = len(piece) == 1 and score < max_appended
        scores[piece] = round(lowest if is_appended else score, _SCORE_DIGITS)
    return scores
