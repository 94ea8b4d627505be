"""Files of prompts: what ends a line, and what begins a file."""

import json
from pathlib import Path

import pytest

from toque.workflows.asking import read_prompts

ODD = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path, ends: str) -> None:
    file = tmp_path / "prompts.txt"
    lines = [json.dumps({"prompt": ODD}, ensure_ascii=False), "", ODD, "last"]
    file.write_bytes("".join(line + ends for line in lines).encode())
    assert read_prompts((), file, task=None, raw=False) == [ODD, ODD, "last"]


@pytest.mark.parametrize("first", ['{"prompt": "soup"}', "soup"])
def test_the_mark_at_the_beginning_of_a_file_is_no_part_of_a_prompt(
    tmp_path: Path, first: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(f"\ufeff{first}\n".encode())
    assert read_prompts((), file, task=None, raw=False) == ["soup"]
