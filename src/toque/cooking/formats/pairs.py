"""Tables and JSON records of a prompt and its answer: any task, the texts taken as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from toque.cooking.formats.payload import unpack
from toque.cooking.formats.reader import READ
from toque.cooking.formats.recognise import recognise
from toque.data.example import Block, BlockExamples, Example
from toque.data.excerpts import PER_REASON, shortened

NO_PROMPT, NO_TARGET = "no prompt", "no target"
_UNPRINTABLE = dict.fromkeys([*range(9), 11, 12, *range(14, 32), 127])


@dataclass(frozen=True)
class PairReader:
    """Reads the fields `prompt` and `target` of every record; a `RecordReader`.

    Nothing but control characters is taken out: these are the user's own texts. Pairs of one
    prompt are kept on one side of the split, because an answer seen is an answer learnt.
    """

    prompt: str
    target: str
    version: int = 1

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path`, as the recipe reader cuts them.

        Raises:
            DataError: the file is of no known kind, lacks a field, or is damaged.
        """
        return recognise(Path(path), self._columns).blocks()

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{recognise(Path(path), self._columns).schema} pairs"

    def examples(self, block: Block) -> BlockExamples:
        """An example per record that has both texts."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        texts: dict[int, str] = {}
        notes: Counter[str] = Counter()
        read = 0
        header, body = unpack(block)
        for number, raw in READ[header.kind](header, body, block.first_line):
            read += 1
            found = raw if isinstance(raw, str) else self._pair(raw, notes)
            if isinstance(found, str):
                numbers = dropped.setdefault(found, [])
                if len(numbers) < PER_REASON:
                    texts[number] = shortened(str(raw))
                numbers.append(number)
            else:
                examples.append(found)
        return BlockExamples(examples, read, len(examples), dropped, dict(notes), texts)

    @property
    def _columns(self) -> dict[str, str]:
        return {"prompt": self.prompt, "target": self.target}

    def _pair(self, record: dict[str, Any], notes: Counter[str]) -> Example | str:
        prompt, target = (_text(record.get(name), notes) for name in (self.prompt, self.target))
        if not prompt.strip():
            return NO_PROMPT
        if not target.strip():
            return NO_TARGET
        key = xxhash.xxh3_64_intdigest(prompt.casefold().encode())
        whole = xxhash.xxh3_64_intdigest(f"{prompt}\0{target}".casefold().encode())
        return Example(prompt=prompt, target=target, key=key, title_key=0, record_key=whole)


def _text(value: object, notes: Counter[str]) -> str:
    """A field's text; numbers become text, anything else is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = str(value).encode("utf-8", "replace").decode()
    if text.isprintable():
        return text
    cleaned = text.translate(_UNPRINTABLE)
    if cleaned != text:
        notes["control characters removed"] += 1
    return cleaned
