"""Line splitting: runs of whole lines from chunks of bytes, in bounded memory; any newline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from toque.sources.blocks import MAX_RECORD_BYTES

LONG_LINE = b"\0line too long"
"""Stands for a line over `MAX_RECORD_BYTES`, so that it is counted with its number."""
_BREAK = re.compile(rb"[\r\n]")


def runs_of_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Pieces of about a chunk that end with a line; the last line needs no newline.

    A line over MAX_RECORD_BYTES is replaced by `LONG_LINE`, so that it is counted with its number.
    """
    pending, skipping = b"", False
    for chunk in chunks:
        buffer = pending + chunk
        if skipping:
            line_break = _BREAK.search(buffer)
            if line_break is None:
                continue
            buffer, skipping = LONG_LINE + buffer[line_break.start() :], False
        cut = _after_last_break(buffer)
        pending = buffer[cut:]
        if len(pending) > MAX_RECORD_BYTES:
            pending, skipping = b"", True
        if cut:
            yield buffer[:cut]
    if skipping or pending:
        yield LONG_LINE if skipping else pending


def _after_last_break(buffer: bytes) -> int:
    """End of the last whole line; a carriage return at the end may be half of CR LF."""
    return max(buffer.rfind(b"\n"), buffer.rfind(b"\r", 0, max(0, len(buffer) - 1))) + 1


def count_lines(text: bytes) -> int:
    r"""Line breaks in whole lines: LF, CR LF and CR are each one.

    >>> count_lines(b"a\nb\r\nc\r")
    3
    """
    if b"\r" not in text:
        return text.count(b"\n")
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
