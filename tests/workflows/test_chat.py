"""Talking to a model: history, what is typed besides questions, and two models side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import toque
from toque.cli import main
from toque.errors import ConfigError
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.workflows.inference import talk as chat
from workflows.test_chat_bases import TEMPLATE, chat_base

GREEDY = GenerationOptions(max_new_tokens=6)


@pytest.fixture(scope="module")
def base(
    tokenizers_at: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("talk") / "base"
    return chat_base(folder, tokenizers_at["decoder"], end="<|endoftext|>")


def test_each_question_is_asked_with_all_that_was_said(base):
    talk = chat.open_talk(base, system="You cook.", device="cpu")
    heard: list[str] = []
    first = talk.ask("Which rice?", GREEDY, on_text=heard.append)
    assert "".join(heard) == first
    second = talk.ask("And how long?", GREEDY, on_text=lambda _: None)
    tokenizer = AutoTokenizer.from_pretrained(base)
    turns = talk.turns[:-1]
    assert [turn["content"] for turn in turns] == [
        "You cook.",
        "Which rice?",
        first,
        "And how long?",
    ]
    [written] = toque.generate(
        base, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True),
        temperature=0.0, max_new_tokens=6, raw=True,
    )  # fmt: skip
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
    assert talk.prompt_ids([*turns]) == ids
    assert second
    assert written.prompt.startswith("<|im_start|>system")


def test_what_does_not_fit_is_forgotten_from_its_beginning_and_said(base):
    talk = chat.open_talk(base, system="You cook.", device="cpu")
    told: list[str] = []
    for n in range(30):
        talk.ask(
            f"Question {n}: which rice?",
            GREEDY,
            on_text=lambda _: None,
            notice=told.append,
        )
    assert chat.FORGOTTEN in told
    assert talk.turns[0]["content"] == "You cook."
    assert "Question 29" in talk.turns[-2]["content"]
    read = talk.opened.codec.decode(talk.prompt_ids(talk.turns[:-1]))
    assert "Question 29:" in read
    assert "Question 0:" not in read


def test_old_turns_go_before_they_leave_an_answer_no_room(base):
    talk = chat.open_talk(base, system=None, device="cpu")
    talk.opened.codec.eos_id = -1  # no answer ends by itself
    options = GenerationOptions(max_new_tokens=100)
    for n in range(12):
        told: list[str] = []
        pieces: list[str] = []
        talk.ask(
            f"Question {n}: which rice?",
            options,
            on_text=pieces.append,
            notice=told.append,
        )
        assert len(pieces) == 101, "the whole length, and the end"
        assert (
            told[-1] == "the answer was cut at 100 tokens, the longest allowed answer"
        )
    assert talk.turns[-2]["content"] == "Question 11: which rice?"


def test_an_answer_that_the_positions_cut_is_told(base):
    talk = chat.open_talk(base, system=None, device="cpu")
    talk.opened.codec.eos_id = -1
    told: list[str] = []
    question = "Which rice is the best one for a pudding, and how is it cooked? " * 8
    n = len(talk.prompt_ids([{"role": "user", "content": question}]))
    options = GenerationOptions(max_new_tokens=512)
    talk.ask(question, options, on_text=lambda _: None, notice=told.append)
    [said] = told
    assert said == (
        f"the answer was cut at {513 - n} tokens, because the model's context of 512 tokens is "
        f"full: the question and the earlier turns take {n}"
    )


def test_an_answer_whose_last_token_is_the_end_is_whole(base):
    talk = chat.open_talk(base, system=None, device="cpu")
    told: list[str] = []
    prompt = talk.prompt_ids([{"role": "user", "content": "Which rice?"}])
    [ids] = generate(talk.opened.model, [prompt], GREEDY, eos_id=-1, pad_id=0)
    talk.opened.codec.eos_id = ids[-1]
    longest = GenerationOptions(max_new_tokens=ids.index(ids[-1]) + 1)
    talk.ask("Which rice?", longest, on_text=lambda _: None, notice=told.append)
    assert told == []


def test_an_interrupted_answer_is_kept_as_far_as_it_came(base):
    talk = chat.open_talk(base, system=None, device="cpu")

    def interrupt(piece: str) -> None:
        if piece and not stopped:
            stopped.append(piece)
            raise KeyboardInterrupt

    stopped: list[str] = []
    answer = talk.ask("Which rice?", GREEDY, on_text=interrupt)
    assert answer.startswith(stopped[0])
    assert talk.turns[-1] == {"role": "assistant", "content": answer}


def test_a_conversation_in_a_terminal(base, tmp_path, monkeypatch, capsys):
    file = tmp_path / "talk.jsonl"
    typed = [
        "Which rice?", "/compare How long?", "/undo", f"/save {file}", f"/save {file}", "/new",
        "/save x", "/sing", "/help", "/exit", "never",
    ]  # fmt: skip
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    asked = [
        "chat",
        str(base),
        str(base),
        "--max-new-tokens",
        "6",
        "--temperature",
        "0",
    ]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    [saved] = map(json.loads, file.read_text().splitlines())
    assert [turn["role"] for turn in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][0]["content"] == "Which rice?"
    assert out.startswith(saved["messages"][1]["content"])
    assert out.count(f"[{base}]") == 2
    assert "/compare QUESTION" in out
    assert (
        err.count("note: the answer was cut at 6 tokens, the longest allowed answer")
        == 3
    )
    for words in (
        "already exists. Name another file",
        "no answer to save",
        "/sing is not a command",
    ):
        assert words in err


def test_what_is_no_text_is_refused_and_a_pipe_ends_with_the_code_of_its_mistake(
    base, monkeypatch, capsys
):
    piped = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nWhich rice?\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    asked = ["chat", str(base), "--max-new-tokens", "6"]
    assert main(asked) == 2
    out, err = capsys.readouterr()
    assert "The question is not UTF-8 text: 'caf\\udce9'" in err
    assert out.count("\n") == 1, "the next question is answered"
    monkeypatch.setattr("sys.stdin", io.StringIO("long " * 999 + "\n"))
    assert main(asked) == 2
    assert "Shorten the prompt" in capsys.readouterr().err
    assert main([*asked, "--system", "\udcff"]) == 2
    assert "--system is not UTF-8 text" in capsys.readouterr().err


def test_a_model_of_single_requests_reads_one_at_a_time(gpt2_run_like, capsys):
    talk = chat.open_talk(
        gpt2_run_like, system=None, device="cpu", reporter=toque.ConsoleReporter()
    )
    assert talk.template is None
    assert chat.NO_CONVERSATION in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="system cannot be used"):
        chat.open_talk(gpt2_run_like, system="You cook.", device="cpu")


@pytest.fixture
def gpt2_run_like(tokenizers_at: dict[str, Path], tmp_path: Path) -> Path:
    return chat_base(
        tmp_path / "plain", tokenizers_at["decoder"], end="<|endoftext|>", template=None
    )


def test_a_template_without_system_texts_refuses_one(tokenizers_at, tmp_path):
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    folder = chat_base(
        tmp_path / "base",
        tokenizers_at["decoder"],
        end="<|endoftext|>",
        template=refuses + TEMPLATE,
    )
    with pytest.raises(ConfigError, match=r"system cannot be used: .*no system"):
        chat.open_talk(folder, system="You cook.", device="cpu")
