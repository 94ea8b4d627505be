r"""Codec: text to token ids and back, with line breaks.

Recipes need line breaks, which T5's vocabulary does not have. If a vocabulary has no "\n", a marker
replaces it: the spare `<extra_id_N>` with the highest number, or an added token `<newline>`.
Byte-level vocabularies (GPT-2, NeoX, Llama) have "\n".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer

from toque.data.array_types import Ints
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
_SAMPLE_TEXTS = 32  # texts per call for which the cache's ids are checked
# Characters checked per text: an entire recipe, or the beginning of a book.
_SAMPLE_CHARS = 4096
# Ids before a token that decide its text: the bytes of a character, or the beginning of a line.
_CONTEXT_IDS = 8


class Codec:
    """Encoder and decoder for one tokenizer. `load_codec` and `train_codec` create it."""

    def __init__(self, source: TokenizerFolder) -> None:
        with tokenizer_faults(source.name):
            self._load(source)

    def _load(self, source: TokenizerFolder) -> None:
        tokenizer = source.tokenizer
        # "<|endoftext|>" in a scraped page is text and does not end a recipe.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.name = source.name
        self._tokenizer = tokenizer
        # Settings of tokenizer_config.json, without classes and special tokens.
        self.settings: Mapping[str, Any] = source.settings
        self.special_tokens = dict(source.special_tokens)

        self._set_newline(source.json)
        self.sha256 = hashlib.sha256(self.tokenizer_json.encode()).hexdigest()
        n_entries = int(tokenizer.get_vocab_size())
        if None in map(tokenizer.id_to_token, range(n_entries)):  # the ids have gaps
            n_entries = max(tokenizer.get_vocab().values()) + 1
        self.vocab_size = n_entries  # number of entries, including an added marker

        added = tokenizer.get_added_tokens_decoder()
        special = {number for number, token in added.items() if token.special}
        self._set_special_ids(source, special)
        self.rewriter = Rewriter(
            tokenizer,
            unk_id=self.unk_id,
            specials=[added[i].content for i in sorted(special)],
        )
        self.word_kind = kind_of(self.tokenizer_json)
        self._words: WordTable | None = None
        if self.word_kind is not None:
            self._words = WordTable(
                self.rewriter,
                kind=self.word_kind,
                break_id=self.newline_id,
                vocab_size=n_entries,
            )

    def _set_newline(self, tokenizer_json: str) -> None:
        """Find the line-break marker, or add a marker to the tokenizer."""
        tokenizer = self._tokenizer
        # Id of the line-break marker. None if the vocabulary has "\n".
        self.newline_id: int | None = None
        self.tokenizer_json = tokenizer_json  # the content of tokenizer.json in `save`
        ids = tokenizer.encode(_PROBE, add_special_tokens=False).ids
        if tokenizer.decode(ids, skip_special_tokens=False) == _PROBE:
            return
        self.newline_id = _newline_token(tokenizer)
        if self.newline_id is None:
            marker = AddedToken(NEWLINE, special=True, normalized=False)
            tokenizer.add_special_tokens([marker])
            self.newline_id = _id_of(tokenizer, NEWLINE)
            self.tokenizer_json = tokenizer.to_str()

    def _set_special_ids(self, source: TokenizerFolder, special: set[int]) -> None:
        """Set the ids of special tokens, and the ids that decoding skips or that end a text."""
        tokenizer = self._tokenizer
        ids_of = {
            name: _id_of(tokenizer, token)
            for name, token in self.special_tokens.items()
        }
        eos_id = ids_of["eos_token"]
        self.eos_id = eos_id
        if (
            source.eos_id is not None
            and tokenizer.id_to_token(source.eos_id) is not None
        ):
            self.eos_id = source.eos_id
        self.pad_id = ids_of["pad_token"]  # the end token, if padding has no token
        self.bos_id = ids_of.get("bos_token")
        self.unk_id = ids_of.get("unk_token")

        # Tokens that decoding always skips.
        silent = (self.pad_id, eos_id, self.eos_id, self.bos_id)
        self.silent = frozenset(token for token in silent if token is not None)
        # Tokens that are not shown in generated texts. Sentinels are shown, because a T5 answers
        # with them.
        sentinels = {i for i in special if _EXTRA.fullmatch(self.piece(i))}
        shown = sentinels | {self.unk_id, self.newline_id}
        self.hidden = self.silent | (special - shown)
        self._other_ends = frozenset[int]()
        self.add_ends((eos_id, *source.end_ids))

    def normalise(self, text: str) -> str:
        """Replace characters that are not in the vocabulary: 1½ -> 1 1/2, ñ -> n."""
        with tokenizer_faults(self.name):
            return self.rewriter(text)

    def encode(self, text: str) -> list[int]:
        r"""Encode text without special tokens. "\n" becomes `newline_id`, if there is a marker."""
        with tokenizer_faults(self.name):
            return self._encode_lines([text])[0]

    def encode_flat(self, texts: Sequence[str]) -> Encoded:
        """Normalise and encode many texts with the word cache.

        If the cache gives wrong ids for a sample of the texts, encode all texts without it.
        """
        with tokenizer_faults(self.name):
            if self._words is None:
                return self._encode_slowly(texts)
            step = max(1, len(texts) // _SAMPLE_TEXTS)
            sample = [text[:_SAMPLE_CHARS] for text in texts[::step]]
            fast = self._encode_words(self._words, sample)
            slow = self._encode_slowly(sample)
            has_same_ids = np.array_equal(fast.flat, slow.flat)
            if has_same_ids and np.array_equal(fast.ends, slow.ends):
                return self._encode_words(self._words, texts)
            return replace(self._encode_slowly(texts), disagreed=True)

    @cached_property
    def token_bytes(self) -> Ints | None:
        """Number of text bytes per id. None if the vocabulary is not byte-level."""
        decoder = json.loads(self.tokenizer_json).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        lengths = np.zeros(self.vocab_size, np.int64)
        for name, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            lengths[number] = len(name)
        for number, token in self._tokenizer.get_added_tokens_decoder().items():
            is_silent = number in self.silent
            lengths[number] = 0 if is_silent else len(token.content.encode())
        return lengths

    def use_plain_rules(self) -> None:
        """Use only the tokenizer's own rules, for a model that Toque did not train.

        A GPT-2's prompts then have no begin token, and no sentinel replaces a T5's line breaks.
        """
        with tokenizer_faults(self.name):
            ids = self._tokenizer.encode("a", add_special_tokens=True).ids
        if ids[:1] != [self.bos_id]:
            self.bos_id = None
        if self.newline_id is not None:
            self.hidden |= {self.newline_id}
            self.newline_id = None
            self._words = None

    def set_end(self, token: int, *, is_eos_token: bool) -> None:
        """End texts with `token`, e.g. because it ends the turns of a chat template.

        The previous end token still ends generated texts. `is_eos_token` makes `token` the
        tokenizer's `eos_token`, for templates that write it.
        """
        self._other_ends |= {self.eos_id}
        self.eos_id = token
        self.silent |= {token}
        self.hidden |= {token}
        if is_eos_token:
            self.special_tokens["eos_token"] = self.piece(token)

    def add_ends(self, ids: Iterable[int], *, ordinary: bool = False) -> None:
        """Add tokens that end generated texts. Ids outside the vocabulary are ignored.

        Ordinary pieces of text are ignored too unless `ordinary` is set, because training texts
        have them.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        ends = {
            token for token in ids if self._tokenizer.id_to_token(token) is not None
        }
        self._other_ends |= ends if ordinary else ends & added.keys()

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of all tokens that end a generated text. Training texts end with `eos_id`."""
        return self._other_ends | {self.eos_id}

    @property
    def ordered_ends(self) -> list[int]:
        """List of `end_ids` that starts with `eos_id`."""
        return [self.eos_id, *sorted(self.end_ids - {self.eos_id})]

    @property
    def special_ids(self) -> dict[str, int | None]:
        """Ids of the begin, end, padding and unknown tokens, by name."""
        names = ("bos", "eos", "pad", "unk")
        return {f"the {name} token": getattr(self, f"{name}_id") for name in names}

    @property
    def break_id(self) -> int | None:
        """Id of a line break. None if a line break takes several tokens."""
        if self.newline_id is not None:
            return self.newline_id
        ids = self.encode("\n")
        return ids[-1] if self.decode(ids[-1:]) == "\n" else None

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        r"""Decode ids to text without begin, end and padding. `newline_id` becomes "\n".

        `skip_special_tokens` skips all `hidden` tokens, as for generated texts.
        """
        skipped = self.hidden if skip_special_tokens else self.silent
        lines: list[list[int]] = [[]]
        for token in ids:
            if token == self.newline_id:
                lines.append([])
            elif token not in skipped:
                lines[-1].append(int(token))
        decode = self._tokenizer.decode
        with tokenizer_faults(self.name):
            return "\n".join(decode(line, skip_special_tokens=False) for line in lines)

    def sentinels(self) -> list[int]:
        """List the ids of `<extra_id_0>`, `<extra_id_1>`, ..., without the line-break marker."""
        id_of_sentinel: dict[int, int] = {}
        for piece, number in self.pieces().items():
            match = _EXTRA.fullmatch(piece)
            if match and number != self.newline_id:
                id_of_sentinel[int(match[1])] = number
        return [id_of_sentinel[i] for i in sorted(id_of_sentinel)]

    def piece(self, token: int) -> str:
        """Look up the text of a token in the vocabulary.

        Raises:
            KeyError: The vocabulary does not have the id.
        """
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            raise KeyError(token)
        return str(piece)

    def pieces(self) -> dict[str, int]:
        """Return the vocabulary: the id of each token."""
        return self._tokenizer.get_vocab()

    def save(self, folder: Path) -> None:
        """Write a new Hugging Face tokenizer folder that AutoTokenizer reads."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files().items():
            write_new(folder / name, text.encode())

    def files(self) -> dict[str, str]:
        """Return the texts of the files that `save` writes, by file name."""
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

    def _encode_words(self, words: WordTable, texts: Sequence[str]) -> Encoded:
        """Encode texts with the word cache, and the texts that it cannot encode without it."""
        cached, odd = words.encode(texts)
        if not len(odd):
            return cached
        slow = self._encode_slowly([texts[i] for i in odd.tolist()])
        lengths = np.diff(cached.ends, prepend=0)
        odd_ends = cached.ends[odd]
        odd_starts = odd_ends - lengths[odd]
        # The parts alternate: ids before an odd text, then the wrong ids of the odd text.
        parts = np.split(cached.flat, np.column_stack([odd_starts, odd_ends]).ravel())
        parts[1::2] = np.split(slow.flat, slow.ends[:-1])
        lengths[odd] = np.diff(slow.ends, prepend=0)
        lost = cached.lost + slow.lost
        return Encoded(np.concatenate(parts), np.cumsum(lengths), lost)

    def _encode_slowly(self, texts: Sequence[str]) -> Encoded:
        """Normalise and encode texts without the word cache."""
        rewritten = [self.normalise(text) for text in texts]
        rows = self._encode_lines(rewritten)
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
        return Encoded(flat, np.cumsum(lengths), self.rewriter.lost(rewritten))

    def _encode_lines(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, line by line if a marker separates lines."""
        marker = [] if self.newline_id is None else [self.newline_id]
        lines_of_texts = [text.split("\n") if marker else [text] for text in texts]
        all_lines = list(chain.from_iterable(lines_of_texts))
        encodings = iter(
            self._tokenizer.encode_batch_fast(all_lines, add_special_tokens=False)
        )
        rows = []
        for lines in lines_of_texts:
            row = next(encodings).ids
            for _ in lines[1:]:
                row += marker + next(encodings).ids
            rows.append(row)
        return rows


def load_codec(folder: Path | str) -> Codec:
    """Load the codec of a Hugging Face tokenizer folder.

    Raises:
        DataError: The folder has no usable tokenizer, or its vocabulary has no end token.
    """
    return Codec(read_folder(Path(folder)))


def _id_of(tokenizer: Tokenizer, token: str) -> int:
    """Look up the id of a token.

    Raises:
        KeyError: The vocabulary does not have the token.
    """
    number = tokenizer.token_to_id(token)  # faster than `get_vocab`, which takes 40 ms
    if number is None:
        raise KeyError(token)
    return int(number)


def _newline_token(tokenizer: Tokenizer) -> int | None:
    """Find the line-break marker in the vocabulary. None if it has no marker."""
    if tokenizer.token_to_id(NEWLINE) is not None:
        return _id_of(tokenizer, NEWLINE)
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    # The marker in a tokenizer that was exported to plain transformers.
    if "\n" in added:
        return _id_of(tokenizer, "\n")
    for tokens in (added, tokenizer.get_vocab()):
        matches = [match for match in map(_EXTRA.fullmatch, tokens) if match]
        if matches:
            number = max(int(match[1]) for match in matches)
            return _id_of(tokenizer, f"<extra_id_{number}>")
    return None


def prompt_bounds(
    codec: Codec, family_kind: FamilyKind
) -> tuple[int | None, int | None]:
    """Return the ids before and after the text of a stored prompt."""
    if family_kind == "encoder-decoder":
        return None, codec.eos_id
    return codec.bos_id, codec.break_id


def generation_bounds(
    codec: Codec, family_kind: FamilyKind, form: Form
) -> tuple[int | None, int | None]:
    """Return the ids before and after the text of a prompt for generation.

    A decoder of documents continues the text, so no id follows it. A chat template writes its own
    tokens.
    """
    if form == "conversations":
        return None, None
    begin, end = prompt_bounds(codec, family_kind)
    if form == "documents" and family_kind == "decoder":
        end = None
    return begin, end


class TextStream:
    """Incremental decoder: takes ids one by one and returns text in complete characters.

    The returned pieces together equal `codec.decode` of all ids without special tokens, except for
    invalid bytes: `decode` also replaces the valid bytes next to them (Llama 2's `<0x0A><0xF0>`),
    but the stream has already returned these. The stream of the tokenizers library raises an error
    for invalid bytes.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        # The text of an id depends on the ids before it, so the ids from `_start` are decoded
        # together. `_shown` is the text of the ids from `_start` to `_end`, already returned.
        self._start = 0
        self._end = 0
        self._shown = ""

    def feed(self, token: int, *, skip_special_tokens: bool = True) -> str:
        """Add an id and return the text that is now complete: often a word, sometimes nothing."""
        codec = self._codec
        skipped = codec.hidden if skip_special_tokens else codec.silent
        if token in skipped:
            return ""
        self._ids.append(token)
        text = codec.decode(self._ids[self._start :])
        # A replacement character may be the first half of a character.
        if len(text) <= len(self._shown) or text.endswith("\ufffd"):
            return ""
        return self._advance(text)

    def decode_next(self, token: int) -> str:
        """Decode `token` as if it came next. Of a hidden token, return the name."""
        if token in self._codec.hidden:
            return self._codec.piece(token)
        context = self._ids[-_CONTEXT_IDS:]
        # An incomplete character at the end belongs to the text of `token`.
        complete = self._codec.decode(context).rstrip("\ufffd")
        return self._codec.decode([*context, token])[len(complete) :]

    def flush(self) -> str:
        """Return the remaining text after the last id."""
        return self._advance(self._codec.decode(self._ids[self._start :]))

    def _advance(self, text: str) -> str:
        """Return the new end of `text`, and move `_start` and `_end`."""
        piece = text[len(self._shown) :]
        last = self._codec.decode(self._ids[self._end :])
        if last:
            self._start = self._end
            self._shown = last
        else:
            # Decoding strips a leading space. With the ids before it, the space remains.
            self._shown = text
        self._end = len(self._ids)
        return piece
