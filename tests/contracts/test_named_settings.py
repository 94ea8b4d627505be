"""Every setting that a page or a text of the program names is one that can be set."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.pages import literals
from toque.config import RunConfig
from toque.config.error_messages import (
    GONE,
    find_field,
    mapping_types,
    section_of,
    setting_paths,
)

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PAGES = sorted(
    page
    for folder in (".", "docs", "lab")
    for page in (REPOSITORY / folder).glob("**/*.md" if folder != "." else "*.md")
    if page.name != "CHANGELOG.md"  # tells of settings that are gone, too
)
SECTIONS = "|".join(
    name
    for name, field in RunConfig.model_fields.items()
    if section_of(field) is not None
)
NAMED = re.compile(
    rf"(?<![\w./\-])(?:{SECTIONS})(?:\[\])?(?:\.\w+(?:\[\])?)+" + r"(?![\w(/*{])"
)
FILES = {
    "bin", "csv", "gz", "html", "json", "jsonl", "md", "npy", "pt", "py", "safetensors", "yaml",
}  # fmt: skip
NOT_OURS = {"model.generate"}
"""Methods of transformers that pages speak of."""


def named_in(text: str) -> Iterator[str]:
    """Names in the form of a setting, list indices left out."""
    for match in NAMED.finditer(text):
        parts = [p for p in match[0].replace("[]", "").split(".") if not p.isdecimal()]
        if len(parts) > 1 and parts[-1] not in FILES:
            yield ".".join(parts)


def exists(name: str) -> bool:
    """Whether it is a setting, a section, or inside a setting that holds names of its own."""
    parts = tuple(name.split("."))
    if name in setting_paths() or name in NOT_OURS:
        return True
    owner = find_field(parts[:-1])
    return owner is not None and mapping_types(owner.annotation) is not None


def code_in(page: str) -> str:
    """Inline code, YAML and console blocks; Python and output have dots of their own."""
    blocks = re.findall(r"(?ms)^```(?:yaml|console)\n(.*?)^```", page)
    prose = re.sub(r"(?ms)^```.*?^```", "", page)
    return "\n".join([*blocks, *re.findall(r"`([^`]+)`", prose)])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert sorted({name for name in named_in(code_in(text)) if not exists(name)}) == []


def test_every_setting_a_text_of_the_program_names_exists() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}:{line}: {name}"
        for path in sorted((REPOSITORY / "src").rglob("*.py"))
        for line, text in literals(path)
        for name in named_in(re.sub(r"\{[^}]*\}", "{}", text))
        if not exists(name) and name not in GONE
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("raise data.max_good_share", ["data.max_good_share"]),
        ("`data.sources[].weight` or data.seed", ["data.sources.weight", "data.seed"]),
        ("toque.evaluation.classification, evaluation.json, model.eval()", []),
        ("optim.outliers.{} and `model.shape.x`.", ["optim.outliers", "model.shape.x"]),
        ("data.sources.0.path", ["data.sources.path"]),
    ],
)
def test_names_are_found_in_a_text(text: str, found: list[str]) -> None:
    assert list(named_in(text)) == found


def test_a_name_inside_a_mapping_exists_and_an_invented_one_does_not() -> None:
    assert exists("model.shape.hidden_size")
    assert exists("optim.outliers")
    assert not exists("data.max_good_share")
    assert not exists("optim.outliers.sigma.rate")
