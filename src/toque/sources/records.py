"""What travels from a source file to the store: blocks of raw lines, then examples.

A record is one entry of a source (a recipe, a document). It gives one example per task, so both
are counted. A domain is added by writing a `RecordReader`; this module needs neither torch nor
the tokenizers, so that worker processes start fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec

NO_LABEL = "no label"
"""How a reader's reason begins for a record that is fine and tells nothing of the tasks asked."""


def examples_note(task: str) -> str:
    """The note that counts a task's examples, when several tasks can be asked for."""
    return f"examples of the task {task}"


def missing_note(task: str, needs: str = "") -> str:
    """The note that counts records without an example of a task, and its beginning."""
    return f"records without an example of the task {task}: {needs}"


@dataclass(frozen=True)
class Block:
    """A run of whole records of one file, as raw bytes, read in the main process."""

    source: int
    """Index of the source in the list given to `prepare`; `blocks` may leave it 0."""
    path: str
    first_line: int
    """Number of the payload's first line in the (uncompressed) file, from 1."""
    payload: bytes
    last: bool = True
    """For documents: whether the payload reaches the end of its file."""


class Example(msgspec.Struct, frozen=True):
    """One prompt and the text that should follow it."""

    prompt: str
    target: str
    key: int
    """Unsigned 64-bit hash that groups examples for the split: examples of one key, whichever
    record or task they come from, never straddle training and validation (xxh3 of the
    normalised body)."""
    title_key: int
    """Unsigned 64-bit hash of the normalised title, to find near-leaks; 0 when there is none."""
    record_key: int
    """Unsigned 64-bit hash of the record's cleaned body: records of one key are duplicates, and
    the first in source order is kept. All examples of a record carry the same one."""
    task: int = 0
    """Which of a record's examples this is; a record's examples carry rising numbers."""
    columns: Mapping[str, int | float] = {}
    """Numbers stored per example as float32, e.g. quality; one reader, one set of names."""
    document: bool = False
    """A text without a prompt: `prompt` is empty and `target` may be cut into several rows."""
    ends: bool = True
    """Whether the target reaches the true end of its text; if not, no end token is written."""
    ids: bytes = b""
    """Of a document that is token ids already: little-endian uint32; `target` is then empty."""


@dataclass(frozen=True)
class BlockExamples:
    """What a block gave. `read == kept + sum of the dropped`, always."""

    examples: list[Example]
    """In record order, a record's examples side by side."""
    read: int
    """Records met."""
    kept: int
    """Records that gave at least one example."""
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """Reason to the line numbers of the records dropped for it."""
    notes: dict[str, int] = field(default_factory=dict)
    """Counts of things repaired or worth saying, e.g. "control characters removed"."""
    texts: dict[int, str] = field(default_factory=dict, compare=False)
    """Line number to what stands there, for the first few dropped records of each reason."""


@runtime_checkable
class NamesSchemas(Protocol):
    """A reader that can say, for the report, whose schema a file has."""

    def schema(self, path: Path) -> str:
        """Its name: "recipenlg", "mealmaster", "text" ..."""
        ...


@runtime_checkable
class DoesTasks(Protocol):
    """A reader that turns a record into what it is asked for."""

    def for_tasks(self, tasks: tuple[str, ...]) -> RecordReader:
        """The same reader for these tasks.

        Raises:
            ConfigError: it knows none of this name.
        """
        ...


class RecordReader(Protocol):
    """Turns files of one kind into examples.

    Given to `prepare` as "module:attribute" and imported in the workers. The attribute is a
    reader, which may be a `DoesTasks`, or a function of the tasks that returns one. It may have an
    integer attribute `version`, raised when its examples change: older stores are then not reused.
    """

    def blocks(self, path: Path) -> Iterator[Block]:
        """Raw blocks of `path` in order, in bounded memory; cheap, called in the main process.

        Raises:
            DataError: the file is not of this reader's kind or cannot be read.
        """
        ...

    def examples(self, block: Block) -> BlockExamples:
        """Parse and clean one block; called in a worker. A bad record is dropped, not raised."""
        ...
