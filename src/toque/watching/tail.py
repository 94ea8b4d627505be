"""Tail of a file of JSON lines: what is new in it since the last look, whole lines alone."""

from __future__ import annotations

from typing import Final, final

from toque.watching.places import MOST_BYTES, Found, Place

_LONGEST_LINE: Final = 4 << 20
"""Of a line that has no end; what is longer is passed over."""


@final
class Tail:
    """The lines of a growing file, each given once.

    A line without its end is kept until the end comes: it is being written, or a kill tore it. The
    next line then stands alone, for a writer ends a torn line before it goes on.

    Args:
        place: of the run.
        name: the file in it.
    """

    def __init__(self, place: Place, name: str) -> None:
        self._place, self._name = place, name
        self._at = 0
        self._waiting = b""
        self._skipping = False
        self.found: Found | None = None
        """The file at the last look; None while there is none."""
        self.restarted = False
        """Whether it was replaced, or cut, before the last look: what was given is void."""

    @property
    def behind(self) -> bool:
        """Whether more is there than was read."""
        return self.found is not None and self._at < self.found.bytes

    def lines(self) -> list[str]:
        """What is new; at most some megabytes at a time.

        Raises:
            OSError, BucketError: the file cannot be read.
        """
        before, self.found = self.found, self._place.look(self._name)
        now = self.found
        self.restarted = before is not None and (
            now is None or now.tag != before.tag or now.bytes < self._at
        )
        if self.restarted:
            self._at, self._waiting, self._skipping = 0, b"", False
        if now is None or now.bytes <= self._at:
            return []
        data = self._place.read(self._name, self._at, min(now.bytes, self._at + MOST_BYTES))
        self._at += len(data)
        *whole, self._waiting = (self._waiting + data).split(b"\n")
        if whole and self._skipping:
            whole, self._skipping = whole[1:], False
        if len(self._waiting) > _LONGEST_LINE:
            self._waiting, self._skipping = b"", True
        return [line.decode("utf-8", "replace") for line in whole if line.strip()]
