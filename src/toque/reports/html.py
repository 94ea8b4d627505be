"""HTML pages from templates: one file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

STYLE: Final = Path(__file__).parent / "templates" / "page.css"
"""How every page looks."""
STORE: Final = "store.html"
RUN: Final = "run.html"
ABLATION: Final = "ablation.html"
COMPARISON: Final = "comparison.html"
LIVE: Final = "live/{}.html"
"""Of the parts of a page that moves: head, runs, warnings, verdict, plots, texts."""


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
