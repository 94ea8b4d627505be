"""The generated pages of docs/reference are what the code says today."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import toque
from toque.cli.app import app

REPOSITORY = Path(__file__).resolve().parent.parent.parent
REFERENCE = REPOSITORY / "docs" / "reference"
MADE = runpy.run_path(str(REPOSITORY / "tools" / "reference_pages.py"))
Golden = Callable[[Path, str], None]


def public() -> dict[str, object]:
    names = [name for name in toque.__all__ if not name.startswith("__")]
    return {name: getattr(toque, name) for name in names}


@pytest.mark.golden
def test_configuration_page_is_the_schema(golden_text: Golden) -> None:
    golden_text(REFERENCE / "configuration.md", MADE["configuration_page"]())


def test_every_setting_has_help() -> None:
    page = MADE["configuration_page"]()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert [row for row in rows if row.split("|")[-2].strip() in ("", "*later*")] == []


@pytest.mark.golden
def test_cli_page_is_the_commands(golden_text: Golden) -> None:
    golden_text(REFERENCE / "cli.md", MADE["cli_page"](app))


@pytest.mark.golden
def test_python_page_is_the_docstrings(golden_text: Golden) -> None:
    golden_text(REFERENCE / "python-api.md", MADE["python_page"](public()))


@pytest.mark.golden
def test_the_page_for_agents_is_what_the_others_say(golden_text: Golden) -> None:
    golden_text(
        REFERENCE / "agents.md", MADE["agents_page"](app, public(), REFERENCE.parent)
    )


@pytest.mark.golden
def test_llms_txt_lists_every_page(golden_text: Golden) -> None:
    docs = REFERENCE.parent
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    made = MADE["llms_text"](site, docs)
    golden_text(docs / "llms.txt", made)
    listed = re.findall(r"(?m)^- \[.+\]\((.+)\): .+", made)
    assert sorted(listed) == sorted(
        p.relative_to(docs).as_posix() for p in docs.rglob("*.md")
    )


def test_every_argument_and_every_public_name_has_its_words() -> None:
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if not row.split("|")[-2].strip()] == []
    python = (REFERENCE / "python-api.md").read_text(encoding="utf-8")
    assert [name for name in public() if f"\n## {name}\n" not in python] == []
