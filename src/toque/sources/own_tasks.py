"""User-defined tasks: templates that make prompts and targets from the fields of a record."""

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
    add_encoding,
    examples_note,
    missing_note,
)


@dataclass(frozen=True)
class TaskReader:
    """`RecordReader` that makes one example per task of every record.

    The prompt of a record's first example assigns all its examples to training or validation, so
    records with the same first prompt stay together.
    """

    tasks: Mapping[str, TaskTemplate]
    first_code: int
    """Code of the first task in the column `task`."""
    fit: tuple[str, ...] | None = None
    """Tasks with all their columns in the file, or None if unknown."""
    version: int = 3
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`. Metrics are not part of it."""
        tasks = {
            name: [code, task.prompt, task.target, task.classes]
            for code, (name, task) in enumerate(
                self.tasks.items(), start=self.first_code
            )
            if name in self._pairs
        }
        return add_encoding(f"{PAIRS}{json.dumps({'tasks': tasks})}", self.encoding)

    @property
    def task_names(self) -> dict[int, str]:
        """Task names by code in the column `task`."""
        return dict(enumerate(self.tasks, start=self.first_code))

    @cached_property
    def _pairs(self) -> dict[str, PairReader]:
        return {
            name: PairReader(task.prompt, task.target)
            for name, task in self.tasks.items()
            if self.fit is None or name in self.fit
        }

    def columns_of(self, name: str) -> dict[str, str]:
        """Return the columns of a task's templates by their name in errors."""
        task = self.tasks[name]
        return named_columns(
            {f"prompt of {name}": task.prompt, f"target of {name}": task.target}
        )

    def for_file(self, path: Path) -> Self:
        """Select the tasks that have all their columns in a file.

        Raises:
            DataError: No task has all of its columns in the file.
        """
        columns = {name: self.columns_of(name) for name in self.tasks}
        names = {column for of_task in columns.values() for column in of_task.values()}
        layout = layout_for(path, names, encoding=self.encoding)
        absent = absent_fields(layout, names)
        fit = [name for name in self.tasks if absent.isdisjoint(columns[name].values())]
        if not fit:
            refuse_missing(path, layout, next(iter(columns.values())))
        return replace(self, fit=tuple(fit))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of rows."""
        return self._layout(path).blocks(tuple(dict.fromkeys(self._columns.values())))

    def schema(self, path: Path) -> str:
        """Return the layout of a file and its tasks, for the report."""
        return f"{self._layout(path).name} rows for {', '.join(self._pairs)}"

    def examples(self, block: Block) -> BlockExamples:
        """Make the examples from each record that has the texts for at least one task."""
        return read_records(block, self._examples_of, {*self._columns.values()})

    @cached_property
    def _columns(self) -> dict[str, str]:
        """Columns of all tasks by their name in errors."""
        columns: dict[str, str] = {}
        for name in self._pairs:
            columns |= self.columns_of(name)
        return columns

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, self._columns, encoding=self.encoding)

    def _examples_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Example] | str:
        """Make the examples of a record, or return the reason for dropping the record."""
        examples: list[Example] = []
        missing: dict[str, str] = {}
        for code, name in self.task_names.items():
            if name not in self._pairs:
                continue
            example = self._example_of(name, record, notes)
            if isinstance(example, str):
                missing[name] = example
            else:
                notes[examples_note(name)] += 1
                examples.append(msgspec.structs.replace(example, task=code))
        if not examples:
            return next(iter(missing.values()))

        notes.update(missing_note(name, reason) for name, reason in missing.items())
        # The key includes the tasks, because records of different tasks are not duplicates.
        parts = [part for e in examples for part in (str(e.task), e.prompt, e.target)]
        keys = {
            "key": examples[0].key,
            "record_key": xxhash.xxh3_64_intdigest("\0".join(parts).encode()),
        }
        return [msgspec.structs.replace(example, **keys) for example in examples]

    def _example_of(
        self, name: str, record: Mapping[str, Any], notes: Counter[str]
    ) -> Example | str:
        """Make the example of a task, or return the reason for leaving it out."""
        example = self._pairs[name].example_of(record, notes)
        classes = self.tasks[name].classes
        if isinstance(example, str) or not classes:
            return example
        answer = example.target.strip()
        if answer not in map(str.strip, classes):
            return f"an answer that is not a class of {name}"
        notes[class_note(name, answer)] += 1
        return msgspec.structs.replace(example, target=answer)


def class_note(task: str, answer: str) -> str:
    """Return the key of the note that counts the examples of a class."""
    return f"{examples_note(task)}, answer {answer}"


def refuse_absent(sources: Iterable[Source], tasks: Iterable[str]) -> None:
    """Check for each task that at least one file has all its columns.

    Raises:
        DataError: No file has all columns of a task.
    """
    readers = [
        reader
        for source in sources
        for reader in (source.reader, *source.readers.values())
        if isinstance(reader, TaskReader)
    ]
    for task in tasks:
        if any(reader.fit is None or task in reader.fit for reader in readers):
            continue
        columns = {
            column for reader in readers for column in reader.columns_of(task).values()
        }
        shown = f" {', '.join(sorted(columns))}" if columns else ""
        raise DataError(
            f"data.tasks.{task} needs the columns{shown}, but no file in data.sources has all of "
            "them. Correct its templates, or add records with these columns. Sources of plain text "
            "and sources with `columns` have no examples of user-defined tasks."
        )
