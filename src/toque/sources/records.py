"""Records between a source file and the store: raw blocks, then examples.

A record is one entry of a source, such as a recipe or a document. A record may give one example per
task, so records and examples are counted separately. A new domain needs a new `RecordReader`. This
module does not import torch or tokenizers, so that worker processes start fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
import xxhash

from toque.errors import DataError, ToqueError, argument
from toque.sources.decompress import UTF_8

_ENCODING = ";encoding="
_T = TypeVar("_T")
_P = ParamSpec("_P")
_FATAL_ERRORS = (ToqueError, MemoryError)
"""Errors that end the program. MemoryError is one of them, because the rows of a store must not
depend on the machine's memory."""

NO_TASK = 255
"""Task code of documents, conversations, and columns with prompts and answers."""
NO_LABEL = "no label"
"""Prefix of the reason for dropping a record without a label for a requested task."""
TOO_LONG, NOT_UTF_8 = "too long", "not UTF-8"
_MARK = b"\0toque "
_MAX_FIELDS = 100
"""Maximum number of fields in a report. Some exports have a field per value."""
_MAX_NAME_CHARS = 100
"""Maximum characters of a field's name in a report."""
MAX_CHARS = 600
"""Maximum length of a text in a report, in characters. A record may have megabytes."""
PER_REASON = 5
"""Maximum number of dropped records per reason with their text in the report."""
Raw = dict[str, Any] | str
"""Fields of a record by name, or the reason why it cannot be read."""
Numbered = Iterator[tuple[int, Raw]]
"""Records, each with the number of its first line, its row or its position."""


def examples_note(task: str) -> str:
    """Return the key of the note that counts the examples of one of several tasks."""
    return f"examples of the task {task}"


def missing_note(task: str, needs: str = "") -> str:
    """Return the key of the note that counts records without an example of a task."""
    return f"records without an example of the task {task}: {needs}"


@dataclass(frozen=True)
class TaskTemplate:
    """Task with templates for the prompt and the target."""

    prompt: str | tuple[str, ...]
    target: str
    classes: tuple[str, ...] = ()
    """Allowed answers, or () for any text."""
    metrics: tuple[str, ...] = ()
    """Names of metrics for the answers, or () for the default metrics."""


@dataclass(frozen=True)
class Block:
    """Consecutive complete records of a file, as raw bytes from the main process."""

    source: int
    """Index of the source in the call of `prepare`. Readers may leave it 0."""
    path: str
    first_line: int
    """Line number of the first line in the decompressed file, from 1."""
    payload: bytes
    last: bool = True
    """True at the end of a file. Only documents need it."""


class Turn(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: str
    """system, user or assistant."""
    text: str
    learnt: bool = True
    """False for an answer that does not contribute to the loss."""
    fields: Mapping[str, Any] = {}
    """Other fields of the message, for the chat template."""


class Example(msgspec.Struct, frozen=True):
    """A prompt and its target. All keys are unsigned 64-bit hashes."""

    prompt: str
    target: str
    key: int
    """Hash of the normalised body. Training and validation never share a key."""
    title_key: int
    """Hash of the normalised title, to find near-duplicates, or 0 without a title."""
    record_key: int
    """Hash of the cleaned body of the record, equal for all its examples. Of records with the same
    key, only the first is used."""
    task: int = NO_TASK
    columns: Mapping[str, int | float] = {}
    """Numbers to store as float32. All examples of a reader have the same names."""
    document: bool = False
    """True for a text without a prompt. It may be divided into several rows."""
    ends: bool = True
    """False if the text continues after the target, so that the store adds no end token."""
    ids: bytes = b""
    """Token ids of a document without text, as little-endian uint32."""
    turns: tuple[Turn, ...] = ()
    """A conversation up to its last answer, which is the target."""

    @property
    def text(self) -> str:
        """Text to learn, without the template of a conversation, or "" for token ids."""
        return self.target or " ".join(turn.text for turn in self.turns)


def document_example(text: str = "", *, ids: bytes = b"", ends: bool = True) -> Example:
    """Make the example of a document from its text or its token ids. See `Example`."""
    key = xxhash.xxh3_64_intdigest(ids or text.encode())
    return Example(
        "", text, key, title_key=0, record_key=key, document=True, ends=ends, ids=ids
    )


def attempt(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | str:
    """Call a function. If it raises, return the reason for dropping its record.

    Every reader uses this function or `records_until_error`, so that a strange record cannot stop
    a run. A bug in Toque is reported as a count with the function's name.

    >>> attempt(int, "12"), attempt(int, "twelve")
    (12, 'raised ValueError in toque.sources.records.attempt')
    """
    try:
        return make(*args, **kwargs)
    except _FATAL_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001 - untrusted records may raise anything
        return _reason(error)


def records_until_error(records: Iterator[_T]) -> Iterator[_T | str]:
    """Iterate over the records inside a record. On an error, return its reason as the last item."""
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except _FATAL_ERRORS:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            yield _reason(error)
            return
        yield record


def _reason(error: Exception) -> str:
    """Format the type of an exception and the innermost function of Toque in its traceback."""
    function = ""
    package = __name__.partition(".")[0]
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == package:
            function = f"{module}.{frame.f_code.co_qualname}"
        traceback = traceback.tb_next
    return f"raised {type(error).__name__} in {function}"


@dataclass(frozen=True)
class BlockExamples:
    """Examples of a block. `read` is the sum of `kept` and the number of dropped records."""

    examples: list[Example]
    """Examples in the order of their records."""
    read: int
    """Number of records in the block."""
    kept: int
    """Number of records with at least one example."""
    dropped: dict[str, list[int]] = field(default_factory=dict)
    """Line numbers of dropped records by reason."""
    notes: dict[str, int] = field(default_factory=dict)
    """Counts of repairs and other remarks."""
    unused: dict[str, int] = field(default_factory=dict)
    """Counts of unused fields, see `unused_in`."""
    texts: dict[int, str] = field(default_factory=dict, compare=False)
    """Texts of the first dropped records of each reason, by line number."""
    per_record: list[int] = field(default_factory=list)
    """Number of examples per used record. It may be empty if each has one."""

    @property
    def sizes(self) -> list[int]:
        """Number of examples per used record."""
        return self.per_record or [1 for _ in self.examples]

    @property
    def examples_by_record(self) -> Iterator[list[Example]]:
        """Examples of each used record."""
        remaining = iter(self.examples)
        return (list(islice(remaining, n)) for n in self.sizes)


class RecordReader(Protocol):
    """Reader of files of one kind.

    A reader is a frozen dataclass. The main process pickles it once per worker. A reader of several
    tasks also has `task_names`, by which examples are counted.
    """

    @property
    def recorded_name(self) -> str:
        """Name in manifests and fingerprints. A store is reused only if the name is the same."""

    @property
    def version(self) -> int:
        """Version of the reader. A new version gives other examples, so stores are rebuilt."""

    def schema(self, path: Path) -> str:
        """Return the name of a file's schema in the report, such as "recipenlg" or "text"."""

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read raw blocks in order and in bounded memory, in the main process.

        Raises:
            DataError: The file cannot be read.
        """

    def examples(self, block: Block) -> BlockExamples:
        """Parse and clean a block in a worker. Bad records are dropped and do not raise."""


def examples_in(block: Block, reader: RecordReader) -> BlockExamples:
    """Read the examples of a block.

    Raises:
        DataError: The reader raised outside of a record.
    """
    try:
        return reader.examples(block)
    except _FATAL_ERRORS:
        raise
    except Exception as error:
        raise DataError(
            f"The reader of {block.path} raised {type(error).__name__} in the block from line "
            f"{block.first_line}: {error}. This is a bug in the reader, not an error in the file. "
            f"Use {argument('traceback')} to see the function."
        ) from error


def add_encoding(recorded_name: str, encoding: str) -> str:
    """Add an encoding to the recorded name of a reader, unless it is UTF-8."""
    if encoding == UTF_8:
        return recorded_name
    return f"{recorded_name}{_ENCODING}{encoding}"


def encoding_of(recorded_name: str) -> str:
    """Return the encoding in a recorded name, or UTF-8 without an encoding."""
    _, separator, encoding = recorded_name.rpartition(_ENCODING)
    return encoding if separator else UTF_8


@dataclass(frozen=True)
class Located:
    """A file to read."""

    name: str
    """Path or remote address, for reports and errors."""
    path: Path
    """Path of the local file."""
    sha256: str | None = None
    """Checksum of the file, if it is known."""


@dataclass(frozen=True)
class Source:
    """A group of files with a common reader."""

    path: str
    """A file, a glob pattern, or a folder with all files except hidden ones."""
    reader: RecordReader
    files: tuple[Located, ...] | None = None
    """Files to read, by default all files of `path`."""
    readers: Mapping[str, RecordReader] = field(default_factory=dict)
    """Readers of files of another kind, by file name."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Reasons for skipping files, by file name."""

    @property
    def versions(self) -> list[int]:
        """Versions of the reader and of the readers of other kinds."""
        others = sorted({(r.recorded_name, r.version) for r in self.readers.values()})
        return [self.reader.version, *(version for _, version in others)]

    def for_tasks(self, tasks: tuple[str, ...]) -> Source:
        """Return the source with readers for these tasks, if the readers have tasks."""

        def select(reader: RecordReader) -> RecordReader:
            for_tasks: Callable[..., RecordReader] | None
            for_tasks = getattr(reader, "for_tasks", None)
            return reader if for_tasks is None else for_tasks(tasks)

        readers = {name: select(reader) for name, reader in self.readers.items()}
        return replace(self, reader=select(self.reader), readers=readers)


@dataclass(frozen=True)
class Contents:
    """Decoded header and body of a block."""

    kind: str
    meta: Mapping[str, Any]
    body: bytes
    first: int
    """Number of the first line, row or record."""


def unused_in(
    records: Iterable[Raw], used: Collection[str], unread: Collection[str] = ()
) -> dict[str, int]:
    """Count the records with a value in each unused field. Columns in `unread` count fully."""
    readable = [record for record in records if isinstance(record, dict)]
    counts = Counter(
        name
        for record in readable
        for name, value in record.items()
        if name not in used and is_filled(value)
    )
    counts.update(dict.fromkeys(unread, len(readable)))
    return most_frequent(counts)


def is_filled(value: Any) -> bool:
    """Check that a value is not blank, null, NaN, infinite, or an empty list or object."""
    if isinstance(value, str):
        return bool(value.strip())
    return value not in (None, [], {}) and not is_not_finite(value)


def is_not_finite(value: Any) -> bool:
    """Check for NaN and infinity, which pandas writes for missing values."""
    return isinstance(value, float) and not math.isfinite(value)


def most_frequent(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of the most frequent fields. Long names that start equally share an entry.

    The entry "(others)" has an upper limit for the count of each remaining field.
    """
    short_counts: Counter[str] = Counter()
    for name, n in counts.items():
        short_counts[name[:_MAX_NAME_CHARS]] += n
    frequent = short_counts.most_common(_MAX_FIELDS)
    result = dict(frequent)
    if len(frequent) < len(short_counts):
        _, smallest_count = frequent[-1]
        result["(others)"] = smallest_count
    return result


def count_field_note(notes: Counter[str], note: str, name: str) -> None:
    """Count a note about a field. The field's name replaces "{}".

    After 100 different notes, "other fields" replaces further names.

    >>> count_field_note(notes := Counter(), "messages with {}", "name"); notes
    Counter({"messages with 'name'": 1})
    """
    key = note.format(repr(name[:_MAX_NAME_CHARS]))
    if key not in notes and len(notes) >= _MAX_FIELDS:
        key = note.format("other fields")
    notes[key] += 1


def shortened(text: str | bytes) -> str:
    """Shorten a text to `MAX_CHARS` characters that are valid in JSON."""
    if isinstance(text, bytes):
        text = text[: 4 * MAX_CHARS + 4].decode(errors="replace")
    valid = replace_lone_surrogates(text[: MAX_CHARS + 1])
    if len(valid) <= MAX_CHARS:
        return valid
    return valid[:MAX_CHARS].rstrip("\n") + "…"


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate with U+FFFD, and join pairs, so that UTF-8 can encode the text.

    JSON may contain surrogates as escapes, e.g. if a program cut an emoji.

    >>> replace_lone_surrogates("\ud83c\udf72 and \ud83c") == "\U0001f372 and \ufffd"
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def pack(path: Path, number: int, kind: str, body: bytes, **meta: Any) -> Block:
    """Make a block. `number` is the line, row or position of its first record."""
    header = msgspec.json.encode({"kind": kind, **meta})
    return Block(0, str(path), number, b"".join((_MARK, header, b"\n", body)))


def unreadable_block(path: Path, number: int, reason: str) -> Block:
    """Make a block for a record that cannot be read."""
    return pack(path, number, "unreadable", b"", reason=reason)


def unpack(block: Block) -> Contents:
    """Decode a block of `pack`. A block without a header has the kind "json-lines".

    Raises:
        DataError: The header is damaged.
    """
    if not block.payload.startswith(_MARK):
        return Contents("json-lines", {}, block.payload, block.first_line)
    end = block.payload.index(b"\n")
    try:
        meta = msgspec.json.decode(block.payload[len(_MARK) : end], type=dict[str, Any])
        return Contents(
            meta.pop("kind"), meta, block.payload[end + 1 :], block.first_line
        )
    except (msgspec.DecodeError, KeyError) as error:
        raise DataError(
            f"The block of {block.path} from line {block.first_line} has a damaged header "
            f"({error}). This is a bug in the reader, not an error of the file."
        ) from error
