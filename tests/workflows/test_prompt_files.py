"""Files of prompts: what ends a line, and what begins a file."""

import json
from pathlib import Path

import pytest

from toque.errors import ConfigError
from toque.workflows.asking import read_prompts

ODD = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path, ends: str) -> None:
    file = tmp_path / "prompts.txt"
    lines = [json.dumps({"prompt": ODD}, ensure_ascii=False), "", ODD, "last"]
    file.write_bytes("".join(line + ends for line in lines).encode())
    assert read_prompts((), file, task=None, raw=False) == [ODD, ODD, "last"]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "half \\ud83c"}\n')
    said = r"prompts.jsonl:1 is no text in UTF-8: 'half \\ud83c' holds"
    with pytest.raises(ConfigError, match=said):
        read_prompts((), file, task=None, raw=False)
    with pytest.raises(ConfigError, match=r"prompts, number 1 is no text in UTF-8: 'caf\\udce9'"):
        read_prompts("caf\udce9", None, task=None, raw=False)


@pytest.mark.parametrize("first", ['{"prompt": "soup"}', "soup"])
def test_the_mark_at_the_beginning_of_a_file_is_no_part_of_a_prompt(
    tmp_path: Path, first: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(f"\ufeff{first}\n".encode())
    assert read_prompts((), file, task=None, raw=False) == ["soup"]
