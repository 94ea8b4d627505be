"""Recipe reader: files of every known schema to examples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self, cast

from toque.cooking.examples import examples_of
from toque.cooking.prompts import TASKS, Task
from toque.cooking.recipe import Recipe
from toque.cooking.schemas.columns import ROLES
from toque.cooking.schemas.detect import recognise
from toque.cooking.schemas.fields import UNUSED, records_of
from toque.cooking.schemas.html_pages import page_records
from toque.cooking.schemas.mealmaster import mealmaster_records
from toque.cooking.schemas.normalize import recipe_of
from toque.errors import ConfigError
from toque.sources.decompress import UTF_8
from toque.sources.documents import DocumentReader
from toque.sources.excerpts import PER_REASON, shortened
from toque.sources.json_records import line_of
from toque.sources.layouts import READ
from toque.sources.prompt_target import Columns, PairReader
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    Raw,
    RecordReader,
    attempted,
    in_encoding,
    most_named,
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
        encoding: of text files.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    tasks: tuple[Task, ...] = ("write",)
    version: int = 7
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
        return recognise(path, self.columns, encoding=self.encoding).blocks()

    def examples(self, block: Block) -> BlockExamples:
        """The examples of each usable recipe, and why the others were dropped."""
        examples: list[Example] = []
        dropped: dict[str, list[int]] = {}
        notes: Counter[str] = Counter()
        texts: dict[int, str] = {}
        read = kept = 0
        for number, recipe, raw in self.recipes(block, notes):
            read += 1
            found: list[Example] | str = (
                attempted(examples_of, recipe, notes, self.tasks)
                if isinstance(recipe, Recipe)
                else recipe
            )
            if isinstance(found, list):
                kept += 1
                examples += found
            else:
                numbers = dropped.setdefault(found, [])
                if len(numbers) < PER_REASON:
                    texts[number] = _shown(block, number, raw)
                numbers.append(number)
        unused = {n.removeprefix(UNUSED): c for n, c in notes.items() if n.startswith(UNUSED)}
        return BlockExamples(
            examples=examples,
            read=read,
            kept=kept,
            dropped=dropped,
            notes={n: count for n, count in notes.items() if count and not n.startswith(UNUSED)},
            unused=most_named(Counter(unused)),
            texts={number: text for number, text in texts.items() if text},
        )

    def schema(self, path: Path) -> str:
        """The name of a file's schema, for the report: "recipenlg", "mealmaster", "csv" ...

        Raises:
            UnknownFormatError: the file is of no known kind; it may be plain text.
            DataError: it lacks a part of a recipe, or is damaged.
        """
        return recognise(path, self.columns, encoding=self.encoding).schema

    def recipes(self, block: Block, notes: Counter[str]) -> Iterator[tuple[int, Recipe | str, Raw]]:
        """Each record's number, its cleaned recipe or the reason why there is none, and itself."""
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
