"""HTML pages from templates: one file that needs no network and no script."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from toque.errors import ConfigError, argument
from toque.storage.atomic import atomic_write
from toque.storage.no_follow import open_plain

STYLE: Final = Path(__file__).parent / "templates" / "page.css"
"""How every page looks."""
STORE: Final = "store.html"
RUN: Final = "run.html"
ABLATION: Final = "ablation.html"
COMPARISON: Final = "comparison.html"
_MARK: Final = b"default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Stands in the head of every page."""
LIVE: Final = "live/{}.html"
"""Of the parts of a page that moves: head, runs, warnings, verdict, plots, texts."""


def write_page(target: Path, html: str) -> int:
    """Write a page, over an older page or nothing; its bytes.

    Raises:
        ConfigError: it cannot be written, or something else is there.
    """
    page = html.encode("utf-8", "replace")  # JSON can hold halves of characters
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError), open_plain(target) as file:
            if (head := file.read(1000)) and _MARK not in head:
                raise OSError(errno.EEXIST, "it is there already and is no page of toque's")
        atomic_write(target, page)
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Name another file with "
            f"{argument('out')}."
        ) from error
    return len(page)


def render(template: str, content: Mapping[str, Any]) -> str:
    """The page of `template`; every text in `content` is escaped but the plots of a `Figure`.

    Args:
        template: STORE, RUN, ABLATION, COMPARISON or a part of LIVE.
        content: what its variables are; a missing one is an error, not a blank.
    """
    return _environment().get_template(template).render(**content)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("toque.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    environment.filters["share"] = lambda value: f"{value:.1%}"
    return environment
