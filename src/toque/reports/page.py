"""Pages: text, tables and plots in one HTML file that works without network and scripts.

`toque watch` sends single sections of a run's page when they change.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, ClassVar, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from toque.errors import ConfigError, argument
from toque.storage.atomic import atomic_write
from toque.storage.no_follow import open_plain
from toque.version import __version__

STYLE: Final = Path(__file__).parent / "templates" / "page.css"
"""Style sheet of all pages."""
_MARK: Final = b"default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy in the head of every page. It identifies Toque's pages."""
_starts_with_number: Final = re.compile(r"[-+]?\d").match
_MAX_CELL: Final = 40
"""Maximum length of a cell in a terminal, in characters."""


@dataclass(frozen=True)
class Sentence:
    """A paragraph."""

    kind: ClassVar = "sentence"
    text: str
    style: str = ""
    """CSS class: soft or warn."""


@dataclass(frozen=True)
class Figure:
    """A plot with its caption."""

    kind: ClassVar = "figure"
    title: str
    svg: str
    """HTML from `toque.reports.svg_charts`. All text in it is escaped."""
    note: str = ""
    narrow: str = ""
    """Variant of `svg` with larger letters for a narrow screen."""


@dataclass(frozen=True)
class Figures:
    """Plots in a row."""

    kind: ClassVar = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Grid:
    """A table. Columns of numbers are right-aligned."""

    kind: ClassVar = "grid"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    summary: str = ""
    """Line on which a reader clicks to open a folded table, or "" for an open table."""

    @cached_property
    def numeric(self) -> frozenset[int]:
        """Indices of the columns that have numbers in most cells."""
        columns = zip(*self.rows, strict=True)
        counts = [
            sum(_starts_with_number(cell) is not None for cell in cells)
            for cells in columns
        ]
        return frozenset(
            column for column, n in enumerate(counts) if 2 * n > len(self.rows)
        )


@dataclass(frozen=True)
class Passage:
    """A text with an optional label above it and a note below it."""

    text: str
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Folded:
    """Folded texts below a heading, such as generated texts or a configuration."""

    kind: ClassVar = "folded"
    heading: str
    texts: Sequence[Passage]
    tags: Sequence[str] = ()
    is_open: bool = False


@dataclass(frozen=True)
class RunRow:
    """A run in the table of several runs. The live page has controls in it."""

    name: str
    state: str
    style: str
    """CSS class of the curve, or "" without a curve."""
    cells: Sequence[str]


@dataclass(frozen=True)
class RunTable:
    """Table of several runs."""

    kind: ClassVar = "runs"
    heads: Sequence[str]
    rows: Sequence[RunRow]
    shown: str
    """Name of the run on the page."""


Part = Sentence | Figure | Figures | Grid | Folded | RunTable


@dataclass(frozen=True)
class Section:
    """A part of a page with a heading. Empty sections are not shown."""

    name: str
    """Id of the HTML element."""
    heading: str
    parts: Sequence[Part]

    @property
    def shown(self) -> list[Part]:
        """Parts that are not empty."""
        return [part for part in self.parts if not _is_empty(part)]


def _is_empty(part: Part) -> bool:
    """Check whether a part is a table without rows or a row of plots without plots."""
    if isinstance(part, Grid | RunTable):
        return not part.rows
    return isinstance(part, Figures) and not part.figures


@dataclass(frozen=True)
class PageHead:
    """Top of a page."""

    label: str
    """Kind of the page, or the address of the run."""
    title: str
    sentence: str
    facts: Sequence[tuple[str, str]] = ()
    state: str = ""
    """State of a run in one word."""
    done: float | None = None
    """Completed fraction of a run, or None for no progress bar."""


@dataclass(frozen=True)
class Page:
    """Content of a page."""

    head: PageHead
    sections: Sequence[Section]
    source: str = ""
    """Files from which the content comes."""
    made_by: str = field(default=f"Written by toque {__version__}", init=False)

    def html(self) -> str:
        """Render the page."""
        return _environment().get_template("page.html").render(page=self)

    def parts(self) -> dict[str, str]:
        """Render the head and each section, by the id of its element."""
        macros: Any = _environment().get_template("parts.html").module
        sections = {one.name: str(macros.section(one)).strip() for one in self.sections}
        return {"head": str(macros.head(self.head)).strip(), **sections}


def write_page(target: Path, page: Page) -> int:
    """Write a page, or replace an earlier page from Toque. Return its size in bytes.

    Raises:
        ConfigError: The path has another file, or cannot be written.
    """
    html = page.html().encode("utf-8", "replace")  # JSON may have lone surrogates
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _refuse_other_file(target)
        atomic_write(target, html)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with "
            f"{argument('out')}."
        ) from error
    return len(html)


def _refuse_other_file(target: Path) -> None:
    """Raise FileExistsError if a file exists that is neither empty nor a page of Toque."""
    with suppress(FileNotFoundError), open_plain(target) as file:
        head = file.read(1000)
        if head and _MARK not in head:
            raise FileExistsError(
                errno.EEXIST, "the file exists and is not a page that Toque wrote"
            )


def format_value(value: object) -> str:
    """Format a number or a text for a table.

    >>> format_value(0.25), format_value(31000), format_value(1e-7)
    ('0.2500', '31,000', '1e-07')
    >>> format_value("fp32"), format_value(True)
    ('fp32', 'True')
    """
    if isinstance(value, float):
        is_readable = 1e-3 <= abs(value) < 1e6 or value == 0
        return f"{value:,.4f}" if is_readable else f"{value:.4g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def format_columns(grid: Grid) -> Iterator[str]:
    """Format a table for a terminal, with columns of fixed width. Long cells are cut."""
    rows = [[_shorten(cell) for cell in row] for row in (grid.heads, *grid.rows)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if column in grid.numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


def _shorten(cell: str) -> str:
    printable = "".join(c if c.isprintable() else "?" for c in cell)
    if len(printable) <= _MAX_CELL:
        return printable
    return printable[: _MAX_CELL - 1] + "…"


@cache
def _environment() -> Environment:
    # All texts are escaped, except the SVG of a `Figure`. A missing variable is an error.
    return Environment(
        loader=PackageLoader("toque.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
