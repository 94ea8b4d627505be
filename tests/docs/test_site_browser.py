"""The documentation in Chromium, opened from the disk as a reader without a server does."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.browser import MARKS, SIZES, look, pages, soon

pytestmark = MARKS


@pytest.fixture
def opened(browser: object, site: Path) -> Iterator[Callable[..., Any]]:
    """Open a page of the site."""
    wrong: list[str] = []
    with pages(browser, wrong) as open_page:
        yield lambda name, size="wide": open_page((site / name).as_uri(), size)
    assert wrong == []


def test_the_search_finds_pages_on_the_disk(opened: Callable[..., Any]) -> None:
    page = opened("guides/serve.html")
    page.fill("input.md-search__input", "checkpoint")
    soon(page.locator(".md-search-result__meta")).to_contain_text("matching documents")
    hat = page.locator("header img[alt=logo]")
    assert hat.evaluate("image => image.naturalWidth") > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["tutorial/1-first-run", "reference/cli"])
def test_no_line_of_code_is_cut_off(
    opened: Callable[..., Any], name: str, size: str
) -> None:
    page = opened(f"{name}.html", size)
    code = page.locator("pre > code")
    assert code.count() > 5
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    assert code.evaluate_all(cut) == 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # The theme makes the frame and the buttons of the code.
    ours = {"include": [[".md-content"]], "exclude": [[".md-code__nav"]]}
    look(page, f"docs-{size}", ours)


def test_guides_stand_in_groups(opened: Callable[..., Any]) -> None:
    page = opened("guides/serve.html")
    guides = page.locator(".md-nav--primary > ul > li", has_text="Guides").first
    groups = guides.locator("> nav > ul > li")
    assert 3 <= groups.count() <= 7
