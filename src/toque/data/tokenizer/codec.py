r"""Codec: text to token ids and back, with line breaks that survive.

Structure is the product here, and T5 cannot write a newline. Where a vocabulary does not hold
"\n", a marker stands for it: the highest spare `<extra_id_N>` as it is written in text, or else a
token `<newline>` that is added. Byte-level vocabularies (GPT-2, NeoX, Llama) hold "\n" themselves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from toque.data.tokenizer.char_fallbacks import Rewriter
from toque.data.tokenizer.tokenizer_folder import (
    END_IDS,
    TokenizerFolder,
    read_folder,
    tokenizer_faults,
)
from toque.data.tokenizer.word_cache import Encoded, WordTable, kind_of
from toque.models.loading.provenance import Form
from toque.storage.no_follow import write_new

FamilyKind = Literal["decoder", "encoder-decoder"]
NEWLINE = "<newline>"
_EXTRA = re.compile(r"<extra_id_(\d+)>")
_PROBE = "Fold\n\n- 2 eggs\n1. Stir."
_SAMPLE = 32  # texts of every batch whose fast ids are compared with the tokenizer's own
_PREFIX = 4096  # characters of each that are: a whole recipe, the beginning of a book
_AROUND = 8  # ids before one that decide its text: a character's bytes, a line's beginning


class Codec:
    """Text <-> ids for one tokenizer; `load_codec` and `train_codec` make one."""

    def __init__(self, source: TokenizerFolder) -> None:
        with tokenizer_faults(source.name):
            self._take(source)

    def _take(self, source: TokenizerFolder) -> None:
        tokenizer, tokenizer_json, specials = source.tokenizer, source.json, source.specials
        # "<|endoftext|>" written in a scraped page is text, not the end of a recipe.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = source.name
        ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        holds_newline = tokenizer.decode(ids, skip_special_tokens=False) == _PROBE
        # The line-break marker, None when the vocabulary holds "\n" itself.
        self.newline_id = None if holds_newline else _newline_token(tokenizer)
        if self.newline_id is None and not holds_newline:
            tokenizer.add_special_tokens([AddedToken(NEWLINE, special=True, normalized=False)])
            self.newline_id = _id_of(tokenizer, NEWLINE)
            tokenizer_json = tokenizer.to_str()
        self.tokenizer_json = tokenizer_json  # as `save` writes it
        # Of tokenizer_config.json, but for classes and special tokens.
        self.settings: Mapping[str, Any] = source.settings
        forms = asdict(specials).items()
        self.special_tokens = {f"{name}_token": form for name, form in forms if form is not None}
        self._tokenizer = tokenizer
        self.sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        n_entries = int(tokenizer.get_vocab_size())
        if None in map(tokenizer.id_to_token, range(n_entries)):  # there are gaps
            n_entries = max(tokenizer.get_vocab().values()) + 1
        self.vocab_size = n_entries  # with a marker that had to be added
        self.eos_id = eos_id = _id_of(tokenizer, specials.eos)
        if source.eos_id is not None and tokenizer.id_to_token(source.eos_id) is not None:
            self.eos_id = source.eos_id
        self.pad_id = _id_of(tokenizer, specials.pad)  # eos where there is no padding token
        self.bos_id = _id_of(tokenizer, specials.bos) if specials.bos else None
        self.unk_id = _id_of(tokenizer, specials.unk) if specials.unk else None
        silent = (self.pad_id, eos_id, self.eos_id, self.bos_id)
        # The tokens that texts are written without.
        self.silent = frozenset(token for token in silent if token is not None)
        added = tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        sentinels = {i for i in special if _EXTRA.fullmatch(added[i].content)}
        # Tokens that texts of a model are shown without. Sentinels are what a T5 answers with.
        self.hidden = self.silent | (special - sentinels - {self.unk_id, self.newline_id})
        self._other_ends = frozenset[int]()
        self.end_also((eos_id, *source.end_ids))
        self.rewriter = Rewriter(
            tokenizer, unk_id=self.unk_id, specials=[added[i].content for i in sorted(special)]
        )
        self.word_kind = kind = kind_of(tokenizer_json)
        self._words = kind and WordTable(
            self.rewriter, kind=kind, break_id=self.newline_id, vocab_size=n_entries
        )

    def normalise(self, text: str) -> str:
        """`text` with what the vocabulary lacks replaced before encoding: 1½ -> 1 1/2, ñ -> n."""
        with tokenizer_faults(self.name):
            return self.rewriter(text)

    def encode(self, text: str) -> list[int]:
        r"""Ids of `text` without special tokens; "\n" becomes `newline_id` where there is one."""
        with tokenizer_faults(self.name):
            return self._encode_plainly([text])[0]

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Ids of many normalised texts, fast; one difference in a sample sends all the long way."""
        with tokenizer_faults(self.name):
            words = self._words
            if words is None:
                return self._encode_whole(texts)
            sample = [text[:_PREFIX] for text in texts[:: max(1, len(texts) // _SAMPLE)]]
            fast, right = self._encode_words(words, sample), self._encode_whole(sample)
            same = np.array_equal(fast.flat, right.flat) and np.array_equal(fast.ends, right.ends)
            if not same:
                return replace(self._encode_whole(texts), disagreed=True)
            return self._encode_words(words, texts)

    @cached_property
    def token_bytes(self) -> NDArray[np.int64] | None:
        """Bytes that each id writes; None unless the vocabulary spells bytes as characters."""
        decoder = json.loads(self.tokenizer_json).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for name, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(name)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            lengths[number] = 0 if number in self.silent else len(token.content.encode())
        return lengths

    def read_as_written(self) -> None:
        """Read prompts and texts of a model that Toque did not train as its tokenizer does.

        GPT-2's prompts begin with no token. A T5 has no line breaks: no sentinel stands for them.
        """
        with tokenizer_faults(self.name):
            own = self._tokenizer.encode("a", add_special_tokens=True).ids
        self.bos_id = self.bos_id if own[:1] == [self.bos_id] else None
        if self.newline_id is not None:
            self.hidden |= {self.newline_id}
            self.newline_id = self._words = None

    def end_with(self, token: int, *, is_eos_token: bool) -> None:
        """End texts with another token of the vocabulary: the one that ends a template's turns.

        A text that a model writes still ends at the previous one, too. `is_eos_token` makes it the
        `eos_token` of the tokenizer, which a template may write.
        """
        self._other_ends |= {self.eos_id}
        self.eos_id = token
        self.silent |= {token}
        self.hidden |= {token}
        if is_eos_token:
            self.special_tokens["eos_token"] = self.piece(token)

    def end_also(self, ids: Iterable[int], *, ordinary: bool = False) -> None:
        """End texts that a model writes with other tokens of the vocabulary, too.

        Ordinary pieces of text are left out unless `ordinary` is set: texts of training hold them.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        pieces = ((token, self._tokenizer.id_to_token(token)) for token in ids)
        ends = {token for token, piece in pieces if piece is not None}
        self._other_ends |= ends if ordinary else ends & added.keys()

    @property
    def end_ids(self) -> frozenset[int]:
        """Every token that ends a text which a model writes; training writes `eos_id`."""
        return self._other_ends | {self.eos_id}

    @property
    def ordered_ends(self) -> list[int]:
        """The same tokens, `eos_id` first."""
        return [self.eos_id, *sorted(self.end_ids - {self.eos_id})]

    @property
    def special_ids(self) -> dict[str, int | None]:
        """The ids that begin, end and fill rows, by name."""
        names = ("bos", "eos", "pad", "unk")
        return {f"the {name} token": getattr(self, f"{name}_id") for name in names}

    @property
    def break_id(self) -> int | None:
        """The token for a line break; None when it takes several tokens."""
        if self.newline_id is not None:
            return self.newline_id
        ids = self.encode("\n")
        return ids[-1] if self.decode(ids[-1:]) == "\n" else None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        r"""Text of `ids`; padding, end and begin are skipped, `newline_id` becomes "\n".

        `skip_special_tokens` skips all of `hidden`: a text of a model is shown like that.
        """
        skipped = self.hidden if skip_special_tokens else self.silent
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.newline_id:
                lines.append([])
            elif token not in skipped:
                lines[-1].append(int(token))
        with tokenizer_faults(self.name):
            decode = self._tokenizer.decode
            return "\n".join(decode(line, skip_special_tokens=False) for line in lines)

    def sentinels(self) -> list[int]:
        """The ids of `<extra_id_0>`, `<extra_id_1>`, ... without the line break's marker."""
        found = {
            int(match[1]): number
            for piece, number in self.pieces().items()
            if (match := _EXTRA.fullmatch(piece)) and number != self.newline_id
        }
        return [found[i] for i in sorted(found)]

    def piece(self, token: int) -> str:
        """A token as the vocabulary spells it; KeyError where there is none."""
        found = self._tokenizer.id_to_token(token)
        if found is None:
            raise KeyError(token)
        return str(found)

    def pieces(self) -> dict[str, int]:
        """Every token as the vocabulary spells it, with its id."""
        return self._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        """Write a Hugging Face tokenizer folder that AutoTokenizer reads; there is none yet."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
            write_new(folder / name, text.encode())

    def files(self) -> dict[str, str]:
        """The texts that `save` writes, by file name."""
        config = {
            **self.settings,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if len(self.end_ids) > 1:
            config[END_IDS] = self.ordered_ends
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        return {"tokenizer.json": self.tokenizer_json, "tokenizer_config.json": text}

    def _tokenize(self, texts: list[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def _encode_words(self, words: WordTable, texts: Sequence[str]) -> Encoded:
        found, odd = words.encode(texts)
        if not len(odd):
            return found
        whole = self._encode_whole([texts[i] for i in odd.tolist()])
        lengths, ends = np.diff(found.ends, prepend=0), found.ends[odd]
        pieces = np.split(found.flat, np.column_stack([ends - lengths[odd], ends]).ravel())
        pieces[1::2] = np.split(whole.flat, whole.ends[:-1])
        lengths[odd] = np.diff(whole.ends, prepend=0)
        return Encoded(np.concatenate(pieces), np.cumsum(lengths), found.lost + whole.lost)

    def _encode_whole(self, texts: Sequence[str]) -> Encoded:
        rewritten = [self.normalise(text) for text in texts]
        rows = self._encode_plainly(rewritten)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
        return Encoded(flat, np.cumsum(lengths), self.rewriter.lost(rewritten))

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
    """The codec of a Hugging Face tokenizer folder; DataError for none, or one without an end."""
    return Codec(read_folder(Path(folder)))


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)  # the whole vocabulary as a dict takes 40 ms
    if found is None:
        raise KeyError(token)
    return int(found)


def _newline_token(tokenizer: Tokenizer) -> int | None:
    if tokenizer.token_to_id(NEWLINE) is not None:
        return _id_of(tokenizer, NEWLINE)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    if "\n" in added:  # the marker of a tokenizer that was written for plain transformers
        return _id_of(tokenizer, "\n")
    for tokens in (added, tokenizer.get_vocab()):
        if numbers := [int(found[1]) for found in map(_EXTRA.fullmatch, tokens) if found]:
            return _id_of(tokenizer, f"<extra_id_{max(numbers)}>")
    return None


def prompt_bounds(codec: Codec, family_kind: FamilyKind) -> tuple[int | None, int | None]:
    """The tokens that begin and end a prompt."""
    if family_kind == "encoder-decoder":
        return None, codec.eos_id
    return codec.bos_id, codec.break_id


def asking_bounds(
    codec: Codec, family_kind: FamilyKind, form: Form
) -> tuple[int | None, int | None]:
    """The tokens that begin and end what is asked; a decoder of documents continues: no end.

    A conversation has none but those of its template.
    """
    if form == "conversations":
        return None, None
    begin, end = prompt_bounds(codec, family_kind)
    return begin, None if form == "documents" and family_kind == "decoder" else end


class TextStream:
    """Feed ids, get text in whole characters.

    All pieces together are `codec.decode` of all ids, without special tokens in what is written.
    Bytes that are whole characters by themselves keep them, though `decode` gives up all bytes of a
    run (Llama 2's `<0x0A><0xF0>`) for one that is no part of any. The tokenizers library's own
    stream raises an error there.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        # Ids from `_start` on are decoded together, for one decides how the next is written; their
        # text before `_end`, `_told`, has been given away.
        self._start, self._end, self._told = 0, 0, ""

    def feed(self, token: int, *, skip_special_tokens: bool = True) -> str:
        """The text that one more id settles, often one word, sometimes nothing."""
        codec = self._codec
        if token in (codec.hidden if skip_special_tokens else codec.silent):
            return ""
        self._ids.append(token)
        text = self._codec.decode(self._ids[self._start :])
        if len(text) <= len(self._told) or text.endswith("\ufffd"):  # half a character
            return ""
        return self._given(text)

    def would_be(self, token: int) -> str:
        """The text of one more id in this place; the name of a token that texts are without."""
        if token in self._codec.hidden:
            return self._codec.piece(token)
        before = self._ids[-_AROUND:]
        settled = self._codec.decode(before).rstrip("\ufffd")  # half a character
        return self._codec.decode([*before, token])[len(settled) :]

    def rest(self) -> str:
        """Text held back until now, to be called after the last id."""
        return self._given(self._codec.decode(self._ids[self._start :]))

    def _given(self, text: str) -> str:
        """The new end of the text from `_start` on, which counts as given away from now."""
        piece, new = text[len(self._told) :], self._codec.decode(self._ids[self._end :])
        # A space that stands first is stripped: the ids before it are kept, which let it stand.
        self._start, self._told = (self._end, new) if new else (self._start, text)
        self._end = len(self._ids)
        return piece
