"""Bytes of source files: plain or compressed by magic number, in bounded memory, in whole lines.

Other kinds (UTF-16, archives, workbooks) are refused with the command that converts them.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import lzma
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, Final, cast

from toque.errors import DataError, needing

UTF_8 = "utf-8"
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 18  # decompressed bytes used for format detection
SIZED_BYTES = 8 << 20  # decompressed bytes from which a file's size is estimated

MAX_RECORD_BYTES = 8 << 20  # of a longer record, which is counted as dropped, none is held
MAX_EXPANSION = 200  # highest compression ratio; recipes have ten, a bomb has a thousand
_MAGIC_BYTES = 10
_SIGN_BYTES = 1 << 16  # decompressed bytes by which an archive is recognised
MIN_BOMB_BYTES = 256 << 20  # decompressed bytes up to which the ratio is not checked

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_XZ = b"\xfd7zXZ\x00"
_BZIP2 = re.compile(rb"BZh[1-9](?:1AY&SY|\x17rE8P\x90)")
# Parquet, Arrow and archives, which have no encoding.
_NO_TEXT = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"PK\x03\x04")
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF_16 = "UTF-16 text. Set data.encoding=utf-16, or convert it: iconv -f UTF-16 -t UTF-8"
_UTF_16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_WORKBOOK = "Export its sheet as CSV first"
_DOCUMENT = "Save its text as .txt first"
_IN_ZIP: Final[dict[tuple[bytes, ...], str]] = {
    (b"xl/workbook", b"xl/worksheets", b"xl/_rels", b"xl/theme", b"xl/styles", b"xl/sharedS"): (
        f"an Excel workbook (.xlsx). {_WORKBOOK}"
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
    (b"mimetypeapplication/vnd.oasis",): f"an OpenDocument file (.odt or .odp). {_DOCUMENT}",
    (b"mimetypeapplication/epub",): f"an EPUB book. {_DOCUMENT}",
    (b"AndroidManifest.xml",): "an Android app (.apk). Take it out of data.sources",
    (b"META-INF/",): "a Java archive (.jar) or an app. Take it out of data.sources",
}
"""Kinds of ZIP archives by the beginning of one of their names, or of the file `mimetype`."""
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
    b"\xd0\xcf\x11\xe0": "an old Office file (.xls, .doc or .ppt). Export it as CSV or .txt first",
    b"{\\rtf": f"an RTF document. {_DOCUMENT}",
    b"\x89HDF\r\n": "an HDF5 file. Export its table as CSV or Parquet first",
    b"Obj\x01": "an Avro file. Export its records as JSON lines or Parquet first",
}
_ZIP_HEADER: Final = b"PK\x03\x04"
_NOT_OF_IT = "toque.not_of_the_encoding"  # name of an error handler of `codecs`
LONG_LINE = b"\0line too long"  # in place of a line over MAX_RECORD_BYTES, which is counted
_BREAK = re.compile(rb"[\r\n]")


def packed_as(path: Path) -> str:
    """The archive, document or database that a file is, and what to do; "" for what may be read."""
    with suppress(DataError), opened(path) as (stream, *_):  # its reader reports what is damaged
        return _unread_kind(stream.read(_SIGN_BYTES))
    return ""


def _has_member(start: bytes, names: tuple[bytes, ...]) -> bool:
    """Return True if the name of a file in a ZIP archive begins with one of these."""
    place = start.find(_ZIP_HEADER)
    while place != -1:
        # A file is a header of 30 bytes, its name, and its content.
        if start.startswith(names, place + 30):
            return True
        place = start.find(_ZIP_HEADER, place + 1)
    return False


def _unread_kind(start: bytes) -> str:
    """The kind of a file that is not read, by its decompressed beginning, and what to do."""
    if start.startswith(_ZIP_HEADER):
        start = start[:_SIGN_BYTES]
        kinds = (kind for names, kind in _IN_ZIP.items() if _has_member(start, names))
        return next(kinds, "a ZIP archive. Unpack it first: unzip")
    if _is_tar(start):
        return "a tar archive. Unpack it first: tar xf"
    return next((kind for sign, kind in _NOT_READ.items() if start.startswith(sign)), "")


def _is_tar(start: bytes) -> bool:
    """True if bytes begin with a header of tar, by its checksum: old ones have no other sign."""
    header = start[:512]
    if len(header) < 512 or not header[148:156].strip(b" \0"):
        return False
    with suppress(ValueError):
        checksum = int(header[148:156].strip(b" \0"), 8)
        return checksum == sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    return False


def chunks(path: Path, size: int = CHUNK_BYTES, *, encoding: str = UTF_8) -> Iterator[bytes]:
    """The decompressed bytes of a file, in UTF-8 and without a byte-order mark.

    Bytes that `encoding` does not know stay as they are, so that they are counted as not UTF-8;
    those of UTF-16 that would be ASCII become 0xFF.
    """
    with opened(path) as (stream, packed_bytes, _):
        plain = _bounded(path, stream, packed_bytes, size)
        start = next(plain, b"")
        if encoding == UTF_8 or start.startswith(_NO_TEXT):
            kind = _UTF_16 if start.startswith(_UTF_16_MARKS) else _unread_kind(start)
            if kind:
                raise DataError(
                    f"{path} is {kind}. Recipes and texts are read from JSON, JSON lines, CSV, "
                    "Parquet, web pages and plain text, which may be compressed with gzip, zstd, "
                    "xz or bzip2."
                )
            chunk = start.removeprefix(_UTF8_MARK)
        else:
            start = start.removeprefix(_UTF8_MARK)
            codecs.register_error(_NOT_OF_IT, _escaped)
            texts = codecs.iterdecode(chain([start], plain), encoding, _NOT_OF_IT)
            plain = (text.encode("utf-8", "surrogateescape") for text in texts)
            chunk = next(plain, b"").removeprefix(_UTF8_MARK)
        if chunk:
            yield chunk
        yield from plain


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Bytes as `surrogateescape` has them, which knows none below 128 and raises on them."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return "".join(chr(0xDC00 + (byte if byte > 127 else 0xFF)) for byte in wrong), error.end


def _bounded(path: Path, stream: IO[bytes], packed_bytes: int, size: int) -> Iterator[bytes]:
    """The chunks of a stream, as long as they are not far more than what they were packed in."""
    plain_bytes = 0
    while chunk := stream.read(size):
        plain_bytes += len(chunk)
        if packed_bytes and plain_bytes > max(MIN_BOMB_BYTES, MAX_EXPANSION * packed_bytes):
            raise DataError(
                f"{path} holds {packed_bytes:,} bytes that expand to more than {plain_bytes:,}, "
                f"over {MAX_EXPANSION} times as many. No recipes shrink that well: it is damaged "
                "or a decompression bomb. Take it out of data.sources, or decompress it yourself "
                "if you trust it."
            )
        yield chunk


def head(path: Path, size: int = HEAD_BYTES, *, encoding: str = UTF_8) -> tuple[bytes, bool]:
    """The first decompressed bytes of a file and whether they are the whole of it."""
    start = b""
    for chunk in chunks(path, size, encoding=encoding):
        start += chunk
        if len(start) > size:
            break
    if not start.strip():
        raise DataError(
            f"{path} is empty. Check that the download or export that wrote it has finished, or "
            "move it away, or name the other files alone."
        )
    return start[:size], len(start) <= size


def more_of(path: Path, start: bytes, *, whole: bool, encoding: str) -> tuple[bytes, bool] | None:
    """As `head`, as much as a record may have, where `start` holds no whole one; None: no more."""
    if whole or len(start) >= MAX_RECORD_BYTES:
        return None
    return head(path, MAX_RECORD_BYTES, encoding=encoding)


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], int, IO[bytes]]]:
    """The stream of plain bytes, the compressed file's size (0 if it is plain), and the file."""
    if path.is_dir():
        raise DataError(f"{path} is a folder where a file is expected. Name the files in it.")
    try:
        with path.open("rb") as raw:
            magic = raw.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
            if magic.startswith(_GZIP):
                with gzip.GzipFile(fileobj=raw) as plain:
                    yield cast(IO[bytes], plain), path.stat().st_size, raw
            elif magic.startswith(_XZ):
                with lzma.LZMAFile(raw) as unpacked:
                    yield cast(IO[bytes], unpacked), path.stat().st_size, raw
            elif _BZIP2.match(magic):
                with _bzip2(path, raw) as unpacked:
                    yield unpacked, path.stat().st_size, raw
            elif magic.startswith(_ZSTD):
                with _zstd(path, raw) as stream:
                    yield stream, path.stat().st_size, raw
            else:
                yield raw, 0, raw
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist. Check data.sources: paths are relative to the folder the "
            f"command runs in ({Path.cwd()})."
        ) from error
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        program = "xz" if magic.startswith(_XZ) else "gzip"
        raise _damaged(path, program, error) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check that it is whole, its "
            "permissions and the disk."
        ) from error


@contextmanager
def _bzip2(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    try:
        with bz2.BZ2File(raw) as plain:
            yield cast(IO[bytes], plain)
    except (OSError, EOFError) as error:
        raise _damaged(path, "bzip2", error) from error


@contextmanager
def _zstd(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    with needing("data", str(path), otherwise=", or decompress it: zstd -d", raised=DataError):
        import pyarrow as pa
    try:
        with pa.CompressedInputStream(raw, "zstd") as stream:
            yield cast(IO[bytes], stream)
    except (OSError, EOFError) as error:
        raise _damaged(path, "zstd", error) from error


def plain_size(path: Path) -> int:
    """Bytes of a file once decompressed: counted if few, else as well packed as its beginning.

    What a gzip or zstd file says of its size is of its last or first part alone, or nothing. A
    damaged file, which its reader refuses, has its own size.
    """
    with suppress(DataError), opened(path) as (stream, packed_bytes, packed):
        if packed_bytes:
            plain = 0
            while plain < SIZED_BYTES and (chunk := stream.read(CHUNK_BYTES)):
                plain += len(chunk)
            return plain if not chunk else round(plain * packed_bytes / packed.tell())
    return path.stat().st_size


def _damaged(path: Path, program: str, error: Exception) -> DataError:
    return DataError(
        f"{path} is a damaged or truncated {program} file ({error}). Download or compress it "
        f"again; `{program} -t` on the file tells whether it is whole."
    )


def runs_of_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of about a chunk that end with a line, too long ones replaced by `LONG_LINE`."""
    pending, skipping = b"", False
    for chunk in chunks:
        buffer = pending + chunk
        if skipping:
            line_break = _BREAK.search(buffer)
            if line_break is None:
                continue
            buffer, skipping = LONG_LINE + buffer[line_break.start() :], False
        # The last whole line ends here; a carriage return at the end may be half of CR LF.
        cut = max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, max(0, len(buffer) - 1))) + 1
        pending = buffer[cut:]
        if len(pending) > MAX_RECORD_BYTES:
            pending, skipping = b"", True
        if cut:
            yield buffer[:cut]
    if skipping or pending:
        yield LONG_LINE if skipping else pending


def count_lines(text: bytes) -> int:
    """Line breaks in whole lines: LF, CR LF and CR are each one."""
    if b"\r" not in text:
        return text.count(b"\n")
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
