"""Files of prompts: what ends a line, and what begins a file."""

import json
from pathlib import Path

import pytest

import toque
from fixtures.asked import texts_asked
from plain_transformers import model_folder
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError, DataError

ODD = "one\u2028two\u2029three\u0085four\x0bfive\x0csix\x1cseven"


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
def test_a_line_ends_with_a_line_feed_alone(tmp_path: Path, ends: str) -> None:
    file = tmp_path / "prompts.txt"
    lines = [json.dumps({"prompt": ODD}, ensure_ascii=False), "", ODD, "last"]
    file.write_bytes("".join(line + ends for line in lines).encode())
    assert texts_asked((), file, task=None, raw=False) == [ODD, ODD, "last"]


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "half \\ud83c"}\n')
    said = r"prompts.jsonl:1 is not UTF-8 text: 'half \\ud83c' contains"
    with pytest.raises(ConfigError, match=said):
        texts_asked((), file, task=None, raw=False)
    with pytest.raises(
        ConfigError, match=r"prompts, number 1 is not UTF-8 text: 'caf\\udce9'"
    ):
        texts_asked("caf\udce9", None, task=None, raw=False)


@pytest.mark.parametrize("how", [{}, {"n": 3}, {"best_of": 3}])
def test_a_prompt_that_is_too_long_is_named_by_its_line(
    tmp_path: Path, tokenizers_at: dict[str, Path], how: dict[str, int]
) -> None:
    model = model_folder(
        tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]), "documents"
    )
    file = tmp_path / "prompts.txt"
    file.write_text("a\n\nb\n" + "rice " * 300 + "\n")
    with pytest.raises(
        ConfigError, match=r"The prompt at .*prompts\.txt:4 has \d+ tokens"
    ):
        toque.generate(model, file=file, device="cpu", max_new_tokens=2, **how)


RECORD = {"title": "Soup", "ingredients": ["2 leeks"], "steps": ["Boil."]}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"ingredients": [{"a": 1}, None]}, r"item 1 of ingredients is \{'a': 1\}"),
        ({"ingredients": ["2 leeks", None]}, "item 2 of ingredients is None"),
        ({"ingredients": {"leeks": 2}}, r"ingredients is \{'leeks': 2\}"),
        ({"ingredients": 7}, "ingredients is 7"),
        ({"steps": [{"text": "Boil."}]}, "item 1 of steps is "),
    ],
)
def test_a_record_of_what_are_no_texts_is_refused(
    tmp_path: Path, wrong: dict[str, object], said: str
) -> None:
    """They were asked for as Python writes them: "Soup using ingredients: {'a', None"."""
    file = tmp_path / "records.jsonl"
    file.write_text(f"{json.dumps(RECORD)}\n{json.dumps(RECORD | wrong)}\n")
    with pytest.raises(DataError, match=rf"records\.jsonl:2: {said}"):
        texts_asked((), file, task="difficulty", raw=False)


@pytest.mark.parametrize("left", [{}, {"ingredients": None}, {"ingredients": []}])
def test_a_record_may_lack_ingredients(left: dict[str, object]) -> None:
    asked = texts_asked({"title": "Soup"} | left, None, task="write", raw=False)
    assert asked == ["Generate recipe for: Soup"]


@pytest.mark.parametrize("first", ['{"prompt": "soup"}', "soup"])
def test_the_mark_at_the_beginning_of_a_file_is_no_part_of_a_prompt(
    tmp_path: Path, first: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(f"\ufeff{first}\n".encode())
    assert texts_asked((), file, task=None, raw=False) == ["soup"]
