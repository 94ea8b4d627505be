"""Prompt-target pairs of any task, from tables and JSON records; the texts are kept as they are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import xxhash

from toque.sources.decompress import UTF_8
from toque.sources.json_records import decoded_together
from toque.sources.layouts import READ, layout_with
from toque.sources.records import (
    PER_REASON,
    Block,
    BlockExamples,
    Contents,
    Example,
    Raw,
    attempted,
    in_encoding,
    is_filled,
    shortened,
    unpack,
    unused_in,
)

PAIRS: Final = "toque.cooking.formats:pairs="
"""Beginning of its recorded names."""
NO_PROMPT, NO_TARGET = "no prompt", "no target"
_CONTROLS = bytes([*range(9), 11, 12, *range(14, 32), 127])
_ASCII = bytes(range(128))
_UNPRINTABLE = dict.fromkeys(_CONTROLS)


Columns = Mapping[str, str | tuple[str, ...]]
"""The fields of a source by their role; a prompt may be made of several."""


@dataclass(frozen=True)
class PairReader:
    """Reads the fields `prompt` and `target` of every record; a `RecordReader`.

    A prompt of several fields is those that are filled, in this order, with a blank line between
    them. Only control characters are removed: these are the user's own texts. Pairs with the same
    prompt stay on one side of the split, because the model would have seen the answer.
    """

    prompt: str | tuple[str, ...]
    target: str
    version: int = 1
    encoding: str = UTF_8

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout.

        Raises:
            DataError: the file is of no known kind, lacks a field, or is damaged.
        """
        layout = layout_with(path, self._columns, encoding=self.encoding)
        return layout.blocks((*self._asked, self.target))

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
        plain = self._plain_records(contents)
        records = list(READ[contents.kind](contents)) if plain is None else plain
        for number, record in records:
            found: Example | str = (
                record
                if isinstance(record, str)
                else attempted(self._example_of, record, notes, plain=plain is not None)
            )
            if isinstance(found, Example):
                examples.append(found)
                continue
            numbers = dropped.setdefault(found, [])
            if len(numbers) < PER_REASON:
                texts[number] = shortened(str(record))
            numbers.append(number)
        used = {*self._asked, self.target}
        unused = unused_in((raw for _, raw in records), used, contents.meta.get("unread", ()))
        n_read = len(records)
        return BlockExamples(examples, n_read, len(examples), dropped, dict(notes), unused, texts)

    def _example_of(
        self, record: Mapping[str, Any], notes: Counter[str], *, plain: bool
    ) -> Example | str:
        """The example of a record, or the reason why there is none."""

        def text(value: Any) -> str:
            return value or "" if plain else _text(value, notes)

        parts: list[str] = []
        for name in self._asked:
            value = record.get(name)
            if isinstance(value, list) and all(isinstance(line, str) for line in value):
                value = "\n".join(value)  # choices
            part = text(value)
            if part and not part.isspace():
                parts.append(part)
            elif not part and is_filled(value):
                return f"{name} holds no text"  # which the question may need
        if not parts:
            return NO_PROMPT
        prompt = "\n\n".join(parts)
        target = text(_first_answer(record.get(self.target), notes))
        if not target or target.isspace():
            return NO_TARGET
        asked = casefolded(prompt)
        key = xxhash.xxh3_64_intdigest(asked)
        whole = xxhash.xxh3_64_intdigest(b"\0".join((asked, casefolded(target))))
        return Example(prompt, target, key, 0, whole)

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
        columns = {"prompt": self.prompt, "target": self.target}
        return in_encoding(f"{PAIRS}{json.dumps(columns)}", self.encoding)

    @cached_property
    def _asked(self) -> tuple[str, ...]:
        """The fields of the prompt."""
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    @property
    def _columns(self) -> dict[str, str]:
        parts = {f"prompt, part {n}": name for n, name in enumerate(self._asked, start=1)}
        prompt = {"prompt": self.prompt} if isinstance(self.prompt, str) else parts
        return prompt | {"target": self.target}

    def _plain_records(self, contents: Contents) -> list[tuple[int, Raw]] | None:
        """The records of a block of JSON whose texts hold no control characters.

        All are decoded and checked together, several times as fast as one by one; None if the
        block holds anything else.
        """
        if contents.kind not in ("json-lines", "json"):
            return None
        records = decoded_together(contents)
        if records is None:
            return None
        names = (*self._asked, self.target)
        values = [v for _, record in records for n in names if (v := record.get(n)) is not None]
        if not all(isinstance(value, str) for value in values):
            return None
        data = "\n".join(values).encode()
        return [*records] if len(data.translate(None, _CONTROLS)) == len(data) else None


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


def _first_answer(value: Any, notes: Counter[str]) -> Any:
    """The first of several answers, as SQuAD lists them; any other value as it is."""
    answers = value.get("text") if isinstance(value, dict) else value
    if not isinstance(answers, list):
        return value
    notes["answers beside a question's first left out"] += len(answers) > 1
    return answers[0] if answers else None


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
