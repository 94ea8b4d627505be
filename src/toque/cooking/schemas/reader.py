"""The reader of recipe files of every known schema, given to `prepare` by name."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, cast

from toque.cooking.examples import examples_of
from toque.cooking.prompts import TASKS, Task
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import ROLES
from toque.cooking.schemas.detect import recognise
from toque.cooking.schemas.fields import records_of
from toque.cooking.schemas.html_pages import page_records
from toque.cooking.schemas.mealmaster import mealmaster_records
from toque.cooking.schemas.normalize import recipe_of
from toque.errors import ConfigError
from toque.sources.blocks import Header, Numbered, Raw, unpack
from toque.sources.csv_tables import table_records
from toque.sources.excerpts import PER_REASON, shortened
from toque.sources.json_records import json_records, line_of
from toque.sources.parquet import parquet_records
from toque.sources.records import Block, BlockExamples, Example, RecordReader

_MODULE = "toque.cooking.formats"


def _unreadable_records(header: Header, body: memoryview, first_line: int) -> Numbered:
    del body
    yield first_line, str(header.meta["reason"])


READ: dict[str, Callable[[Header, memoryview, int], Numbered]] = {
    "json-lines": json_records,
    "json": json_records,
    "table": table_records,
    "parquet": parquet_records,
    "page": page_records,
    "mealmaster": mealmaster_records,
    "unreadable": _unreadable_records,
}


@dataclass(frozen=True)
class FormatReader:
    """Reads every format this package knows; a `RecordReader`.

    Attributes:
        columns: "title", "ingredients" or "steps" to the field that holds it, for files whose
            own names are not known.
        tasks: what each recipe is turned into.
        version: raised when the same bytes would give other examples.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ("write",)
    version: int = 3

    def for_tasks(self, tasks: tuple[str, ...]) -> Self:
        """The same reader for these tasks.

        Raises:
            ConfigError: there is no such task.
        """
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise ConfigError(
                f"data.tasks names {', '.join(unknown)}; a recipe can be turned into "
                f"{', '.join(TASKS)}."
            )
        return replace(self, tasks=cast("tuple[Task, ...]", tasks))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path`, by the schema its content shows.

        Raises:
            DataError: the file is of no known kind, lacks a part of a recipe, or is damaged.
        """
        return recognise(Path(path), self.columns).blocks()

    def examples(self, block: Block) -> BlockExamples:
        """The examples of each usable recipe, and why the others were dropped."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        notes: Counter[str] = Counter()
        texts: dict[int, str] = {}
        read = kept = 0
        for number, recipe, raw in self._read(block, notes):
            read += 1
            found = examples_of(recipe, notes, self.tasks) if isinstance(recipe, Recipe) else recipe
            if isinstance(found, list):
                kept += 1
                examples += found
            else:
                numbers = dropped.setdefault(found, [])
                if len(numbers) < PER_REASON:
                    texts[number] = _shown(block, number, raw)
                numbers.append(number)
        return BlockExamples(
            examples=examples,
            read=read,
            kept=kept,
            dropped=dropped,
            notes={what: count for what, count in notes.items() if count},
            texts={number: text for number, text in texts.items() if text},
        )

    def recipes(self, block: Block, notes: Counter[str]) -> Iterator[tuple[int, Recipe | str]]:
        """The cleaned recipe of each record with its number, or why there is none."""
        for number, recipe, _ in self._read(block, notes):
            yield number, recipe

    def schema(self, path: Path) -> str:
        """The name of a file's schema, for the report."""
        return recognise(Path(path), self.columns).schema

    def _read(self, block: Block, notes: Counter[str]) -> Iterator[tuple[int, Recipe | str, Raw]]:
        header, body = unpack(block)
        columns = tuple(sorted(self.columns.items()))
        for number, raw in READ[header.kind](header, body, block.first_line):
            if isinstance(raw, str):
                yield number, raw, raw
                continue
            for record in records_of(raw, columns, notes):
                yield number, record if isinstance(record, str) else recipe_of(record, notes), raw


def _shown(block: Block, number: int, raw: Raw) -> str:
    """A dropped record for people: its fields, or its bytes when it has none."""
    if not isinstance(raw, str):
        return shortened(json.dumps(raw, ensure_ascii=False, default=str))
    header, body = unpack(block)
    if header.kind not in ("json-lines", "json"):
        return ""
    return shortened(line_of(header, body, block.first_line, number))


recipe_reader = FormatReader()


def schema_of(path: Path, columns: Mapping[str, str] | None = None) -> str:
    """The name of a file's schema, for the report: "recipenlg", "mealmaster", "csv" ...

    Raises:
        UnknownFormatError: the file is of no known kind; it may be plain text.
        DataError: it lacks a part of a recipe, or is damaged.
    """
    return recognise(Path(path), columns or {}).schema


def reader_spec(columns: Mapping[str, str]) -> str:
    """The name by which `prepare` and its workers load a reader with these columns.

    Raises:
        ConfigError: `columns` names something that is no part of a recipe.
    """
    if "text" in columns and len(columns) == 1:
        return f"{_MODULE}:text={columns['text']}"
    if columns.keys() == {"prompt", "target"}:
        return f"{_MODULE}:pairs={json.dumps(dict(columns), sort_keys=True)}"
    unknown = sorted(columns.keys() - set(ROLES))
    if unknown:
        raise ConfigError(
            f"columns of a source names {', '.join(unknown)}; it can name "
            f"{', '.join(ROLES)}; for documents text alone; for any other task prompt and target."
        )
    if not columns:
        return f"{_MODULE}:recipe_reader"
    return f"{_MODULE}:columns={json.dumps(dict(columns), sort_keys=True)}"


def reader_named(attribute: str) -> RecordReader:
    """The reader that the part of a `reader_spec` after the colon names.

    Raises:
        AttributeError: it names none.
    """
    name, _, columns = attribute.partition("=")
    if name == "text" and columns:
        from toque.sources.text_records import DocumentReader

        return DocumentReader(columns)
    if name == "pairs" and columns:
        from toque.sources.prompt_target import PairReader

        return PairReader(**json.loads(columns))
    if name != "columns" or not columns:
        raise AttributeError(f"module {_MODULE!r} has no attribute {attribute!r}")
    return FormatReader(columns=json.loads(columns))
