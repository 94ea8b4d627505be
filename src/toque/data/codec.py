r"""Text to ids and back, for one tokenizer, with line breaks that survive.

Structure is the product here, and T5 cannot write a newline. Where a vocabulary does not hold
"\n", a marker stands for it: the highest spare `<extra_id_N>` as it is written in text, or else a
token `<newline>` that is added. Vocabularies of bytes (GPT-2, NeoX, Llama) hold "\n" themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from toque.data.tokenizer_folder import SpecialTokens, TokenizerFolder, read_folder
from toque.data.vocabulary import Rewriter
from toque.data.words import WordTable, kind_of

NEWLINE = "<newline>"
_EXTRA = re.compile(r"<extra_id_(\d+)>")
_PROBE = "Fold\n\n- 2 eggs\n1. Stir."
_SAMPLE = 32
"""Texts of every batch whose fast ids are compared with the tokenizer's own."""
_PREFIX = 4096
"""Characters of each that are: a whole recipe, the beginning of a book."""


class Codec:
    r"""Text <-> ids for one tokenizer; `load_codec` and `train_codec` make one.

    Attributes:
        name: what it was loaded as, for people.
        vocab_size: ids are below it; a marker that had to be added is counted.
        pad_id, eos_id: always there; where a vocabulary has no padding token, pad is eos.
        bos_id, unk_id: None when the vocabulary has none.
        newline_id: the line-break marker, None when the vocabulary holds "\n" itself.
        sha256: of `tokenizer.json` as `save` writes it.
        word_kind: how it cuts words, where a text's ids are its words' side by side, else None.
    """

    def __init__(
        self, tokenizer_json: str, *, name: str, specials: SpecialTokens, settings: dict[str, Any]
    ) -> None:
        tokenizer = Tokenizer.from_str(tokenizer_json)
        # "<|endoftext|>" written in a scraped page is text, not the end of a recipe.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = name
        self.newline_id = None if _holds_newline(tokenizer) else _newline_token(tokenizer)
        if self.newline_id is None and not _holds_newline(tokenizer):
            tokenizer.add_special_tokens([AddedToken(NEWLINE, special=True, normalized=False)])
            self.newline_id = _id_of(tokenizer, NEWLINE)
            tokenizer_json = tokenizer.to_str()
        self._json = tokenizer_json
        self._settings = settings
        self._specials = specials
        self._tokenizer = tokenizer
        self.sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1
        self.eos_id = _id_of(tokenizer, specials.eos)
        self.pad_id = _id_of(tokenizer, specials.pad)
        self.bos_id = _id_of(tokenizer, specials.bos) if specials.bos else None
        self.unk_id = _id_of(tokenizer, specials.unk) if specials.unk else None
        self._silent = {self.pad_id, self.eos_id, self.bos_id}
        added = tokenizer.get_added_tokens_decoder().values()
        self.rewriter = Rewriter(
            tokenizer, unk_id=self.unk_id, specials=[t.content for t in added if t.special]
        )
        self.word_kind = kind = kind_of(tokenizer)
        self._words = WordTable(tokenizer, kind=kind, break_id=self.newline_id) if kind else None

    def normalise(self, text: str) -> str:
        """`text` with what this vocabulary cannot hold replaced: 1½ -> 1 1/2, ñ -> n, { -> (.

        Vocabularies that hold everything leave the text alone. Encode after normalising.
        """
        return self.rewriter(text)

    def encode(self, text: str) -> list[int]:
        r"""Ids of `text` without special tokens; "\n" becomes `newline_id` where there is one."""
        return self._encode_plainly([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """`encode` for many texts, several times faster and with identical ids."""
        flat, ends = self.encode_flat(texts)
        return np.split(flat, ends[:-1]) if len(texts) else []

    def encode_flat(self, texts: Sequence[str]) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        """All ids of `texts` joined, and for each text the position after its last id.

        The fast way is taken for the texts it is exact for; a sample of every call is compared
        with the tokenizer's own ids, and one difference sends the whole call the long way.
        """
        words = self._words
        usable = [words is not None and words.usable(text) for text in texts]
        if words is None or not any(usable):
            return _joined(self._encode_plainly(texts))
        sample = [text[:_PREFIX] for text in texts[:: max(1, len(texts) // _SAMPLE)]]
        if not self._agree(words, [text for text in sample if words.usable(text)]):
            return _joined(self._encode_plainly(texts))
        flat, ends = words.encode_flat([t if u else "" for t, u in zip(texts, usable, strict=True)])
        if all(usable):
            return flat, ends
        rows = np.split(flat, ends[:-1])
        odd = [i for i, fast in enumerate(usable) if not fast]
        for i, ids in zip(odd, self._encode_plainly([texts[i] for i in odd]), strict=True):
            rows[i] = np.array(ids, np.uint32)
        return _joined(rows)

    @property
    def break_id(self) -> int | None:
        """The one token that writes a line break; None when it takes several."""
        if self.newline_id is not None:
            return self.newline_id
        ids = self.encode("\n")
        return ids[-1] if self.decode(ids[-1:]) == "\n" else None

    def decode(self, ids: Iterable[int]) -> str:
        r"""Text of `ids`; padding, end and begin are skipped, `newline_id` becomes "\n"."""
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.newline_id:
                lines.append([])
            elif token not in self._silent:
                lines[-1].append(int(token))
        return "\n".join(self._tokenizer.decode(line, skip_special_tokens=False) for line in lines)

    def pieces(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, with its id."""
        return self._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder that AutoTokenizer reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        config = {
            **self._settings,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self._specials.as_config(),
        }
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _agree(self, words: WordTable, texts: list[str]) -> bool:
        flat, ends = words.encode_flat(texts)
        right, right_ends = _joined(self._encode_plainly(texts))
        return np.array_equal(flat, right) and np.array_equal(ends, right_ends)

    def _encode_plainly(self, texts: Sequence[str]) -> list[list[int]]:
        if self.newline_id is None:
            return self._tokenize(list(texts))
        lines = [text.split("\n") for text in texts]
        ids = iter(self._tokenize([line for own in lines for line in own]))
        joined: list[list[int]] = []
        for own in lines:
            row = list(next(ids))
            for _ in own[1:]:
                row.append(self.newline_id)
                row += next(ids)
            joined.append(row)
        return joined


def load_codec(folder: Path | str) -> Codec:
    """The codec of a Hugging Face tokenizer folder.

    Raises:
        DataError: no such folder, no `tokenizer.json` in it, one that cannot be read, or a
            vocabulary without an end token.
    """
    read: TokenizerFolder = read_folder(Path(folder))
    return Codec(read.json, name=read.name, specials=read.specials, settings=read.settings)


def _holds_newline(tokenizer: Tokenizer) -> bool:
    ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
    return bool(tokenizer.decode(ids, skip_special_tokens=False) == _PROBE)


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)  # the whole vocabulary as a dict takes 40 ms
    if found is None:
        raise KeyError(token)
    return int(found)


def _newline_token(tokenizer: Tokenizer) -> int | None:
    vocabulary = tokenizer.get_vocab()
    if NEWLINE in vocabulary:
        return int(vocabulary[NEWLINE])
    numbers = [int(found[1]) for found in map(_EXTRA.fullmatch, vocabulary) if found]
    return int(vocabulary[f"<extra_id_{max(numbers)}>"]) if numbers else None


def _joined(
    rows: Sequence[Sequence[int] | NDArray[np.uint32]],
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    arrays = [np.asarray(row, np.uint32) for row in rows]
    return np.concatenate([np.empty(0, np.uint32), *arrays]), np.cumsum(lengths)
