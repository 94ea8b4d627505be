"""Pages: sections of text, tables and plots as one HTML file that needs no network and no script.

`toque watch` sends the sections of a run's one by one while they change.
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

STYLE: Final = Path(__file__).parent / "templates" / "page.css"  # style sheet of every page
_MARK: Final = b"default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # in every page
_NUMBER: Final = re.compile(r"[-+]?\d").match
_LONGEST: Final = 40  # characters of a cell in a terminal


@dataclass(frozen=True)
class Sentence:
    """A paragraph."""

    kind: ClassVar = "sentence"
    text: str
    style: str = ""  # a class of the page's: soft or warn


@dataclass(frozen=True)
class Figure:
    """A plot with its caption."""

    kind: ClassVar = "figure"
    title: str
    drawn: str  # HTML from `toque.reports.svg_charts`, which has escaped its input
    note: str = ""
    narrow: str = ""  # the same for a narrow screen, where a wide plot's letters would be too small


@dataclass(frozen=True)
class Figures:
    """Plots side by side."""

    kind: ClassVar = "figures"
    figures: Sequence[Figure]


@dataclass(frozen=True)
class Grid:
    """A table; columns of numbers stand to the right."""

    kind: ClassVar = "grid"
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    title: str = ""
    summary: str = ""  # line behind which the table is folded; "" for an open one

    @cached_property
    def numeric(self) -> frozenset[int]:
        """Columns of which most cells begin as a number does."""
        counts = [sum(map(bool, map(_NUMBER, cells))) for cells in zip(*self.rows, strict=True)]
        return frozenset(at for at, n in enumerate(counts) if 2 * n > len(self.rows))


@dataclass(frozen=True)
class Passage:
    """A text, a label above it and a note below it; both may be empty."""

    text: str
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Folded:
    """Texts behind a line that opens: a recipe, what a model wrote, a configuration."""

    kind: ClassVar = "folded"
    heading: str
    texts: Sequence[Passage]
    tags: Sequence[str] = ()
    is_open: bool = False


@dataclass(frozen=True)
class RunRow:
    """A run in the table of several; its name and its box are controls of the live page."""

    name: str
    state: str
    style: str  # style of its line; "" where it is not drawn
    cells: Sequence[str]


@dataclass(frozen=True)
class RunTable:
    """Several runs, one of which is shown in full."""

    kind: ClassVar = "runs"
    heads: Sequence[str]
    rows: Sequence[RunRow]
    shown: str


Part = Sentence | Figure | Figures | Grid | Folded | RunTable


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; one that holds nothing is not shown."""

    name: str  # id of its element
    heading: str
    parts: Sequence[Part]

    @property
    def shown(self) -> list[Part]:
        """Parts but for tables without a row and rows of plots without a plot."""
        return [p for p in self.parts if getattr(p, "rows", getattr(p, "figures", True))]


@dataclass(frozen=True)
class PageHead:
    """Top of a page."""

    label: str  # kind of the page, or the address of its run
    title: str
    sentence: str
    facts: Sequence[tuple[str, str]] = ()
    state: str = ""  # state of a run in a word
    done: float | None = None  # share of a run that is done; None for no bar


@dataclass(frozen=True)
class Page:
    """A page before it is written as HTML."""

    head: PageHead
    sections: Sequence[Section]
    source: str = ""  # file or folder that it was made from
    made_by: str = field(default=f"Written by toque {__version__}", init=False)

    def html(self) -> str:
        """The whole page."""
        return _environment().get_template("page.html").render(page=self)

    def parts(self) -> dict[str, str]:
        """HTML of the head and of each section, by the id of its element."""
        macros: Any = _environment().get_template("parts.html").module
        sections = {one.name: str(macros.section(one)).strip() for one in self.sections}
        return {"head": str(macros.head(self.head)).strip(), **sections}


def write_page(target: Path, page: Page) -> int:
    """Write a page where an older one or nothing is, or a ConfigError; its size in bytes."""
    html = page.html().encode("utf-8", "replace")  # JSON can hold halves of characters
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), open_plain(target) as file:
            if (head := file.read(1000)) and _MARK not in head:
                raise OSError(errno.EEXIST, "it is there already and is no page of toque's")
        atomic_write(target, html)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with "
            f"{argument('out')}."
        ) from error
    return len(html)


def written(value: object) -> str:
    """A number or a word for a table.

    >>> written(0.25), written(31000), written(1e-7), written("fp32"), written(True)
    ('0.2500', '31,000', '1e-07', 'fp32', 'True')
    """
    if isinstance(value, float):
        return f"{value:,.4f}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def aligned(grid: Grid) -> Iterator[str]:
    """Lines of a table for a terminal: columns of one width each, cut where a value is long."""

    def short(cell: str) -> str:
        shown = "".join(c if c.isprintable() else "?" for c in cell)
        return shown if len(shown) <= _LONGEST else shown[: _LONGEST - 1] + "…"

    rows = [list(map(short, row)) for row in (grid.heads, *grid.rows)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(grid.heads))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in grid.numeric else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield ("  " + "  ".join(cells)).rstrip()


@cache
def _environment() -> Environment:
    # Every text is escaped but the drawing of a `Figure`; a missing variable is an error.
    return Environment(
        loader=PackageLoader("toque.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
