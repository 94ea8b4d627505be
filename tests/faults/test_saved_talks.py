"""A conversation that is saved: whole, and never in part."""

import json
import resource
from pathlib import Path

import pytest

from toque.errors import ConfigError
from toque.models.generation.options import GenerationOptions
from toque.workflows.inference import talk as chat
from workflows.test_chat_bases import chat_base

GREEDY = GenerationOptions(max_new_tokens=6)


@pytest.fixture(scope="module")
def base(tokenizers_at, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved-talk") / "base"
    return chat_base(folder, tokenizers_at["decoder"], end="<|endoftext|>")


def saved(talk: chat.Talk, file: Path) -> list[dict[str, str]]:
    talk.save(file)
    return json.loads(file.read_text())["messages"]


def questions(turns: list[dict[str, str]]) -> list[str]:
    return [turn["content"] for turn in turns if turn["role"] == "user"]


def test_fault_90_the_whole_conversation_is_saved_once_the_model_reads_less(
    base, tmp_path
):
    talk = chat.open_talk(base, system="You cook.", device="cpu")
    asked = [f"Question {n}: {'which rice? ' * 30}" for n in range(7)]
    notes: list[str] = []
    for question in asked:
        talk.ask(question, GREEDY, on_text=lambda _: None, notice=notes.append)
    assert 0 < notes.count(chat.FORGOTTEN) < len(asked)
    turns = saved(talk, tmp_path / "talk.jsonl")
    assert turns[0] == {"role": "system", "content": "You cook."}
    assert questions(turns) == asked
    read = talk.opened.codec.decode(talk.prompt_ids(turns[:-1]))
    assert "You cook." in read
    assert asked[-1].strip() in read
    assert asked[0].strip() not in read


def test_fault_90_a_question_that_is_too_long_leaves_the_conversation_as_it_was(
    base, tmp_path
):
    talk = chat.open_talk(base, system=None, device="cpu")
    talk.ask("Which rice?", GREEDY, on_text=lambda _: None)
    with pytest.raises(ConfigError):
        talk.ask("Which rice? " * 500, GREEDY, on_text=lambda _: None)
    assert questions(saved(talk, tmp_path / "talk.jsonl")) == ["Which rice?"]
    turns = [*talk.turns, {"role": "user", "content": "How long?"}]
    assert "Which rice?" in talk.opened.codec.decode(talk.prompt_ids(turns))


def test_fault_90_after_a_new_beginning_everything_is_read_again(base):
    talk = chat.open_talk(base, system="You cook.", device="cpu")
    for n in range(4):
        talk.ask(f"Question {n}: {'which rice? ' * 30}", GREEDY, on_text=lambda _: None)
    assert talk.n_left_out > 0
    talk.turns = talk.turns[:1]  # as /new does
    for question in ("Which rice?", "How long?"):
        talk.ask(question, GREEDY, on_text=lambda _: None)
    assert "Which rice?" in talk.opened.codec.decode(talk.prompt_ids(talk.turns[:-1]))


def test_fault_90_a_full_disk_leaves_no_file_and_the_next_try_works(base, tmp_path):
    talk = chat.open_talk(base, system=None, device="cpu")
    talk.ask("Which rice?", GREEDY, on_text=lambda _: None)
    file = tmp_path / "talk.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20, limits[1])
    )  # as a disk with 20 bytes left
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="File too large"):
                talk.save(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []
    assert questions(saved(talk, file)) == ["Which rice?"]


@pytest.mark.parametrize("links", [True, False])
def test_fault_90_another_file_is_never_replaced(base, tmp_path, monkeypatch, links):
    talk = chat.open_talk(base, system=None, device="cpu")
    talk.ask("Which rice?", GREEDY, on_text=lambda _: None)
    if not links:  # as on a FAT disk

        def refuse(*_paths: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("os.link", refuse)
    file = tmp_path / "talk.jsonl"
    file.write_text("mine")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    for name in ("talk.jsonl", "link.jsonl"):
        with pytest.raises(ConfigError, match="already exists"):
            talk.save(tmp_path / name)
    assert file.read_text() == "mine"
    assert questions(saved(talk, tmp_path / "new.jsonl")) == ["Which rice?"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "link.jsonl",
        "new.jsonl",
        "talk.jsonl",
    ]
