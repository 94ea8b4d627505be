"""Recipe reader: files of every known schema, recognised by content, to examples."""

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
from toque.cooking.schemas.columns import (
    ROLES,
    refuse_cut_schema,
    schema_of_records,
    shape_of,
)
from toque.cooking.schemas.fields import UNUSED, records_of
from toque.cooking.schemas.mealmaster import is_mealmaster, mealmaster_blocks, mealmaster_records
from toque.cooking.schemas.normalize import recipe_of
from toque.cooking.schemas.schema_org import is_page, page_blocks, page_records
from toque.errors import ConfigError
from toque.sources.decompress import UTF_8, head
from toque.sources.documents import Columns, DocumentReader, PairReader
from toque.sources.json_records import line_of
from toque.sources.layouts import (
    READ,
    FileLayout,
    RefusedFileError,
    UnknownFormatError,
    first_line,
    structured_layout,
    table_layout,
)
from toque.sources.records import (
    PER_REASON,
    Block,
    BlockExamples,
    Example,
    Raw,
    RecordReader,
    attempted,
    in_encoding,
    most_named,
    shortened,
    survivors,
    unpack,
)

_READ = {**READ, "page": page_records, "mealmaster": mealmaster_records}


@dataclass(frozen=True)
class RecipeReader:
    """Reads recipes in every known format; a `RecordReader`.

    Attributes:
        columns: "title", "ingredients" or "steps" to the field that holds it, for files whose
            own names are not known.
        tasks: the tasks each recipe gives examples of.
        version: raised when the same bytes would give other examples.
        encoding: encoding of text files.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ("write",)
    version: int = 9
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """See `RecordReader`; the tasks are recorded among the settings."""
        if not self.columns:
            return in_encoding("toque.cooking.formats:recipe_reader", self.encoding)
        columns = json.dumps(dict(self.columns), sort_keys=True)
        return in_encoding(f"toque.cooking.formats:columns={columns}", self.encoding)

    def for_tasks(self, tasks: tuple[str, ...]) -> Self:
        """The same reader for these tasks.

        Raises:
            ConfigError: an unknown task.
        """
        unknown = [task for task in tasks if task not in TASKS]
        if unknown:
            raise ConfigError(
                f"data.tasks names {', '.join(unknown)}; a recipe can be turned into "
                f"{', '.join(TASKS)}."
            )
        return replace(self, tasks=cast("tuple[Task, ...]", tasks))

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path`, by the schema recognised from its content.

        Raises:
            DataError: the file is of no known kind, lacks a part of a recipe, or is damaged.
        """
        return recognise(path, self.columns, encoding=self.encoding)[1]()

    def examples(self, block: Block) -> BlockExamples:
        """The examples of each usable recipe, and the reasons for which others were dropped."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        notes: Counter[str] = Counter()
        texts: dict[int, str] = {}
        read = kept = 0
        for number, recipe, raw in self.recipes(block, notes):
            read += 1
            found: list[Example] | str = recipe if isinstance(recipe, str) else []
            if isinstance(recipe, Recipe):
                found = attempted(examples_of, recipe, notes, self.tasks)
            if isinstance(found, list):
                kept += 1
                examples += found
                continue
            numbers = dropped.setdefault(found, [])
            if len(numbers) < PER_REASON and (text := _shown(block, number, raw)):
                texts[number] = text
            numbers.append(number)
        unused = {n.removeprefix(UNUSED): c for n, c in notes.items() if n.startswith(UNUSED)}
        return BlockExamples(
            examples=examples,
            read=read,
            kept=kept,
            dropped=dropped,
            notes={n: count for n, count in notes.items() if count and not n.startswith(UNUSED)},
            unused=most_named(Counter(unused)),
            texts=texts,
        )

    def schema(self, path: Path) -> str:
        """The name of a file's schema, for the report: "recipenlg", "mealmaster", "csv" ...

        Raises:
            UnknownFormatError: the file is of no known kind; it may be plain text.
            DataError: it lacks a part of a recipe, or is damaged.
        """
        return recognise(path, self.columns, encoding=self.encoding)[0]

    def recipes(self, block: Block, notes: Counter[str]) -> Iterator[tuple[int, Recipe | str, Raw]]:
        """Number, cleaned recipe or reason for having none, and raw form of each record."""
        contents = unpack(block)
        columns = tuple(sorted(self.columns.items()))
        for number, raw in _READ[contents.kind](contents):
            if isinstance(raw, str):
                yield number, raw, raw
                continue
            notes.update(f"{UNUSED}{name}" for name in contents.meta.get("unread", ()))
            for record in survivors(records_of(raw, columns, notes)):
                if isinstance(record, str):
                    yield number, record, raw
                else:
                    yield number, attempted(recipe_of, record, notes), raw


def _shown(block: Block, number: int, raw: Raw) -> str:
    """A dropped record as the report shows it: its fields, or its bytes if they cannot be read."""
    if not isinstance(raw, str):
        return shortened(attempted(json.dumps, raw, ensure_ascii=False, default=str))
    contents = unpack(block)
    if contents.kind not in ("json-lines", "json"):
        return ""
    return shortened(line_of(contents, number))


def reader_for(columns: Columns, *, encoding: str = UTF_8) -> RecordReader:
    """The reader for these columns, as the user has named them; without any, that of recipes.

    Raises:
        ConfigError: `columns` has an unknown key, or several fields for anything but a prompt.
    """
    single = {role: field for role, field in columns.items() if isinstance(field, str)}
    if several := ", ".join(columns.keys() - single.keys() - {"prompt"}):
        raise ConfigError(
            f"columns of a source names a list for {several}; only a prompt is made of several "
            "fields: columns: {prompt: [question, context], target: answer}."
        )
    if "text" in columns and len(columns) == 1:
        return DocumentReader(single["text"], encoding=encoding)
    if columns.keys() == {"prompt", "target"}:
        return PairReader(columns["prompt"], single["target"], encoding=encoding)
    unknown = sorted(columns.keys() - set(ROLES))
    if unknown:
        raise ConfigError(
            f"columns of a source names {', '.join(unknown)}; it can name "
            f"{', '.join(ROLES)}; for documents text alone; for any other task prompt and target."
        )
    return RecipeReader(single, encoding=encoding)


_MARKUP_NAMES = ("@type", "@graph", "@context")


def recognise(
    path: Path, columns: Mapping[str, str], *, encoding: str = UTF_8
) -> tuple[str, Callable[[], Iterator[Block]]]:
    """The recipe schema of `path`, by its name in the report, and its blocks.

    Raises:
        UnknownFormatError: it is of no known kind.
        TextRecordsError: its records hold a text, or prompts and answers, instead of recipes.
        DataError: it cannot be read, or lacks a part of a recipe.
    """
    start, whole = head(path, encoding=encoding)
    layout = structured_layout(path, start, whole=whole, encoding=encoding)
    if layout is None and is_page(start):
        return "web-page", lambda: page_blocks(path, encoding=encoding)
    if layout is None and is_mealmaster(start):
        return "mealmaster", lambda: mealmaster_blocks(path, encoding=encoding)
    layout = layout or table_layout(path, start, whole=whole, n_known=_n_parts, encoding=encoding)
    if layout is None:
        raise _unknown(path, start)
    if layout.name in ("csv", "tsv"):
        prose = _n_parts(layout.fields) == 0 and not (layout.fits and _are_names(layout.fields))
        if prose and not columns:
            raise _unknown(path, start)  # prose has commas too
    if whole and start.strip() in (b"{}", b"[]"):
        raise RefusedFileError(f"{path} is JSON without a single record in it.", "no record in it")
    json_ld = any(name in layout.fields for name in _MARKUP_NAMES)
    if not layout.name.startswith("json") or (layout.sample and not json_ld):
        refuse_cut_schema(path, layout, columns)
    shape = shape_of(layout.fields, tuple(columns.items()))
    needed = {*layout.text_columns, *shape.roles.values()}
    read = [name for name in layout.fields if name in needed]
    return _schema(layout, columns), lambda: layout.blocks(read)


def _schema(layout: FileLayout, columns: Mapping[str, str]) -> str:
    if layout.name.startswith("json"):
        schema = schema_of_records(layout.sample, in_dict=layout.in_dict)
    else:
        schema = shape_of(layout.fields, tuple(columns.items())).schema
    named = columns and layout.name not in ("parquet", "arrow")
    return layout.name if schema == "generic" or named else schema


def _n_parts(fields: tuple[str, ...]) -> int:
    """Number of a recipe's three parts that these fields hold."""
    return 3 - len(shape_of(fields).missing)


def _are_names(fields: tuple[str, ...]) -> bool:
    """True if a first row reads as column names rather than as prose."""
    return all(len(name) <= 40 and len(name.split()) <= 4 for name in fields)


def _unknown(path: Path, start: bytes) -> UnknownFormatError:
    return UnknownFormatError(
        f"{path} is of no known recipe format: it begins {first_line(start)!r}. Recipes are read "
        "from JSON, JSON lines, CSV or TSV with a header row, Parquet, web pages with schema.org "
        "data, and Meal-Master text. For plain text to pretrain on, give the source format: text."
    )
