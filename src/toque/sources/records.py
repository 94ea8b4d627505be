"""Records on their way from a source file to the store: raw blocks, then examples.

A record is one entry of a source (a recipe, a document). It gives one example per task, so both
are counted. A new domain is a new `RecordReader`. Nothing here imports torch or the tokenizers,
so worker processes start fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar

import msgspec
import xxhash

from toque.errors import DataError, ToqueError, argument
from toque.sources.decompress import UTF_8

_ENCODING = ";encoding="
_T = TypeVar("_T")
_P = ParamSpec("_P")
_NOT_THE_RECORDS = (ToqueError, MemoryError)
"""Errors that no record is dropped for: refusals of the whole source, and a lack of memory, which
would make the store's rows depend on the machine."""

NO_TASK: Final = 255  # of documents, conversations, and prompts and answers in columns
NO_LABEL = "no label"  # prefix of the reason for dropping a record of no requested task
TOO_LONG, NOT_UTF_8 = "too long", "not UTF-8"  # reasons for dropping a record
_MARK = b"\0toque "
_MOST_NAMED = 100  # unused fields, and characters of a name: some exports have one a value
MAX_CHARS = 600  # characters shown of a text; a record may be megabytes long
PER_REASON = 5  # dropped records per reason whose text a shard, or a reader's block, keeps
Raw = dict[str, Any] | str  # a record's fields by name, or the reason why it cannot be read
Numbered = Iterator[tuple[int, Raw]]  # each with the line, row or record it begins at


def examples_note(task: str) -> str:
    """Key of the note that counts a task's examples, when several tasks are possible."""
    return f"examples of the task {task}"


def missing_note(task: str, needs: str = "") -> str:
    """Key of the note that counts records without an example of a task, or its prefix."""
    return f"records without an example of the task {task}: {needs}"


@dataclass(frozen=True)
class TaskTemplate:
    """A task as data: templates of the question and the answer, and how answers are scored."""

    prompt: str | tuple[str, ...]
    target: str
    classes: tuple[str, ...] = ()  # the answers that there are; () for any text
    metrics: tuple[str, ...] = ()  # names of metrics of its answers; () for the usual ones


@dataclass(frozen=True)
class Block:
    """Consecutive whole records of one file, as raw bytes, read in the main process."""

    source: int  # index of the source in the list given to `prepare`; `blocks` may leave it 0
    path: str
    first_line: int  # number of the payload's first line in the (uncompressed) file, from 1
    payload: bytes
    last: bool = True  # True if it reaches the end of its file, which matters for documents


class Turn(msgspec.Struct, frozen=True):
    """A message of a conversation."""

    role: str  # "system", "user" or "assistant"
    text: str
    learnt: bool = True  # False for an answer that is only read
    fields: Mapping[str, Any] = {}
    """Values of the message's other fields by name, which a chat template may write."""


class Example(msgspec.Struct, frozen=True):
    """One prompt and the text that should follow it; its keys are unsigned 64-bit hashes."""

    prompt: str
    target: str
    key: int
    """Hash of the normalised body. Examples of one key, whichever record or task they come from,
    never straddle training and validation."""
    title_key: int  # of the normalised title, to find near-leaks; 0 when there is none
    record_key: int
    """Hash of the record's cleaned body, the same for all its examples. Records of one key are
    duplicates, and the first in source order is kept."""
    task: int = NO_TASK  # number of the example's task
    columns: Mapping[str, int | float] = {}  # stored as float32; one reader, one set of names
    document: bool = False  # True for a text without a prompt, which may be cut into several rows
    ends: bool = True  # False if the target ends before its text, so that no end token is written
    ids: bytes = b""  # of a document that is token ids, not text: little-endian uint32
    turns: tuple[Turn, ...] = ()
    """A conversation up to its last answer, which is the target; its text is its template's."""

    @property
    def text(self) -> str:
        """The text to be learnt, a conversation's without its template; "" of token ids."""
        return self.target or " ".join(turn.text for turn in self.turns)


def document_example(text: str = "", *, ids: bytes = b"", ends: bool = True) -> Example:
    """The example of a document, which is a text or token ids; see `Example`."""
    key = xxhash.xxh3_64_intdigest(ids or text.encode())
    return Example("", text, key, title_key=0, record_key=key, document=True, ends=ends, ids=ids)


def attempted(make: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | str:
    """Result of `make`, or the reason for dropping the record it was given, which raised.

    Every reader makes rows of a record through this or `survivors`: one record, whatever it holds,
    costs itself only, and a mistake of ours shows as a count with its place.

    >>> attempted(int, "12"), attempted(int, "twelve")
    (12, 'raised ValueError in toque.sources.records.attempted')
    """
    try:
        return make(*args, **kwargs)
    except _NOT_THE_RECORDS:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a stranger's record raises
        return _reason(error)


def survivors(records: Iterator[_T]) -> Iterator[_T | str]:
    """The records of a source's record; one that raises ends them, with the reason in its place."""
    while True:
        try:
            record = next(records)
        except StopIteration:
            return
        except _NOT_THE_RECORDS:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            yield _reason(error)
            return
        yield record


def _reason(error: Exception) -> str:
    """The exception's type, and the last of our functions it came from."""
    place, at, ours = "", error.__traceback__, __name__.partition(".")[0]
    while at is not None:
        module = str(at.tb_frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] == ours:
            place = f"{module}.{at.tb_frame.f_code.co_qualname}"
        at = at.tb_next
    return f"raised {type(error).__name__} in {place}"


@dataclass(frozen=True)
class BlockExamples:
    """The examples of one block. `read == kept + sum of the dropped`, always."""

    examples: list[Example]  # examples in record order, those of a record side by side
    read: int  # records in the block
    kept: int  # records that gave at least one example
    dropped: dict[str, list[int]] = field(default_factory=dict)  # line numbers by the reason
    notes: dict[str, int] = field(default_factory=dict)  # counts of repairs and remarks
    unused: dict[str, int] = field(default_factory=dict)  # as `unused_in` finds it
    texts: dict[int, str] = field(default_factory=dict, compare=False)
    """Line number to the record's text, for the first few dropped records of each reason."""
    per_record: list[int] = field(default_factory=list)
    """Examples of each kept record, in order; may be left out where each gave one."""

    @property
    def sizes(self) -> list[int]:
        """Number of examples of each kept record."""
        return self.per_record or [1] * len(self.examples)

    @property
    def by_record(self) -> Iterator[list[Example]]:
        """The examples of each kept record."""
        each = iter(self.examples)
        return (list(islice(each, n)) for n in self.sizes)


class RecordReader(Protocol):
    """Turns files of one kind into examples.

    A reader is a frozen dataclass: the main process pickles it once for every worker. One of
    several tasks has `task_names`, by which the examples in use are counted.
    """

    @property
    def recorded_name(self) -> str:
        """Its name in manifests and fingerprints; a store is reused only if it stays the same."""

    @property
    def version(self) -> int:
        """Raised when the same bytes give other examples: older stores are then not reused."""

    def schema(self, path: Path) -> str:
        """The name of a file's schema in the report: "recipenlg", "web-page", "text" ..."""

    def blocks(self, path: Path) -> Iterator[Block]:
        """Raw blocks in order, in bounded memory, in the main process; DataError if unreadable."""

    def examples(self, block: Block) -> BlockExamples:
        """Parse and clean one block; called in a worker. A bad record is dropped, not raised."""


def examples_in(block: Block, reader: RecordReader) -> BlockExamples:
    """The examples of a block; DataError if its reader raised between records."""
    try:
        return reader.examples(block)
    except _NOT_THE_RECORDS:
        raise
    except Exception as error:
        raise DataError(
            f"The reader of {block.path} raised {type(error).__name__} on the block from line "
            f"{block.first_line}: {error}. This is a fault of the reader, not of the file; "
            f"{argument('traceback')} shows where it came from."
        ) from error


def in_encoding(recorded_name: str, encoding: str) -> str:
    """A reader's recorded name, with the encoding it reads if that is not UTF-8."""
    return recorded_name if encoding == UTF_8 else f"{recorded_name}{_ENCODING}{encoding}"


def encoding_in(recorded_name: str) -> str:
    """The encoding that a recorded name names; UTF-8 where it names none."""
    return recorded_name.rpartition(_ENCODING)[2] if _ENCODING in recorded_name else UTF_8


@dataclass(frozen=True)
class Located:
    """A file to read, and its name in reports and errors."""

    name: str  # the path, or the remote address it was fetched from
    path: Path
    sha256: str | None = None  # checksum of its bytes, if it was already computed


@dataclass(frozen=True)
class Source:
    """Files that are read together."""

    path: str  # a file, a glob pattern, or a folder (every file in it except hidden ones)
    reader: RecordReader
    files: tuple[Located, ...] | None = None  # None: those that `path` names on this machine
    readers: Mapping[str, RecordReader] = field(default_factory=dict)  # of files of another kind
    left_out: Mapping[str, str] = field(default_factory=dict)  # why files are not read, by name

    @property
    def versions(self) -> list[int]:
        """The version of its reader, and those of the readers of files of another kind."""
        others = sorted({(r.recorded_name, r.version) for r in self.readers.values()})
        return [self.reader.version, *(version for _, version in others)]

    def for_tasks(self, tasks: tuple[str, ...]) -> Source:
        """The same source, read for these tasks where its readers have a `for_tasks`, too."""

        def asked(reader: RecordReader) -> RecordReader:
            made: Callable[..., RecordReader] = getattr(reader, "for_tasks", lambda _: reader)
            return made(tasks)

        readers = {name: asked(reader) for name, reader in self.readers.items()}
        return replace(self, reader=asked(self.reader), readers=readers)


@dataclass(frozen=True)
class Contents:
    """A block's kind, its bytes, and what is needed to decode them."""

    kind: str
    meta: Mapping[str, Any]
    body: bytes
    first: int  # number of its first line, row or record


def unused_in(
    records: Iterable[Raw], used: Collection[str], unread: Collection[str] = ()
) -> dict[str, int]:
    """Fields that are filled and not used, with in how many records; `unread` columns in all."""
    whole = [record for record in records if isinstance(record, dict)]
    found = Counter(n for record in whole for n in record if n not in used and is_filled(record[n]))
    found.update(dict.fromkeys(unread, len(whole)))
    return most_named(found)


def is_filled(value: Any) -> bool:
    """True if a field holds anything: a text that is not blank, a number, a list of some length."""
    if isinstance(value, str):
        return bool(value.strip())
    return value not in (None, [], {}) and not is_not_finite(value)


def is_not_finite(value: Any) -> bool:
    """True for NaN and infinity, as which pandas writes a value that is missing."""
    return isinstance(value, float) and not math.isfinite(value)


def most_named(found: Counter[str]) -> dict[str, int]:
    """The fields of most records, and one entry for others, none of which has more."""
    named = found.most_common(_MOST_NAMED)
    others = {"(others)": named[-1][1]} if len(named) < len(found) else {}
    return {name[:_MOST_NAMED]: n for name, n in named} | others


def count_named(notes: Counter[str], note: str, name: str) -> None:
    """Count a `note` about a field in whose place it has "{}"; names beyond a hundred count as one.

    >>> count_named(notes := Counter(), "messages with {}", "name"); notes
    Counter({"messages with 'name'": 1})
    """
    said = note.format(repr(name[:_MOST_NAMED]))
    if said not in notes and len(notes) >= _MOST_NAMED:
        said = note.format("other fields")
    notes[said] += 1


def shortened(text: str | bytes, limit: int = MAX_CHARS) -> str:
    """Text of at most `limit` characters, valid in JSON."""
    if isinstance(text, bytes):
        text = text[: 4 * limit + 4].decode(errors="replace")
    whole = replace_lone_surrogates(text[: limit + 1])
    return whole if len(whole) <= limit else whole[:limit].rstrip("\n") + "…"


def replace_lone_surrogates(text: str) -> str:
    r"""Replace each lone surrogate with U+FFFD, and join pairs: UTF-8 cannot hold the halves.

    JSON can hold them as escapes, e.g. where a program cut an emoji.

    >>> replace_lone_surrogates("\ud83c\udf72 and \ud83c") == "\U0001f372 and \ufffd"
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def pack(path: Path, number: int, kind: str, body: bytes, **meta: Any) -> Block:
    """A block of `kind` whose first record begins at line, row or record `number`."""
    header = msgspec.json.encode({"kind": kind, **meta})
    return Block(0, str(path), number, b"".join((_MARK, header, b"\n", body)))


def unreadable(path: Path, number: int, reason: str) -> Block:
    """A block for one record that cannot be read."""
    return pack(path, number, "unreadable", b"", reason=reason)


def unpack(block: Block) -> Contents:
    """Contents that `pack` has put into a block; JSON lines, without a header, are "json-lines"."""
    if not block.payload.startswith(_MARK):
        return Contents("json-lines", {}, block.payload, block.first_line)
    end = block.payload.index(b"\n")
    try:
        meta = msgspec.json.decode(block.payload[len(_MARK) : end], type=dict[str, Any])
        return Contents(meta.pop("kind"), meta, block.payload[end + 1 :], block.first_line)
    except (msgspec.DecodeError, KeyError) as error:
        raise DataError(
            f"The block of {block.path} from line {block.first_line} has a damaged header "
            f"({error}). This is a fault of the reader, not of the file."
        ) from error
