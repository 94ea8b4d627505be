"""Kinds of source files, each judged by its own content.

Documentation and plain text beside files of records, and what is no text, are left out, by name and
counted. A folder of nothing but text is plain text, as it lies there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from toque.config.schema import FilesConfig
from toque.errors import DataError
from toque.sources.decompress import head, packed_as
from toque.sources.documents import TextReader
from toque.sources.layouts import (
    Columns,
    RefusedFileError,
    TextRecordsError,
    UnknownFormatError,
    is_binary,
    is_columnar,
    is_pickle,
    refuse_pickle,
)
from toque.sources.own_tasks import TaskReader
from toque.sources.records import Located, RecordReader, Source
from toque.sources.source_files import is_documentation, named
from toque.sources.token_arrays import TokenReader, is_array_file

DOCUMENTATION = "documentation"
NO_TEXT = "no text, such as a picture"
PLAIN_TEXT = "plain text beside files of records"
_SHOWN = 5
ReaderFor = Callable[..., RecordReader]
"""(columns, encoding=...) -> the domain's reader of files with these columns, or of all that it
recognises; its `schema` raises TextRecordsError or RefusedFileError for other files."""


@dataclass(frozen=True)
class FileJudge:
    """Judges the files of a source; its format and columns are obeyed."""

    source: FilesConfig
    encoding: str
    reader_for: ReaderFor

    def judged(self, files: Sequence[Located], say: Callable[[str], None]) -> Source:
        """The source with the reader of each of its files; `say` hears which are left out."""
        path = self.source.path
        if len(files) == 1:
            return Source(path, self._reader_of(files[0]), tuple(files))
        kinds: dict[str, RecordReader | str] = {}
        refused: RefusedFileError | None = None
        for file in files:
            try:
                kinds[file.name] = self._kind_of(file)
            except RefusedFileError as error:
                kinds[file.name], refused = error.why, refused or error
        found_records = any(not isinstance(kind, TextReader | str) for kind in kinds.values())
        if refused is not None and not found_records:
            raise refused
        if self.source.format == "auto" and found_records:
            for name, kind in kinds.items():
                if isinstance(kind, TextReader):
                    kinds[name] = DOCUMENTATION if is_documentation(name) else PLAIN_TEXT
        left_out = {name: kind for name, kind in kinds.items() if isinstance(kind, str)}
        readers = {name: kind for name, kind in kinds.items() if not isinstance(kind, str)}
        if not readers:
            raise DataError(
                f"None of the {len(files)} files of the source {path} can be read: "
                f"{_in_words(left_out)}. Correct data.sources."
            )
        if left_out:
            to_do = " To train on such a text too, name it as a source of its own."
            to_do = to_do if PLAIN_TEXT in left_out.values() else ""
            say(f"Not read of {path}: {_in_words(left_out)}.{to_do}")
        # The reader of most files is the source's own: a store records it once.
        kept = list(readers.values())
        ((name, _),) = Counter(reader.recorded_name for reader in kept).most_common(1)
        usual = next(reader for reader in kept if reader.recorded_name == name)
        return Source(
            path,
            usual,
            tuple(file for file in files if file.name in readers),
            {name: reader for name, reader in readers.items() if reader != usual},
            left_out,
        )

    def _kind_of(self, file: Located) -> RecordReader | str:
        """The reader of a file among others, or why it is left out."""
        if not is_array_file(file.path) and (packed := packed_as(file.path)):
            return packed.partition(".")[0]
        if is_pickle(file.path) or self._is_binary(file):
            return NO_TEXT
        if self.source.format in ("auto", "recipes") and is_documentation(file.name):
            is_text = self.source.format == "auto" and not self.source.columns
            return TextReader(encoding=self.encoding) if is_text else DOCUMENTATION
        return self._reader_of(file)

    def _is_binary(self, file: Located) -> bool:
        if is_array_file(file.path) or is_columnar(file.path):
            return False
        with named(file.path, file.name):
            start, _ = head(file.path, encoding=self.encoding)
        return start.lstrip()[:1] not in (b"{", b"[") and is_binary(start)

    def _reader_of(self, file: Located) -> RecordReader:
        """The reader by the file's content, not by its name.

        An unknown format is plain text, which has no columns that a user could name.
        """
        refuse_pickle(file.path, file.name)
        source, encoding = self.source, self.encoding
        columns: Columns = {str(part): name for part, name in source.columns.items()}
        if source.format == "tokens" or (source.format == "auto" and is_array_file(file.path)):
            return TokenReader()
        with named(file.path, file.name):
            if source.format == "text" and not columns:
                if is_columnar(file.path):
                    return self.reader_for({"text": "text"}, encoding=encoding)
                return TextReader(encoding=encoding)
            reader = self.reader_for(columns, encoding=encoding)
            if source.format == "auto":
                try:
                    if isinstance(reader, TaskReader):
                        return reader.for_file(file.path)
                    reader.schema(file.path)
                except UnknownFormatError as error:
                    if columns:
                        raise RefusedFileError(str(error), PLAIN_TEXT) from error
                    if not self._is_binary(file):
                        return TextReader(encoding=encoding)
                    start, _ = head(file.path)
                    raise DataError(
                        f"{file.name} is {NO_TEXT}: it begins {start[:12]!r}. Take it out of "
                        "data.sources, whose files docs/reference/formats.md lists."
                    ) from None
                except TextRecordsError as found:
                    return self.reader_for(found.columns, encoding=encoding)
        return reader


def _in_words(left_out: dict[str, str]) -> str:
    parts = []
    for why, n in Counter(left_out.values()).most_common():
        names = [name.rpartition("/")[2] for name, reason in left_out.items() if reason == why]
        more = f" and {n - _SHOWN} more" if n > _SHOWN else ""
        parts.append(f"{', '.join(names[:_SHOWN])}{more} ({why})")
    return "; ".join(parts)
