"""Code blocks of README, CONTRIBUTING, docs/ and lab/: each runs, or says above it why it does not.

Python is executed page by page. YAML is resolved and its model built in outline; slow: a page of
the tutorial is followed from its text alone. `<!-- not run: reason -->` on the line before a block
leaves it out. Blocks of plain `text` are output. All in a folder with a small run. Commands are the
matter of test_printed_commands.py.
"""

import re
import shlex
from pathlib import Path

import pytest

from fixtures.outline import build_in_outline
from fixtures.pages import PAGES, REPOSITORY, Block, blocks, commands
from toque.cli import main
from toque.config import load_config, presets

TUTORIALS = sorted((REPOSITORY / "docs" / "tutorial").glob("*.md"))
OTHER_PROGRAMS = {
    "make", "cd", "pip", "git", "python", "export", "docker", "torchrun", "tensorboard", "trackio",
    "npm",
}  # fmt: skip
"""Programs that a reader has; `make` targets are looked up."""
NOT_AT_ALL = {"serve", "watch", "demo", "drill", "ablate"}
"""Verbs that do not end or take minutes."""


@pytest.mark.parametrize(
    "page",
    sorted({block.page for block in blocks("python")}),
    ids=lambda page: page.name,
)
def test_python_runs(
    page: Path, kitchen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(kitchen)
    names: dict[str, object] = {"__name__": page.stem}
    for block in blocks("python"):
        if block.page == page:
            padding = "\n" * block.line  # errors name the page's own lines
            exec(compile(padding + block.text, str(page), "exec"), names)  # noqa: S102


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.id)
def test_yaml_is_a_configuration_that_can_be_built(
    block: Block, tmp_path: Path
) -> None:
    (tmp_path / "block.yaml").write_text(block.text)
    build_in_outline(load_config(tmp_path / "block.yaml").config)


@pytest.mark.parametrize("name", presets())
def test_presets_can_be_built(name: str) -> None:
    build_in_outline(load_config(name).config)


def test_every_language_is_known() -> None:
    known = {"text", "python", "pycon", "yaml", "console", "json", "html", "bibtex"}
    for page in PAGES:
        opened = re.findall(r"(?m)^```(.*)$", page.read_text(encoding="utf-8"))[::2]
        assert set(opened) <= known, page.name


def test_every_program_is_known_and_make_has_its_targets() -> None:
    targets = re.findall(r"(?m)^([a-z-]+):", (REPOSITORY / "Makefile").read_text())
    for block, words in commands():
        assert words, block.id
        assert words[0] in {"toque", *OTHER_PROGRAMS} or "=" in words[0], block.id
        assert words[0] != "make" or words[1] in targets, block.id


def test_tutorials_can_be_followed_from_their_text_alone() -> None:
    """Every configuration that a command names is a block that says which file it is."""
    assert len(TUTORIALS) == 3
    for page in TUTORIALS:
        files = {name for name, _ in files_of(page)}
        named = {
            words[2]
            for block, words in commands()
            if block.page == page and words[0] == "toque"
            if len(words) > 2 and words[2].endswith(".yaml")
        }
        assert named <= files, page.name


def files_of(page: Path) -> list[tuple[str, str]]:
    """Files that a page asks for: YAML by its first comment, others by `<!-- file: NAME -->`."""
    text = page.read_text(encoding="utf-8")
    found = [
        (match[1], match[0])
        for match in re.finditer(r"(?m)^# (\S+\.yaml).*\n(?s:.*?)(?=^```)", text)
    ]
    found += re.findall(r"(?ms)^<!-- file: (\S+) -->\n```\w*\n(.*?)^```", text)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages, one after the other in one folder, with runs of a few steps."""
    monkeypatch.chdir(tmp_path)
    for page in TUTORIALS:
        for name, text in files_of(page):
            shorter = re.sub(r'stop_after: "\d+ steps"', 'stop_after: "6 steps"', text)
            shorter = re.sub(
                r'(evaluate|save)_every: "\d+ steps"', r'\1_every: "3 steps"', shorter
            )
            Path(name).write_text(shorter, encoding="utf-8")
        for block, words in commands():
            if (
                block.page == page
                and words[0] == "toque"
                and words[1] not in NOT_AT_ALL
            ):
                assert main(words[1:]) == 0, f"{block.id}: {shlex.join(words)}"
