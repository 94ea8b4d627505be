"""Kinds of source files: each is judged by its own content, whatever lies beside it.

A folder of recipes often holds a README, a licence, pictures. Files of records are read by the
reader of their kind; documentation, plain text beside records and what is no text are left out, by
name and counted. A folder of nothing but text is plain text, as it lies there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from toque.config import SourceConfig
from toque.cooking.schemas import RefusedFileError, TextRecordsError, reader_for
from toque.errors import DataError
from toque.sources.decompress import head
from toque.sources.detect import UnknownFormatError, is_binary, is_columnar
from toque.sources.files import is_documentation, named
from toque.sources.npz_stream import is_array_file
from toque.sources.pickle_guard import is_pickle, refuse_pickle
from toque.sources.plain_text import TextReader
from toque.sources.records import RecordReader, Source
from toque.sources.token_arrays import TokenReader
from toque.storage.located import Located

DOCUMENTATION = "documentation"
NO_TEXT = "no text, such as a picture"
PLAIN_TEXT = "plain text beside files of records"
_SHOWN = 5


def judged(
    source: SourceConfig, files: Sequence[Located], *, encoding: str, say: Callable[[str], None]
) -> Source:
    """The source with the reader of each of its files, and those left out, which `say` names.

    `encoding` is that of all text.

    Raises:
        DataError: a file cannot be used, or none is left.
    """
    if len(files) == 1:
        return Source(source.path, _reader_of(source, files[0], encoding), tuple(files))
    kinds: dict[str, RecordReader | str] = {}
    refused: RefusedFileError | None = None
    for file in files:
        try:
            kinds[file.name] = _kind_of(source, file, encoding)
        except RefusedFileError as error:
            kinds[file.name], refused = error.why, refused or error
    found_records = any(_is_records(kind) for kind in kinds.values())
    if refused is not None and not found_records:
        raise refused
    if source.format == "auto" and found_records:
        for name, kind in kinds.items():
            if isinstance(kind, TextReader):
                kinds[name] = DOCUMENTATION if is_documentation(name) else PLAIN_TEXT
    left_out = {name: kind for name, kind in kinds.items() if isinstance(kind, str)}
    readers = {name: kind for name, kind in kinds.items() if not isinstance(kind, str)}
    if not readers:
        raise DataError(
            f"None of the {len(files)} files of the source {source.path} can be read: "
            f"{_in_words(left_out)}. Correct data.sources."
        )
    if left_out:
        say(f"Not read of {source.path}: {_in_words(left_out)}.{_to_do(left_out)}")
    # The reader of most files is the source's own: a store records it once.
    usual = _most_frequent(list(readers.values()))
    return Source(
        source.path,
        usual,
        tuple(file for file in files if file.name in readers),
        {name: reader for name, reader in readers.items() if reader != usual},
        left_out,
    )


def _kind_of(source: SourceConfig, file: Located, encoding: str) -> RecordReader | str:
    """The reader of a file among others, or why it is left out."""
    if is_pickle(file.path) or _is_binary(file, encoding):
        return NO_TEXT
    if source.format in ("auto", "recipes") and is_documentation(file.name):
        return TextReader(encoding=encoding) if source.format == "auto" else DOCUMENTATION
    return _reader_of(source, file, encoding)


def _is_records(kind: RecordReader | str) -> bool:
    return not isinstance(kind, TextReader | str)


def _is_binary(file: Located, encoding: str) -> bool:
    if is_array_file(file.path) or is_columnar(file.path):
        return False
    with named(file.path, file.name):
        start, _ = head(file.path, encoding=encoding)
    return start.lstrip()[:1] not in (b"{", b"[") and is_binary(start)


def _reader_of(source: SourceConfig, file: Located, encoding: str) -> RecordReader:
    """The reader by the file's content, not by its name; an unknown format is plain text."""
    refuse_pickle(file.path, file.name)
    columns: dict[str, str | tuple[str, ...]] = {
        str(part): name for part, name in source.columns.items()
    }
    if source.format == "tokens" or (source.format == "auto" and is_array_file(file.path)):
        return TokenReader()
    with named(file.path, file.name):
        if source.format == "text" and not columns:
            if is_columnar(file.path):
                return reader_for({"text": "text"}, encoding=encoding)
            return TextReader(encoding=encoding)
        reader = reader_for(columns, encoding=encoding)
        if source.format == "auto":
            try:
                reader.schema(file.path)
            except UnknownFormatError:
                if _is_binary(file, encoding):
                    raise _refusal(file) from None
                return TextReader(encoding=encoding)
            except TextRecordsError as found:
                return reader_for(found.columns, encoding=encoding)
    return reader


def _refusal(file: Located) -> DataError:
    start, _ = head(file.path)
    return DataError(
        f"{file.name} is {NO_TEXT}: it begins {start[:12]!r}. Sources are recipes, texts or arrays "
        "of token ids (docs/reference/formats.md); take it out of data.sources."
    )


def _most_frequent(readers: Sequence[RecordReader]) -> RecordReader:
    """The reader of most files; of as many, the first."""
    counts = [(sum(other == reader for other in readers), reader) for reader in _distinct(readers)]
    return max(counts, key=lambda counted: counted[0])[1]


def _distinct(readers: Sequence[RecordReader]) -> list[RecordReader]:
    found: list[RecordReader] = []
    for reader in readers:
        if reader not in found:
            found.append(reader)
    return found


def _in_words(left_out: dict[str, str]) -> str:
    counts = Counter(left_out.values())
    parts = []
    for why, n in counts.most_common():
        names = [name.rpartition("/")[2] for name, reason in left_out.items() if reason == why]
        more = f" and {n - _SHOWN} more" if n > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more} ({why})")
    return "; ".join(parts)


def _to_do(left_out: dict[str, str]) -> str:
    if PLAIN_TEXT not in left_out.values():
        return ""
    return " To train on such a text too, name it as a source of its own."
