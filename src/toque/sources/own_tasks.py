"""Tasks of a user's own: what is asked of a record and what the answer is, by templates over it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import xxhash

from toque.errors import DataError
from toque.sources.decompress import UTF_8
from toque.sources.documents import PAIRS, PairReader, named_columns
from toque.sources.layouts import (
    FileLayout,
    absent_fields,
    layout_for,
    layout_with,
    read_records,
    refuse_missing,
)
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    Source,
    TaskTemplate,
    examples_note,
    in_encoding,
    missing_note,
)


@dataclass(frozen=True)
class TaskReader:
    """Reads one example of each task from every record; a `RecordReader`.

    All examples of a record are on the side of the split that the prompt of its first one decides,
    so records with that prompt in common stay together.
    """

    tasks: Mapping[str, TaskTemplate]
    first_code: int  # number of the first of them in the column `task`
    fit: tuple[str, ...] | None = None  # those whose columns its files have; None: not known yet
    version: int = 3
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`. Metrics change no example."""
        own = {
            name: [code, task.prompt, task.target, task.classes]
            for code, (name, task) in enumerate(self.tasks.items(), start=self.first_code)
            if name in self._pairs
        }
        return in_encoding(f"{PAIRS}{json.dumps({'tasks': own})}", self.encoding)

    @property
    def task_names(self) -> dict[int, str]:
        """Names of all tasks by their number in the column `task`."""
        return dict(enumerate(self.tasks, start=self.first_code))

    @cached_property
    def _pairs(self) -> dict[str, PairReader]:
        return {
            name: PairReader(task.prompt, task.target)
            for name, task in self.tasks.items()
            if self.fit is None or name in self.fit
        }

    def columns_of(self, name: str) -> dict[str, str]:
        """The columns of a task's templates, by what an error calls them."""
        task = self.tasks[name]
        return named_columns({f"prompt of {name}": task.prompt, f"target of {name}": task.target})

    def for_file(self, path: Path) -> Self:
        """The reader of the tasks whose columns a file has; DataError where it has none's."""
        columns = {name: self.columns_of(name) for name in self.tasks}
        names = {column for of_task in columns.values() for column in of_task.values()}
        layout = layout_for(path, names, encoding=self.encoding)
        absent = absent_fields(layout, names)
        fit = [name for name in self.tasks if absent.isdisjoint(columns[name].values())]
        if not fit:
            refuse_missing(path, layout, next(iter(columns.values())))
        return replace(self, fit=tuple(fit))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout."""
        return self._layout(path).blocks(tuple(self._used))

    def schema(self, path: Path) -> str:
        """The file's layout and its tasks, for the report."""
        return f"{self._layout(path).name} rows for {', '.join(self._pairs)}"

    def examples(self, block: Block) -> BlockExamples:
        """The examples of each record that has the texts of any task."""
        return read_records(block, self._examples_of, self._used)

    @cached_property
    def _used(self) -> dict[str, None]:
        return {column: None for name in self._pairs for column in self.columns_of(name).values()}

    def _layout(self, path: Path) -> FileLayout:
        columns = {k: v for name in self._pairs for k, v in self.columns_of(name).items()}
        return layout_with(path, columns, encoding=self.encoding)

    def _examples_of(self, record: Mapping[str, Any], notes: Counter[str]) -> list[Example] | str:
        made: list[Example] = []
        without: dict[str, str] = {}
        for code, name in self.task_names.items():
            task = self.tasks[name]
            if name not in self._pairs:
                continue
            found = self._pairs[name].example_of(record, notes)
            if isinstance(found, Example) and task.classes:
                answer = found.target.strip()
                if answer in map(str.strip, task.classes):
                    notes[class_note(name, answer)] += 1
                    found = msgspec.structs.replace(found, target=answer)
                else:
                    found = f"an answer that is no class of {name}"
            if isinstance(found, str):
                without[name] = found
                continue
            notes[examples_note(name)] += 1
            made.append(msgspec.structs.replace(found, task=code))
        if not made:
            return next(iter(without.values()))
        notes.update(missing_note(name, why) for name, why in without.items())
        # With the tasks, for neighbours of one text each that are of two tasks are two records.
        parts = (part for e in made for part in (str(e.task), e.prompt, e.target))
        whole = xxhash.xxh3_64_intdigest(b"\0".join(part.encode() for part in parts))
        key = made[0].key
        return [msgspec.structs.replace(e, key=key, record_key=whole) for e in made]


def class_note(task: str, answer: str) -> str:
    """Key of the note that counts the examples of a class."""
    return f"{examples_note(task)}, answer {answer}"


def refuse_absent(sources: Iterable[Source], tasks: Iterable[str]) -> None:
    """Raise a DataError where the columns that a task is made of are together in no file."""
    every = [reader for source in sources for reader in (source.reader, *source.readers.values())]
    own = [reader for reader in every if isinstance(reader, TaskReader)]
    for task in tasks:
        if any(reader.fit is None or task in reader.fit for reader in own):
            continue
        names = {column for reader in own for column in reader.columns_of(task).values()}
        shown = ", ".join(sorted(names)) if names else "of its own"
        raise DataError(
            f"data.tasks.{task} is made of the columns {shown}, which no file of data.sources has "
            "together. Correct its templates, or add records that have them; a source with "
            "`columns` of its own, or of plain text, gives no example of a task of yours."
        )
