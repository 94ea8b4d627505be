"""Parts of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from toque.reports.html import drawing


@dataclass(frozen=True)
class Figure:
    """A plot with its caption."""

    title: str
    drawn: Markup
    note: str = ""
    narrow: Markup | None = None
    """The same for a narrow screen, where a wide plot's letters would be too small."""

    @classmethod
    def of(cls, title: str, svg: str, *, note: str = "", narrow: str = "") -> Figure:
        """From what `toque.reports.svg_charts` drew."""
        return cls(title, drawing(svg), note, drawing(narrow) if narrow else None)


@dataclass(frozen=True)
class Grid:
    """A table; `numeric` columns, by their index, stand to the right."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()
    note: str = ""


@dataclass(frozen=True)
class Passage:
    """A text with what stands above it and what is said of it below; both may be empty."""

    text: str
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Shown:
    """Texts behind a line that opens: a recipe, or what a model wrote."""

    heading: str
    texts: Sequence[Passage]
    tags: Sequence[str] = field(default_factory=tuple)
