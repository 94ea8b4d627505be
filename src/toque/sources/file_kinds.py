"""Choice of a reader for each source file by the file's content.

In a folder with record files, all other files (documentation, plain text, binary files) are skipped
and reported. A folder with text files only is read as plain text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from toque.sources.preference_pairs import PreferenceReader
from toque.sources.records import Located, RecordReader, Source
from toque.sources.source_files import is_documentation, named
from toque.sources.token_arrays import TokenReader, is_array_file

DOCUMENTATION = "documentation"
NO_TEXT = "no text, such as a picture"
PLAIN_TEXT = "plain text beside files of records"
_MAX_SHOWN = 5  # maximum number of skipped files to report per reason
ReaderFor = Callable[..., RecordReader]
"""Function (columns, encoding=...) that returns the domain's reader of files with these columns.

Without columns the reader recognises files itself, and its `schema` raises TextRecordsError or
RefusedFileError for other files.
"""


@dataclass(frozen=True)
class FileJudge:
    """Choice of readers for a source's files, limited by its settings `format` and `columns`."""

    source: FilesConfig
    encoding: str
    reader_for: ReaderFor

    def judge(self, files: Sequence[Located], say: Callable[[str], None]) -> Source:
        """Return the source with a reader for each file. `say` reports the skipped files."""
        path = self.source.path
        if len(files) == 1:
            return Source(path, self._reader_of(files[0]), tuple(files))

        readers, skipped = self._readers_of(files)
        if not readers:
            raise DataError(
                f"None of the {len(files)} files of the source {path} can be read: "
                f"{_format_skipped(skipped)}. Correct data.sources."
            )
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
            files=tuple(file for file in files if file.name in readers),
            readers={name: r for name, r in readers.items() if r != common},
            left_out=skipped,
        )

    def _readers_of(
        self, files: Sequence[Located]
    ) -> tuple[dict[str, RecordReader], dict[str, str]]:
        """Return the readers of a folder's files, and the reasons for skipping files, by name.

        Raises:
            RefusedFileError: The folder has no file of records, and a file was refused.
        """
        kinds: dict[str, RecordReader | str] = {}
        first_error: RefusedFileError | None = None
        for file in files:
            try:
                kinds[file.name] = self._kind_of(file)
            except RefusedFileError as error:
                kinds[file.name] = error.why
                first_error = first_error or error

        has_records = any(not isinstance(k, TextReader | str) for k in kinds.values())
        if first_error is not None and not has_records:
            raise first_error
        if self.source.format == "auto" and has_records:
            for name, kind in kinds.items():
                if isinstance(kind, TextReader):
                    is_readme = is_documentation(name)
                    kinds[name] = DOCUMENTATION if is_readme else PLAIN_TEXT
        readers = {name: k for name, k in kinds.items() if not isinstance(k, str)}
        skipped = {name: k for name, k in kinds.items() if isinstance(k, str)}
        return readers, skipped

    def _kind_of(self, file: Located) -> RecordReader | str:
        """Return the reader of one of several files, or the reason for skipping the file."""
        if not is_array_file(file.path) and (packed := packed_as(file.path)):
            return packed.partition(". ")[0]
        if is_pickle(file.path) or self._is_binary(file):
            return NO_TEXT
        if self.source.format in ("auto", "recipes") and is_documentation(file.name):
            is_text = self.source.format == "auto" and not self.source.columns
            return TextReader(encoding=self.encoding) if is_text else DOCUMENTATION
        return self._reader_of(file)

    def _is_binary(self, file: Located) -> bool:
        """Check whether a file is neither text nor a format of records."""
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
                reader = self._recognise(reader, file)
            return _fit_pairs(reader, file.path)

    def _recognise(self, reader: RecordReader, file: Located) -> RecordReader:
        """Return the domain's reader if it can read a file, otherwise a reader of its texts."""
        try:
            if isinstance(reader, TaskReader):
                return reader.for_file(file.path)
            reader.schema(file.path)
        except TextRecordsError as error:
            return self.reader_for(error.columns, encoding=self.encoding)
        except UnknownFormatError as error:
            if self.source.columns:
                raise RefusedFileError(str(error), PLAIN_TEXT) from error
            return self._text_reader_of(file)
        return reader

    def _text_reader_of(self, file: Located) -> TextReader:
        """Return the reader of a text file.

        Raises:
            DataError: The file is binary.
        """
        if not self._is_binary(file):
            return TextReader(encoding=self.encoding)
        start, _ = head(file.path)
        raise DataError(
            f"{file.name} is not a text file. It begins with {start[:12]!r}. Remove it "
            "from data.sources. docs/reference/formats.md lists the formats."
        ) from None


def _fit_pairs(reader: RecordReader, path: Path) -> RecordReader:
    """Return a reader of preference pairs in the form that fits a file, or any other reader."""
    return reader.for_file(path) if isinstance(reader, PreferenceReader) else reader


def _format_skipped(skipped: dict[str, str]) -> str:
    """List the names of skipped files by reason, the most common reason first."""
    parts = []
    for reason, n in Counter(skipped.values()).most_common():
        paths = [path for path, why in skipped.items() if why == reason]
        names = ", ".join(path.rpartition("/")[2] for path in paths[:_MAX_SHOWN])
        more = f" and {n - _MAX_SHOWN} more" if n > _MAX_SHOWN else ""
        parts.append(f"{names}{more} ({reason})")
    return "; ".join(parts)
