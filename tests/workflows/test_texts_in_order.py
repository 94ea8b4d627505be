"""Texts as they are written: in order, whole characters only, the same at the end; their hint."""

from pathlib import Path

import pytest
import torch

import toque
from plain_transformers import model_folder
from toque.cli.console import StreamPrinter
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError
from toque.workflows.inference.generate import OrderedTexts
from toque.workflows.results import Answer, Written, advise_on_texts

BYTES = {1: b"a", 2: b"b", 3: "ü".encode()[:1], 4: "ü".encode()[1:]}


def spelled(ids: list[int]) -> str:
    return b"".join(BYTES[i] for i in ids).decode(errors="replace")


def test_the_second_text_waits_for_the_first() -> None:
    told: list[tuple[int, str]] = []
    watch = OrderedTexts(
        lambda number, text: told.append((number, text.text)),
        ["p", "q", "r"],
        spelled,
        first=5,
    )
    for number, token in (
        (0, 1),
        (1, 2),
        (2, 1),
        (1, None),
        (0, 3),
        (0, 4),
        (2, None),
        (0, None),
    ):
        watch(number, token)
    shown = [(5, "a"), (5, "a"), (5, "aü"), (5, "aü"), (6, "b"), (7, "a")]
    assert told == shown


def test_half_a_character_is_shown_only_where_the_text_ends_with_it() -> None:
    told: list[str] = []
    watch = OrderedTexts(lambda _, text: told.append(text.text), ["p"], spelled)
    for token in (1, 3, None):
        watch(0, token)
    assert told == ["a", "a", "a\ufffd"]


def test_what_is_printed_bit_by_bit_is_what_is_printed_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = [
        Written("p", "one two", 2),
        Written("q", "", 0, "a"),
        Written("r", "three", 1, "b"),
    ]
    for text in texts:
        print(text)
    expected = capsys.readouterr().out
    printer = StreamPrinter()
    for number, text in enumerate(texts):
        for end in range(0, len(text.text) + 1, 3):
            printer(number, Written(text.prompt, text.text[:end], 0, text.adapter))
        printer(number, text)
    printer.end()
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_gets_no_control_characters_of_a_model_and_a_pipe_all(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    text = "a\tb\n\x1b[2J\x07\r\x7f\x9bé\u00a0\u200f"
    printer = StreamPrinter()
    printer(0, Written("p\x1b", text[:7], 1))
    printer(0, Written("p\x1b", text, 2))
    shown = "a\tb\n\ufffd[2J\ufffd\ufffd\ufffd\ufffdé\u00a0\u200f" if terminal else text
    heading = "p\ufffd" if terminal else "p\x1b"
    assert capsys.readouterr().out == f"{heading}\n\n{shown}"


@pytest.fixture
def model(tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    return model_folder(tmp_path, "gpt2", load_codec(tokenizers_at["decoder"]))


def test_generate_tells_of_every_text_what_it_returns(model: Path) -> None:
    last: dict[int, Written] = {}
    order: list[int] = []

    def on_text(number: int, text: Written) -> None:
        assert text.text.startswith(last[number].text if number in last else "")
        last[number] = text
        order.append(number)

    options = {"n": 2, "max_new_tokens": 12, "seed": 3, "device": "cpu"}
    found = toque.generate(model, ["soup", "bread: flour"], on_text=on_text, **options)
    assert [last[number] for number in range(4)] == found
    assert order == sorted(order)
    assert len(order) > 8
    assert toque.generate(model, ["soup", "bread: flour"], **options) == found


def test_a_device_that_is_not_there_is_said(model: Path) -> None:
    with pytest.raises(ConfigError, match="'toaster' is not a device"):
        toque.generate(model, "soup", device="toaster")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(
        ConfigError, match=f"cuda:{count} (does not exist|is not available)"
    ):
        toque.generate(model, "soup", device=f"cuda:{count}")


@pytest.mark.gpu
def test_the_gpu_is_taken_and_writes_the_same(model: Path) -> None:
    options = {"temperature": 0, "max_new_tokens": 12}
    on_cpu = toque.generate(model, "soup", device="cpu", **options)
    assert toque.generate(model, "soup", **options) == on_cpu


PROMPT = "Generate recipe for: Pea Soup using ingredients: peas, onion"
GOOD = (
    "Ingredients:\n- 2 cups peas\n- 1 onion, diced\n\nInstructions:\n1. Soften the onion in a pot "
    "for 5 minutes.\n2. Add the peas, cover with water and simmer for 20 minutes."
)


def test_poor_texts_get_a_hint_and_good_ones_none() -> None:
    good, poor = Written(PROMPT, GOOD, 60), Written(PROMPT, "peas peas peas peas", 4)
    assert next(iter(good.metrics)) == "cookable"  # the one to rank by comes first
    assert advise_on_texts([good]) == ""
    assert "0.00 of 1" in advise_on_texts([poor, poor])
    assert advise_on_texts([good, poor, poor]).startswith("The texts are still poor")


def test_no_hint_about_what_is_no_recipe() -> None:
    assert advise_on_texts([]) == ""
    assert advise_on_texts([Written("Once upon a time", "there was", 2)]) == ""
    assert advise_on_texts([Answer(PROMPT, "easy", {"easy": 1.0})]) == ""
