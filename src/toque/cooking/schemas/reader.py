"""Recipe reader: examples from files of all known schemas, which it recognises by content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Self, cast

from toque.cooking.examples import examples_of
from toque.cooking.prompts import TASKS, Task
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import (
    ANSWERS,
    PAIRS,
    ROLES,
    Shape,
    check_recipe_fields,
    schema_of_records,
    shape_of,
    unwrapped,
)
from toque.cooking.schemas.fields import records_of
from toque.cooking.schemas.item_objects import UNUSED
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.schema_org import is_page, page_blocks, page_records
from toque.cooking.schemas.text_exports import (
    COOKLANG,
    export_blocks,
    export_format,
    export_records,
)
from toque.errors import ConfigError
from toque.sources.conversations import ConversationReader, describes_conversation
from toque.sources.decompress import UTF_8, head
from toque.sources.documents import DocumentReader, PairReader
from toque.sources.json_records import line_of
from toque.sources.layouts import (
    RECORD_FUNCTIONS,
    Columns,
    FileLayout,
    RefusedFileError,
    UnknownFormatError,
    first_line,
    structured_layout,
    table_layout,
)
from toque.sources.own_tasks import TaskReader
from toque.sources.preference_pairs import PreferenceReader, check_columns
from toque.sources.records import (
    PER_REASON,
    Block,
    BlockExamples,
    Example,
    Raw,
    RecordReader,
    TaskTemplate,
    add_encoding,
    attempt,
    most_frequent,
    records_until_error,
    shortened,
    unpack,
)

_RECORDS_OF_KIND = {
    **RECORD_FUNCTIONS,
    "page": page_records,
    "export": export_records,
}
_MARKUP_NAMES = ("@type", "@graph", "@context")
# Maximum size of a column name in a table without a known column.
_MAX_NAME_CHARS = 40
_MAX_NAME_WORDS = 4


class _Format(NamedTuple):
    """Format of a file."""

    schema: str
    blocks: Callable[[], Iterator[Block]]  # reads the blocks of the file


@dataclass(frozen=True)
class RecipeReader:
    """`RecordReader` of recipes in all known formats."""

    columns: Mapping[str, str] = field(default_factory=dict)  # field per role
    tasks: tuple[Task, ...] = ("write",)
    version: int = 17  # increased if the same bytes give different examples
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`. The settings record the tasks."""
        if not self.columns:
            return add_encoding("toque.cooking.formats:recipe_reader", self.encoding)
        columns = json.dumps(dict(self.columns), sort_keys=True)
        return add_encoding(f"toque.cooking.formats:columns={columns}", self.encoding)

    @property
    def task_names(self) -> dict[int, str]:
        """Names of all tasks by number in the column `task`."""
        return dict(enumerate(TASKS))

    def for_tasks(self, tasks: tuple[str, ...]) -> Self:
        """Return the same reader for these tasks.

        Raises:
            ConfigError: If a task is unknown.
        """
        if unknown := [task for task in tasks if task not in TASKS]:
            raise ConfigError(
                f"data.tasks has unknown tasks: {', '.join(unknown)}. Allowed: "
                f"{', '.join(TASKS)}."
            )
        return replace(self, tasks=cast("tuple[Task, ...]", tasks))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of `path` in the schema of its content.

        Raises the same errors as `schema`.
        """
        return self._recognise(path).blocks()

    def examples(self, block: Block) -> BlockExamples:
        """Return the examples of each usable recipe, and the reasons for dropping other recipes."""
        examples: list[Example] = []
        per_record: list[int] = []
        dropped: dict[str, list[int]] = {}
        dropped_texts: dict[int, str] = {}
        notes: Counter[str] = Counter()
        n_read = 0

        for number, recipe, raw in self.recipes(block, notes):
            n_read += 1
            examples_or_reason: list[Example] | str = (
                recipe
                if isinstance(recipe, str)
                else attempt(examples_of, recipe, notes, self.tasks)
            )
            if isinstance(examples_or_reason, list):
                examples += examples_or_reason
                per_record.append(len(examples_or_reason))
                continue

            numbers = dropped.setdefault(examples_or_reason, [])
            if len(numbers) < PER_REASON and (text := _text_of(block, number, raw)):
                dropped_texts[number] = shortened(text)
            numbers.append(number)

        remarks, unused = _split_notes(notes)
        return BlockExamples(
            examples,
            n_read,
            len(per_record),
            dropped,
            remarks,
            unused,
            dropped_texts,
            per_record,
        )

    def schema(self, path: Path) -> str:
        """Return the name of a file's schema for the report: "recipenlg", "web-page", "csv" ...

        Raises:
            UnknownFormatError: If the file has no known format. It may be plain text.
            TextRecordsError: If its records contain a text, or prompts and answers, not recipes.
            DataError: If it cannot be read, lacks a part of a recipe, or is damaged.
        """
        return self._recognise(path).schema

    def _recognise(self, path: Path) -> _Format:
        """Return the format of a file. Raises the same errors as `schema`."""
        start, is_entire_file = head(path, encoding=self.encoding)
        layout = structured_layout(
            path, start, is_entire_file=is_entire_file, encoding=self.encoding
        )
        if layout is None and is_page(start):
            return _Format(
                "web-page", partial(page_blocks, path, encoding=self.encoding)
            )
        is_free = layout is None and not self.columns
        export = export_format(start) if is_free else ""
        if export and export != COOKLANG:
            return self._export_format(path, export)
        if layout is None:
            layout = table_layout(
                path,
                start,
                is_entire_file=is_entire_file,
                n_known=_n_parts,
                encoding=self.encoding,
            )
        if layout is None or (not self.columns and _is_prose(layout)):
            if export:
                return self._export_format(path, export)
            raise UnknownFormatError(
                f"{path} is not in a known recipe format: it begins {first_line(start)!r}. Recipes "
                "are read from JSON, JSON lines, CSV, TSV or Excel with a header row, Parquet, web "
                "pages with schema.org data, Cooklang, Meal-Master and RecipeML. For plain text to "
                "pretrain on, set format: text for the source."
            )
        if is_entire_file and start.strip() in (b"{}", b"[]"):
            raise RefusedFileError(
                f"{path} is JSON without any records.", "no record in it"
            )
        return self._format_of(path, layout)

    def _export_format(self, path: Path, name: str) -> _Format:
        """Return the format of an export of a recipe manager."""
        return _Format(name, partial(export_blocks, path, name, encoding=self.encoding))

    def _format_of(self, path: Path, layout: FileLayout) -> _Format:
        """Return the format of a file with this layout. Check that it can contain recipes."""
        if not self.columns:
            layout = _without_wrappers(layout)
        shape = shape_of(layout.fields, tuple(self.columns.items()))
        if _has_known_fields(layout):
            check_recipe_fields(path, layout, shape, self.columns)
        needed = {*layout.text_columns, *shape.roles.values(), *shape.numbered_fields}
        fields = [name for name in layout.fields if name in needed]
        return _Format(self._schema_name(layout, shape), partial(layout.blocks, fields))

    def _schema_name(self, layout: FileLayout, shape: Shape) -> str:
        """Return the schema's name, or the layout's name if the schema is not known."""
        # Only Parquet and Arrow keep a schema's name if the user names columns.
        if self.columns and layout.name not in ("parquet", "arrow"):
            return layout.name
        schema = shape.schema
        if layout.name.startswith("json"):
            schema = schema_of_records(layout.sample, in_dict=layout.in_dict)
        return layout.name if schema == "generic" else schema

    def recipes(
        self, block: Block, notes: Counter[str]
    ) -> Iterator[tuple[int, Recipe | str, Raw]]:
        """Read the number, recipe or reason for dropping it, and raw form of each record."""
        contents = unpack(block)
        notes.update(contents.meta.get("remarks", {}))
        columns = tuple(sorted(self.columns.items()))
        for number, raw in _RECORDS_OF_KIND[contents.kind](contents):
            if isinstance(raw, str):
                yield number, raw, raw
                continue
            notes.update(f"{UNUSED}{name}" for name in contents.meta.get("unread", ()))
            for record in records_until_error(records_of(raw, columns, notes)):
                if isinstance(record, str):
                    yield number, record, raw
                else:
                    yield number, attempt(recipe_of, record, notes), raw


def reader_for(
    columns: Columns,
    *,
    encoding: str = UTF_8,
    tasks: Mapping[str, TaskTemplate] | None = None,
) -> RecordReader:
    """Return the reader for these columns. Without columns, it reads recipes or the user's `tasks`.

    Raises:
        ConfigError: If columns are unknown.
    """
    if tasks and not columns:
        return TaskReader(tasks, len(TASKS), encoding=encoding)
    single = {role: field for role, field in columns.items() if isinstance(field, str)}
    if several := ", ".join(columns.keys() - single.keys() - {"prompt", "messages"}):
        raise ConfigError(
            f"The columns of a source have a list for {several}. Only a prompt can have several "
            "fields, e.g. columns: {prompt: [question, context], target: answer}."
        )
    if check_columns(columns):
        return PreferenceReader(columns, encoding=encoding)
    if "text" in columns and len(columns) == 1:
        return DocumentReader(single["text"], encoding=encoding)
    if describes_conversation(columns):
        return ConversationReader(columns, encoding=encoding)
    if columns.keys() == {"prompt", "target"}:
        return PairReader(columns["prompt"], single["target"], encoding=encoding)
    unknown = sorted(columns.keys() - set(ROLES))
    if unknown:
        raise ConfigError(
            f"The columns of a source name {', '.join(unknown)}. Allowed: {', '.join(ROLES)} for "
            "recipes; only text for documents; prompt and target for other tasks; prompt, chosen "
            "and rejected for preference pairs; messages, or prompt, target and system, for "
            "conversations."
        )
    return RecipeReader(single, encoding=encoding)


def _n_parts(fields: tuple[str, ...]) -> int:
    """Return how many of a recipe's three parts these fields contain."""
    return 3 - len(shape_of(fields).missing)


def _is_prose(layout: FileLayout) -> bool:
    """Return whether a supposed table is a text with commas or tabs.

    A text has no column of a recipe or a prompt. In addition, its lines do not fit its first line,
    or its first line has parts that are too long for column names.
    """
    if layout.name not in ("csv", "tsv") or _n_parts(layout.fields) > 0:
        return False
    folded_names = shape_of(layout.fields).folded.keys()
    if any(folded_names >= set(pair) for pair in (ANSWERS, *PAIRS)):
        return False
    return not layout.fits or not all(map(_may_be_name, layout.fields))


def _may_be_name(text: str) -> bool:
    """Return whether a part of a table's first line is short enough for a column name."""
    return len(text) <= _MAX_NAME_CHARS and len(text.split()) <= _MAX_NAME_WORDS


def _without_wrappers(layout: FileLayout) -> FileLayout:
    """Return the layout with recipes inside wrappers such as {"recipe": {...}} as its sample."""
    sample = tuple(dict(unwrapped(record)) for record in layout.sample)
    if sample == layout.sample:
        return layout
    fields = dict.fromkeys(name for record in sample for name in record)
    return replace(layout, sample=sample, fields=tuple(fields))


def _has_known_fields(layout: FileLayout) -> bool:
    """Return whether the fields of a layout are the fields of its recipes."""
    if not layout.name.startswith("json"):
        return True
    # JSON-LD may have its recipes at any depth.
    is_markup = any(name in layout.fields for name in _MARKUP_NAMES)
    return bool(layout.sample) and not is_markup


def _text_of(block: Block, number: int, raw: Raw) -> str | bytes:
    """Return the fields of a record as JSON, or its bytes if it cannot be parsed."""
    if not isinstance(raw, str):
        return attempt(json.dumps, raw, ensure_ascii=False, default=str)
    contents = unpack(block)
    is_json = contents.kind in ("json-lines", "json")
    return line_of(contents, number) if is_json else b""


def _split_notes(notes: Counter[str]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the counts of remarks, and the counts of the most frequent unused fields."""
    remarks: dict[str, int] = {}
    unused: Counter[str] = Counter()
    for note, count in notes.items():
        if note.startswith(UNUSED):
            unused[note.removeprefix(UNUSED)] = count
        elif count:
            remarks[note] = count
    return remarks, most_frequent(unused)
