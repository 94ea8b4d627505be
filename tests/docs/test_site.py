"""The site builds without a warning and fetches nothing; links outside it lead somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
OUTSIDE = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "lab").glob("*.md"))]
"""Pages that the site does not hold; mkdocs checks the links of those it does."""


def test_the_site_has_every_page(site: Path) -> None:
    pages = sorted((REPOSITORY / "docs").rglob("*.md"))
    assert len(pages) > 25
    for page in pages:
        shown = site / page.relative_to(REPOSITORY / "docs").with_suffix(".html")
        assert shown.is_file(), shown


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {
        "html": r"""<(?:script|img|iframe)[^>]+src=["']?https?:|<link[^>]+href=["']?https?:""",
        "css": r"url\(['\"]?https?:",
    }
    for kind, pattern in loaded.items():
        files = site.rglob(f"*.{kind}")
        assert [file for file in files if re.search(pattern, file.read_text())] == []


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Target and anchor of every link of a page that stays in the repository."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            yield target, anchor


def anchors(page: Path) -> set[str]:
    """Of the headings, as Markdown's `toc` spells them."""
    from markdown.extensions.toc import slugify

    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text(encoding="utf-8"))
    return {slugify(re.sub(r"[`*]", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_links_of_pages_outside_the_site_lead_somewhere(page: Path) -> None:
    lost = []
    for target, anchor in links(page):
        there = (page.parent / target).resolve() if target else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(f"{target}#{anchor}")
    assert lost == []


def test_pages_that_texts_name_exist() -> None:
    """`docs/guides/adapters.md` in an error, a docstring or a page is a file."""
    named = re.compile(r"(?<![\w/.])(?:docs|lab)/[\w/-]+\.(?:md|png|svg)")
    readers = [*OUTSIDE, *(REPOSITORY / "docs").rglob("*.md")]
    for folder in ("src", "tests", "tools", "bench"):
        readers += (REPOSITORY / folder).rglob("*.py")
    lost = {
        f"{reader.relative_to(REPOSITORY)}: {name}"
        for reader in readers
        if reader.name != Path(__file__).name
        for name in named.findall(reader.read_text(encoding="utf-8"))
        if not (REPOSITORY / name).exists()
    }
    assert lost == set()
