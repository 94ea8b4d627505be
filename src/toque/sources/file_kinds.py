"""Choice of a reader for each source file, by its content.

In a folder with files of records, documentation, plain text and binary files are skipped and
reported. A folder with text files only is read as plain text.
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
_MAX_SHOWN = 5  # names of skipped files per reason
ReaderFor = Callable[..., RecordReader]
"""Function (columns, encoding=...) that returns the domain's reader of files with these columns.

Without columns the reader recognises files itself, and its `schema` raises TextRecordsError or
RefusedFileError for other files.
"""


@dataclass(frozen=True)
class FileJudge:
    """Choice of readers for the files of a source, within its `format` and `columns` settings."""

    source: FilesConfig
    encoding: str
    reader_for: ReaderFor

    def judged(self, files: Sequence[Located], say: Callable[[str], None]) -> Source:
        """Return the source with a reader for each file. `say` reports the skipped files."""
        path = self.source.path
        if len(files) == 1:
            return Source(path, self._reader_of(files[0]), tuple(files))

        readers: dict[str, RecordReader] = {}
        skipped: dict[str, str] = {}
        first_error: RefusedFileError | None = None
        for file in files:
            try:
                kind = self._kind_of(file)
            except RefusedFileError as error:
                kind = error.why
                first_error = first_error or error
            if isinstance(kind, str):
                skipped[file.name] = kind
            else:
                readers[file.name] = kind

        has_records = any(
            not isinstance(reader, TextReader) for reader in readers.values()
        )
        if first_error is not None and not has_records:
            raise first_error
        if self.source.format == "auto" and has_records:
            texts = [
                name
                for name, reader in readers.items()
                if isinstance(reader, TextReader)
            ]
            for name in texts:
                del readers[name]
                skipped[name] = DOCUMENTATION if is_documentation(name) else PLAIN_TEXT
        if not readers:
            raise DataError(
                f"None of the {len(files)} files of the source {path} can be read: "
                f"{_format_skipped(skipped)}. Correct data.sources."
            )
        # Text files were added last. Restore the order of the files.
        skipped = {
            file.name: skipped[file.name] for file in files if file.name in skipped
        }
        if skipped:
            notice = f"{path}: skipped {_format_skipped(skipped)}."
            if PLAIN_TEXT in skipped.values():
                notice += " To train on a skipped text, add it as a separate source."
            say(notice)

        # A store records the most common reader once.
        names = Counter(reader.recorded_name for reader in readers.values())
        ((common_name, _),) = names.most_common(1)
        common = next(r for r in readers.values() if r.recorded_name == common_name)
        return Source(
            path,
            common,
            tuple(file for file in files if file.name in readers),
            {name: reader for name, reader in readers.items() if reader != common},
            skipped,
        )

    def _kind_of(self, file: Located) -> RecordReader | str:
        """Return the reader of a file in a folder, or the reason for skipping the file."""
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
        """Return the reader for the file's content. A file of unknown format is plain text."""
        refuse_pickle(file.path, file.name)
        source, encoding = self.source, self.encoding
        columns: Columns = {str(role): name for role, name in source.columns.items()}

        if source.format == "tokens" or (
            source.format == "auto" and is_array_file(file.path)
        ):
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
                        f"{file.name} is not a text file. It begins with {start[:12]!r}. Remove it "
                        "from data.sources. docs/reference/formats.md lists the formats."
                    ) from None
                except TextRecordsError as error:
                    return self.reader_for(error.columns, encoding=encoding)
        return reader


def _format_skipped(skipped: dict[str, str]) -> str:
    """List the names of skipped files by reason, the most common reason first."""
    parts = []
    for reason, n in Counter(skipped.values()).most_common():
        names = [
            name.rpartition("/")[2] for name, why in skipped.items() if why == reason
        ]
        more = f" and {n - _MAX_SHOWN} more" if n > _MAX_SHOWN else ""
        parts.append(f"{', '.join(names[:_MAX_SHOWN])}{more} ({reason})")
    return "; ".join(parts)
