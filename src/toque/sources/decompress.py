"""Bytes of source files: plain, gzip and zstd by magic number, in bounded memory, in whole lines.

Other kinds (UTF-16, archives, other compressions) are refused with the command that converts them.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import IO, cast

from toque.errors import DataError, needing

UTF_8 = "utf-8"
CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 18  # decompressed bytes used for format detection
SIZED_BYTES = 8 << 20  # decompressed bytes from which a file's size is estimated

MAX_RECORD_BYTES = 8 << 20  # of a longer record, which is counted as dropped, none is held
MAX_EXPANSION = 200  # highest compression ratio; recipes have ten, a bomb has a thousand
MIN_BOMB_BYTES = 256 << 20  # decompressed bytes up to which the ratio is not checked

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
# Parquet, Arrow and archives, which have no encoding.
_NO_TEXT = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff", b"PK\x03\x04")
_UTF8_MARK = b"\xef\xbb\xbf"
_UTF_16 = "UTF-16 text. Set data.encoding=utf-16, or convert it: iconv -f UTF-16 -t UTF-8"
_NOT_READ = {
    b"\xff\xfe": _UTF_16,
    b"\xfe\xff": _UTF_16,
    b"PK\x03\x04": "a ZIP archive. Unpack it first: unzip",
    b"BZh": "compressed with bzip2. Decompress it first: bunzip2",
    b"\xfd7zXZ": "compressed with xz. Decompress it first: unxz",
    b"7z\xbc\xaf": "a 7-Zip archive. Unpack it first: 7z x",
    b"SQLite format 3": "an SQLite database. Export its table as CSV first",
}
_UNPACKED = {start: said for start, said in _NOT_READ.items() if said != _UTF_16}
_NOT_OF_IT = "toque.not_of_the_encoding"  # name of an error handler of `codecs`
LONG_LINE = b"\0line too long"  # in place of a line over MAX_RECORD_BYTES, which is counted
_BREAK = re.compile(rb"[\r\n]")


def packed_as(path: Path) -> str:
    """The archive or database that a file is, which is not read, in words; "" for others."""
    with path.open("rb") as stream:
        start = stream.read(16)
    return next((said for sign, said in _UNPACKED.items() if start.startswith(sign)), "")


def chunks(path: Path, size: int = CHUNK_BYTES, *, encoding: str = UTF_8) -> Iterator[bytes]:
    """The decompressed bytes of a file, in UTF-8 and without a byte-order mark.

    Bytes that `encoding` does not know stay as they are, so that they are counted as not UTF-8;
    those of UTF-16 that would be ASCII become 0xFF.
    """
    with opened(path) as (stream, packed_bytes, _):
        plain = _bounded(path, stream, packed_bytes, size)
        start = next(plain, b"")
        if encoding == UTF_8 or start.startswith(_NO_TEXT):
            what = next((what for magic, what in _NOT_READ.items() if start.startswith(magic)), "")
            if what:
                raise DataError(
                    f"{path} is {what}. Recipes are read from JSON, JSON lines, CSV, Parquet and "
                    "web pages, plain or compressed with gzip or zstd."
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
            magic = raw.peek(4)[:4]
            if magic.startswith(_GZIP):
                with gzip.GzipFile(fileobj=raw) as plain:
                    yield cast(IO[bytes], plain), path.stat().st_size, raw
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
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(path, "gzip", error) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check that it is whole, its "
            "permissions and the disk."
        ) from error


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
