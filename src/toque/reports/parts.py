"""Parts of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A plot with its caption."""

    title: str
    drawn: str
    """As HTML, from `toque.reports.svg_charts`, which has escaped its input."""
    note: str = ""
    narrow: str = ""
    """The same for a narrow screen, where a wide plot's letters would be too small."""


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
    tags: Sequence[str] = ()
