"""Prompts of nothing: from a call, and from a file by its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.errors import ConfigError
from toque.workflows.asking import read_prompts


@pytest.mark.parametrize("blank", ["", "  ", "\n\t", " : , "])
@pytest.mark.parametrize("how", [{"task": "write"}, {"task": None}, {"task": "write", "raw": True}])
def test_a_prompt_of_nothing_is_refused(blank: str, how: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"prompts, number 2 is blank.*nothing to (write|answer)"):
        read_prompts(["soup", blank], None, **{"raw": False} | how)


def test_a_model_of_whole_texts_may_begin_one_from_nothing() -> None:
    found = read_prompts("", None, task="write", raw=False, recipes=False, blanks=True)
    assert found == [""]


@pytest.mark.parametrize(
    "line",
    ['{"prompt": " "}', '{"title": ""}', '{"title": " ", "ingredients": ["", " "]}', ":"],
)
def test_one_of_a_file_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"soup\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"prompts\.txt:3 is blank"):
        read_prompts((), file, task="write", raw=False)


def test_what_says_something_is_not_blank(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"title": "", "ingredients": ["2 eggs"]}\n{"prompt": "?"}\n')
    asked = read_prompts(": eggs", file, task="write", raw=False)
    assert asked[0].endswith("using ingredients: eggs")
    assert asked[2] == "?"
