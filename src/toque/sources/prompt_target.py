"""Prompt-target pairs of any task, from tables and JSON records; the texts are kept as they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from toque.sources.blocks import Contents, Raw, unpack
from toque.sources.decompress import UTF_8
from toque.sources.detect import READ, layout_with
from toque.sources.excerpts import PER_REASON, shortened
from toque.sources.json_records import decode_line, line_of, typed_records
from toque.sources.records import Block, BlockExamples, Example, attempted, in_encoding

PAIRS: Final = "toque.cooking.formats:pairs="
"""Beginning of its recorded names."""
NO_PROMPT, NO_TARGET = "no prompt", "no target"
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_ASCII = bytes(range(128))
_UNPRINTABLE = dict.fromkeys(_CONTROLS)


class Pair(msgspec.Struct, gc=False):
    """The two texts of a record; None for a missing one."""

    prompt: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class PairReader:
    """Reads the fields `prompt` and `target` of every record; a `RecordReader`.

    Only control characters are removed: these are the user's own texts. Pairs with the same prompt
    stay on one side of the split, because the model would have seen the answer.
    """

    prompt: str
    target: str
    version: int = 1
    encoding: str = UTF_8

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout.

        Raises:
            DataError: the file is of no known kind, lacks a field, or is damaged.
        """
        layout = layout_with(path, self._columns, encoding=self.encoding)
        return layout.blocks((self.prompt, self.target))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{layout_with(path, self._columns, encoding=self.encoding).name} pairs"

    def examples(self, block: Block) -> BlockExamples:
        """One example for each record that has both texts."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        texts: dict[int, str] = {}
        notes: Counter[str] = Counter()
        contents = unpack(block)
        records: Iterable[tuple[int, Pair | Raw]] | None
        records = self._plain_pairs(contents)
        if records is None:
            records = READ[contents.kind](contents)
        read = 0
        for number, record in records:
            read += 1
            if isinstance(record, dict):
                found = attempted(self._example_of, record, notes)
            else:
                found = attempted(_example, record)
            if isinstance(found, Example):
                examples.append(found)
                continue
            numbers = dropped.setdefault(found, [])
            if len(numbers) < PER_REASON:
                whole = record
                if isinstance(record, Pair):
                    whole = attempted(decode_line, line_of(contents, number))
                texts[number] = shortened(str(whole))
            numbers.append(number)
        return BlockExamples(examples, read, len(examples), dropped, dict(notes), texts)

    def _example_of(self, record: Mapping[str, Any], notes: Counter[str]) -> Example | str:
        prompt, target = (_text(record.get(name), notes) for name in (self.prompt, self.target))
        return _example(Pair(prompt, target))

    @property
    def recorded_name(self) -> str:
        """See `RecordReader`."""
        columns = json.dumps(self._columns, sort_keys=True)
        return in_encoding(f"{PAIRS}{columns}", self.encoding)

    @property
    def _columns(self) -> dict[str, str]:
        return {"prompt": self.prompt, "target": self.target}

    def _plain_pairs(self, contents: Contents) -> list[tuple[int, Pair]] | None:
        """The pairs of a block of JSON whose fields are texts without control characters.

        All are decoded and checked together, ten times as fast as one by one; None if the block
        holds anything else.
        """
        if contents.kind not in ("json-lines", "json") or self.prompt == self.target:
            return None
        pairs = typed_records(contents, _decoder(self.prompt, self.target))
        if pairs is None:
            return None
        texts = [text for _, pair in pairs for text in (pair.prompt, pair.target) if text]
        data = "\n".join(texts).encode()
        return pairs if len(data.translate(None, _CONTROLS)) == len(data) else None


def casefolded(text: str) -> bytes:
    """A text case-folded, in UTF-8: `text.casefold().encode()`, but faster for mostly-ASCII text.

    >>> casefolded("Crème BRÛLÉE 1½ Straße").decode()
    'crème brûlée 1½ strasse'
    """
    data = text.encode()
    if len(data) != len(text):
        # Each character is folded by itself, and most foreign ones stay as they are: ° ½ ’ é.
        foreign = data.translate(None, _ASCII).decode()
        if foreign.casefold() != foreign:
            return text.casefold().encode()
    return data.lower()


def _example(pair: Pair | str) -> Example | str:
    """The example of a pair, or the reason why there is none."""
    if isinstance(pair, str):
        return pair
    prompt, target = pair.prompt, pair.target
    if not prompt or prompt.isspace():
        return NO_PROMPT
    if not target or target.isspace():
        return NO_TARGET
    asked = casefolded(prompt)
    key = xxhash.xxh3_64_intdigest(asked)
    whole = xxhash.xxh3_64_intdigest(b"\0".join((asked, casefolded(target))))
    return Example(prompt, target, key, 0, whole)


@lru_cache(maxsize=8)
def _decoder(prompt: str, target: str) -> msgspec.json.Decoder[Pair]:
    fields = [("prompt", str | None, None), ("target", str | None, None)]
    names = {"prompt": prompt, "target": target}
    kind = msgspec.defstruct("NamedPair", fields, bases=(Pair,), rename=names, gc=False)
    return msgspec.json.Decoder(kind)


def _text(value: object, notes: Counter[str]) -> str:
    """A field's text; numbers become text, anything else is empty."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(value).encode("utf-8", "replace").decode()
    if text.isprintable():
        return text
    cleaned = text.translate(_UNPRINTABLE)
    if cleaned != text:
        notes["control characters removed"] += 1
    return cleaned
