"""Reading of plain and compressed source files in bounded memory.

The compression is detected by magic bytes. Other kinds of files, such as UTF-16, archives and
workbooks, are refused with the command that converts them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import IO, Any, cast

from toque.errors import DataError, needing

UTF_8 = "utf-8"
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 18
"""Number of decompressed bytes from which the format is detected."""
SIZED_BYTES = 8 << 20
"""Number of decompressed bytes from which a file's decompressed size is estimated."""
MAX_RECORD_BYTES = 8 << 20
"""Maximum size of a record in bytes. A longer record is dropped and never read into memory whole.
"""
MAX_EXPANSION = 200
"""Maximum compression ratio. Recipes reach about 10, decompression bombs more than 1000."""
_MAGIC_BYTES = 10
SIGN_BYTES = 1 << 16
"""Number of decompressed bytes from which archives are detected."""
MIN_BOMB_BYTES = 256 << 20
"""Decompressed bytes above which the compression ratio is checked."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\x00"
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
# Parquet, Arrow and archives do not have an encoding.
_NO_TEXT = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"PK\x03\x04")
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF_16 = (
    "UTF-16 text. Set data.encoding=utf-16, or convert it: iconv -f UTF-16 -t UTF-8"
)
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_WORKBOOK_MEMBERS = (
    b"xl/workbook",
    b"xl/worksheets",
    b"xl/_rels",
    b"xl/theme",
    b"xl/styles",
    b"xl/sharedS",
)
"""First characters of file names in a workbook (.xlsx)."""
_BINARY_WORKBOOK_MEMBERS = (b"xl/workbook.bin", b"xl/worksheets/sheet1.bin")
_FIRST_MEMBERS = (
    b"[Content_Types].xml",
    b"_rels/",
    b"docProps/",
    b"customXml/",
    b"xl/",
)
"""First characters of the first name in a workbook, but not in an archive of workbooks."""
_WORKBOOK = "Export its sheet as CSV first"
_DOCUMENT = "Save its text as .txt first"
_IN_ZIP: dict[tuple[bytes, ...], str] = {
    _BINARY_WORKBOOK_MEMBERS: (
        "a binary Excel workbook (.xlsb). Save it as .xlsx first"
    ),
    (b"word/document", b"word/_rels", b"word/styles", b"word/theme"): (
        f"a Word document (.docx). {_DOCUMENT}"
    ),
    (b"ppt/presentation", b"ppt/slides", b"ppt/_rels", b"ppt/theme"): (
        f"a PowerPoint presentation (.pptx). {_DOCUMENT}"
    ),
    (b"mimetypeapplication/vnd.oasis.opendocument.spreadsheet",): (
        f"an OpenDocument spreadsheet (.ods). {_WORKBOOK}"
    ),
    (
        b"mimetypeapplication/vnd.oasis",
    ): f"an OpenDocument file (.odt or .odp). {_DOCUMENT}",
    (b"mimetypeapplication/epub",): f"an EPUB book. {_DOCUMENT}",
    (b"AndroidManifest.xml",): "an Android app (.apk). Remove it from data.sources",
    (b"META-INF/",): "a Java archive (.jar) or an app. Remove it from data.sources",
}
"""Kinds of ZIP archives by the first characters of a file name, or of the file `mimetype`."""
_NOT_READ = {
    b"7z\xbc\xaf": "a 7-Zip archive. Unpack it first: 7z x",
    b"Rar!\x1a\x07": "a RAR archive. Unpack it first: unrar x",
    b"!<arch>\n": "an ar archive or a package (.deb). Unpack it first: ar x",
    b"\x1f\x9d": "compressed with compress (.Z). Decompress it first: uncompress",
    b"\x04\x22\x4d\x18": "compressed with LZ4. Decompress it first: unlz4",
    b"LZIP\x01": "compressed with lzip. Decompress it first: lzip -d",
    b"\xff\x06\x00\x00sNaPpY": "compressed with Snappy. Decompress it first",
    b"SQLite format 3": "an SQLite database. Export its table as CSV first",
    b"%PDF-": "a PDF document. Extract its text first: pdftotext",
    b"{\\rtf": f"an RTF document. {_DOCUMENT}",
    b"\x89HDF\r\n": "an HDF5 file. Export its table as CSV or Parquet first",
    b"Obj\x01": "an Avro file. Export its records as JSON lines or Parquet first",
}
_OLD_OFFICE = b"\xd0\xcf\x11\xe0"
_ENCRYPTED = "EncryptedPackage".encode("utf-16-le")
"""Name of the content in an Office file with a password."""
ZIP_ARCHIVE = "a ZIP archive. Unpack it first: unzip"
TAR_ARCHIVE = "a tar archive. Unpack it first: tar xf"
_ZIP_HEADER = b"PK\x03\x04"
_NAME_OFFSET = 30
"""Position of a file's name after the start of its header in a ZIP archive."""
_KEEP_BYTES = "toque.keep_bytes"
"""Name of an error handler for `codecs`."""
LONG_LINE = b"\0line too long"
"""Replacement of a line over MAX_RECORD_BYTES, so that the line is counted."""
_BREAK = re.compile(rb"[\r\n]")


def packed_as(path: Path) -> str:
    """Describe an archive, document or database and its conversion. "" for a readable file."""
    # The reader reports a damaged file.
    with suppress(DataError), opened(path) as (stream, *_):
        return _unread_kind(stream.read(SIGN_BYTES))
    return ""


def _has_member(start: bytes, prefixes: tuple[bytes, ...]) -> bool:
    """Check whether the name of a file in a ZIP archive begins with one of these prefixes."""
    position = start.find(_ZIP_HEADER)
    while position != -1:
        if start.startswith(prefixes, position + _NAME_OFFSET):
            return True
        position = start.find(_ZIP_HEADER, position + 1)
    return False


def is_workbook(start: bytes) -> bool:
    """Check by its first bytes whether a file is an Excel workbook (.xlsx)."""
    start = start[:SIGN_BYTES]
    is_zip = start.startswith(_ZIP_HEADER)
    if not is_zip or not start.startswith(_FIRST_MEMBERS, _NAME_OFFSET):
        return False
    is_binary = _has_member(start, _BINARY_WORKBOOK_MEMBERS)
    return _has_member(start, _WORKBOOK_MEMBERS) and not is_binary


def _unread_kind(start: bytes) -> str:
    """Describe an unsupported kind of file by its first decompressed bytes, and its conversion."""
    if start.startswith(_OLD_OFFICE):
        if _ENCRYPTED in start[:SIGN_BYTES]:
            return "an Office file with a password. Save it without a password first"
        return (
            "an old Office file (.xls, .doc or .ppt), or one with a password. Save it as .xlsx, "
            "CSV or .txt first"
        )
    if start.startswith(_ZIP_HEADER):
        start = start[:SIGN_BYTES]
        kinds = (kind for names, kind in _IN_ZIP.items() if _has_member(start, names))
        return "" if is_workbook(start) else next(kinds, ZIP_ARCHIVE)
    if _is_tar(start):
        return TAR_ARCHIVE
    return next(
        (kind for sign, kind in _NOT_READ.items() if start.startswith(sign)), ""
    )


def _is_tar(start: bytes) -> bool:
    """Check for a tar header by its checksum, because old headers have no magic bytes."""
    header = start[:512]
    octal = header[148:156].strip(b" \0")
    if len(header) < 512 or not octal:
        return False
    with suppress(ValueError):
        # The field of the checksum counts as eight spaces.
        return int(octal, 8) == sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return False


def chunks(
    path: Path, size: int = CHUNK_BYTES, *, encoding: str = UTF_8
) -> Iterator[bytes]:
    """Read the decompressed bytes of a file as UTF-8, without a byte-order mark.

    Bytes that are invalid in `encoding` stay unchanged, and are later counted as invalid UTF-8.
    Invalid bytes of UTF-16 below 128 would be valid UTF-8. They become 0xFF.

    Raises:
        DataError: The file cannot be read, or its kind is not supported.
    """
    with opened(path) as (stream, packed_bytes, _):
        plain = _read_chunks(path, stream, packed_bytes, size)
        start = next(plain, b"")
        if encoding == UTF_8 or start.startswith(_NO_TEXT):
            _refuse_other_kinds(path, start)
        else:
            codecs.register_error(_KEEP_BYTES, _escape_bytes)
            encoded = chain([start.removeprefix(_UTF8_MARK)], plain)
            texts = codecs.iterdecode(encoded, encoding, _KEEP_BYTES)
            plain = (text.encode("utf-8", "surrogateescape") for text in texts)
            start = next(plain, b"")
        start = start.removeprefix(_UTF8_MARK)
        if start:
            yield start
        yield from plain


def _refuse_other_kinds(path: Path, start: bytes) -> None:
    """Refuse UTF-16, archives, documents and databases by the first bytes of a file."""
    kind = _UTF_16 if start.startswith(_UTF_16_MARKS) else _unread_kind(start)
    if kind:
        raise DataError(
            f"{path} is {kind}. Recipes and texts are read from JSON, JSON lines, CSV, Excel "
            "workbooks (.xlsx), Parquet, web pages and plain text. They may be compressed with "
            "gzip, zstd, xz or bzip2."
        )


def _escape_bytes(error: UnicodeError) -> tuple[str, int]:
    """Escape invalid bytes like `surrogateescape`, which raises on bytes below 128."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    invalid = error.object[error.start : error.end]
    escapes = [chr(0xDC00 + (byte if byte > 127 else 0xFF)) for byte in invalid]
    return "".join(escapes), error.end


def _read_chunks(
    path: Path, stream: IO[bytes], packed_bytes: int, size: int
) -> Iterator[bytes]:
    """Read the chunks of a stream, and refuse a decompression bomb."""
    max_bytes = max(MIN_BOMB_BYTES, MAX_EXPANSION * packed_bytes)
    plain_bytes = 0
    while chunk := stream.read(size):
        plain_bytes += len(chunk)
        if packed_bytes and plain_bytes > max_bytes:
            raise DataError(
                f"{path} expands from {packed_bytes:,} to more than {plain_bytes:,} bytes, over "
                f"{MAX_EXPANSION} times as many. Text does not compress that well, so the file is "
                "damaged or a decompression bomb. Remove it from data.sources, or decompress it "
                "yourself if you trust it."
            )
        yield chunk


def head(
    path: Path, size: int = HEAD_BYTES, *, encoding: str = UTF_8
) -> tuple[bytes, bool]:
    """Read the first decompressed bytes of a file. Also return whether they are the entire file.

    Raises:
        DataError: The file is empty or cannot be read.
    """
    start = b""
    for chunk in chunks(path, size, encoding=encoding):
        start += chunk
        if len(start) > size:
            break
    if not start.strip():
        raise DataError(
            f"{path} is empty. Check that the download or export that wrote it has finished. "
            "Otherwise remove it, or list the other files in data.sources."
        )
    return start[:size], len(start) <= size


def longer_head(
    path: Path, start: bytes, *, is_entire_file: bool, encoding: str
) -> tuple[bytes, bool] | None:
    """Read a head as long as the longest record. Return None if `start` is already long enough."""
    if is_entire_file or len(start) >= MAX_RECORD_BYTES:
        return None
    return head(path, MAX_RECORD_BYTES, encoding=encoding)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int, IO[bytes]]]:
    """Open a file. Yield the decompressed stream, the compressed size and the raw file.

    The size is 0 for a file that is not compressed.

    Raises:
        DataError: The file does not exist, is damaged or cannot be read.
    """
    if path.is_dir():
        raise DataError(
            f"{path} must be a file, not a folder. List the files in it instead."
        )

    try:
        with path.open("rb") as raw, _decompress(path, raw) as plain:
            yield plain, 0 if plain is raw else path.stat().st_size, raw
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist. Check data.sources: paths are relative to the working "
            f"directory of the command ({Path.cwd()})."
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check the disk, the file's "
            "permissions, and that the file is complete."
        ) from error


@contextmanager
def _decompress(path: Path, raw: BufferedReader) -> Iterator[IO[bytes]]:
    """Yield the decompressed stream of a file, or `raw` if the file is not compressed."""
    unpack: Callable[[BufferedReader], Any]
    # bzip2 and pyarrow raise an OSError for damage. gzip and lzma raise it only for the disk.
    errors: tuple[type[Exception], ...] = (OSError, EOFError)
    magic = raw.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
    if magic.startswith(_GZIP):
        program, unpack = "gzip", gzip.open
        errors = (gzip.BadGzipFile, EOFError, zlib.error)
    elif magic.startswith(_XZ):
        program, unpack = "xz", lzma.open
        errors = (lzma.LZMAError, EOFError)
    elif _BZIP2.match(magic):
        program, unpack = "bzip2", bz2.open
    elif magic.startswith(_ZSTD):
        with needing(
            "data", str(path), otherwise=", or decompress it: zstd -d", raised=DataError
        ):
            import pyarrow as pa
        program = "zstd"
        unpack = partial(pa.CompressedInputStream, compression="zstd")
    else:
        yield raw
        return

    try:
        with unpack(raw) as stream:
            yield cast(IO[bytes], stream)
    except errors as error:
        raise DataError(
            f"{path} is a damaged or truncated {program} file ({error}). Download or compress it "
            f"again. `{program} -t` checks the file."
        ) from error


def plain_size(path: Path) -> int:
    """Estimate the decompressed bytes of a file from the compression ratio of its first bytes.

    The sizes that gzip and zstd record may be missing, or may cover only a part of the file. For a
    damaged file, which the reader refuses later, return the size of the file.
    """
    with suppress(DataError), opened(path) as (stream, packed_bytes, packed):
        if packed_bytes:
            plain_bytes = 0
            while chunk := stream.read(CHUNK_BYTES):
                plain_bytes += len(chunk)
                if plain_bytes >= SIZED_BYTES:
                    return round(plain_bytes * packed_bytes / packed.tell())
            return plain_bytes
    return path.stat().st_size


def runs_of_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Divide chunks after line breaks. A line that is too long is replaced by `LONG_LINE`."""
    pending = b""
    skipping = False
    for chunk in chunks:
        buffer = pending + chunk
        if skipping:
            line_break = _BREAK.search(buffer)
            if line_break is None:
                continue
            buffer = LONG_LINE + buffer[line_break.start() :]
            skipping = False
        # Find the end of the last complete line. CR at the end may be half of CR LF.
        last_lf = buffer.rfind(b"\n")
        last_cr = buffer.rfind(b"\r", 0, max(0, len(buffer) - 1))
        cut = max(last_lf, last_cr) + 1
        pending = buffer[cut:]
        if len(pending) > MAX_RECORD_BYTES:
            pending = b""
            skipping = True
        if cut:
            yield buffer[:cut]
    if skipping:
        yield LONG_LINE
    elif pending:
        yield pending


def count_lines(text: bytes) -> int:
    """Count the line breaks: LF, CR LF and CR."""
    if b"\r" not in text:
        return text.count(b"\n")
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
