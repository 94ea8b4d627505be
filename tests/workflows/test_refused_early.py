"""Mistakes about folders, starts and shapes: each one true paragraph, before work is lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import toque
from toque.cli import main
from toque.errors import ConfigError

Toque = Callable[..., tuple[int, str]]


@pytest.fixture
def say(own_kitchen: Path, capfd: pytest.CaptureFixture[str]) -> Toque:
    """`say(words...)`: exit code and error of a command, which is no traceback."""
    assert own_kitchen.exists()

    def command(*words: str) -> tuple[int, str]:
        code = main(list(words))
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return code, " ".join(said.err.split())

    return command


@pytest.mark.parametrize("name", ["file", "file/inside", "link"])
def test_a_store_that_is_a_file(say, own_kitchen, name):
    (own_kitchen / "file").write_text("mine")
    (own_kitchen / "link").symlink_to("nowhere")
    for verb in ("prepare", "train"):
        code, said = say(verb, "my.yaml", f"data.store={name}")
        assert code == 3
        assert f"data.store is {name}" in said
        assert ("is a broken link" if name == "link" else "is a file") in said
    assert not (own_kitchen / "runs").exists()
    code, said = say("train", "my.yaml", "run_dir=file")
    assert (code, "run_dir" in said) == (4, True)
    assert (own_kitchen / "file").read_text() == "mine"


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
def test_a_run_that_is_not_there(say, own_kitchen, verb):
    (own_kitchen / "runs" / "lentils").mkdir(parents=True)
    words = {
        "generate": ["--prompt", "soup"],
        "evaluate": ["my.yaml"],
        "export": ["--to", "out"],
    }[verb]
    code, said = say(verb, "runs/lentil", *words)
    assert code == 2
    assert "The folder runs/lentil" in said
    assert "runs/lentils" in said
    assert "hub" not in said
    assert "model.start_from" not in said


@pytest.mark.parametrize("start", ["runs/nope", "runs/empty"])
def test_a_start_that_is_not_there_makes_no_folder(say, own_kitchen, start):
    (own_kitchen / "runs" / "empty").mkdir(parents=True)
    code, said = say("train", "my.yaml", "run_dir=runs/new", "--from", start)
    assert code == 4
    assert f"--from {start}: the folder has no checkpoint" in said
    assert not (own_kitchen / "runs" / "new").exists()
    shutil.rmtree(own_kitchen / "store")
    assert say("train", "my.yaml", "run_dir=runs/new", "--from", start)[0] == 4
    assert not (own_kitchen / "store").exists()  # nor is anything prepared for it


def test_a_start_that_does_not_fit_makes_no_folder(say, own_kitchen):
    assert say("train", "my.yaml")[0] == 0
    wider = "model.shape={n_embd: 32, n_layer: 1, n_head: 2, n_positions: 512}"
    code, said = say("train", "my.yaml", wider, "run_dir=runs/new", "--from", "run")
    assert code == 4
    assert "does not fit the model" in said
    assert not (own_kitchen / "runs" / "new").exists()
    code, said = say("train", "my.yaml", "run_dir=run", "--from", "run")
    assert code == 4
    assert "already has a run" in said


def test_a_folder_that_was_there_is_left_there(say, own_kitchen):
    (own_kitchen / "runs" / "new").mkdir(parents=True)
    (own_kitchen / "runs" / "new" / "notes.txt").write_text("mine")
    assert say("train", "my.yaml", "run_dir=runs/new", "train.row_tokens=16")[0] == 2
    assert (own_kitchen / "runs" / "new" / "notes.txt").read_text() == "mine"


UNFIT = [
    (
        "model.shape={n_embd: 16, n_layer: 1, n_head: 2, n_positions: 128}",
        "context length is 128 tokens",
    ),
    (
        "model.shape={n_embd: 16, n_layer: 1, n_head: 3}",
        "does not describe a gpt2 model",
    ),
    ("model.shape={n_embd: 16, n_heads: 2}", "Nearest: n_head."),
    ("train.row_tokens=64", "train.row_tokens sets rows of 64 tokens"),
    ("train.batch=64 tokens", 'Set train.batch to "320 tokens" or more'),
]


@pytest.mark.parametrize(("setting", "words"), UNFIT)
def test_what_training_would_refuse_is_said_when_the_store_is_prepared(
    say, own_kitchen, setting, words
):
    code, said = say("prepare", "my.yaml", setting, "data.store=new")
    assert code == 2
    assert "new is prepared, but `toque train` would refuse it" in said
    assert words in said
    assert say("verify", "new")[0] == 0  # whole, for other settings
    code, said = say("train", "my.yaml", setting, "data.store=new", "run_dir=runs/new")
    assert code == 2
    assert words in said
    assert not (own_kitchen / "runs").exists()
    with pytest.raises(ConfigError, match=r"would refuse it"):
        toque.prepare(_settings(setting, "newer"))


def _settings(setting: str, store: str) -> toque.RunConfig:
    from toque.config import load_config

    return load_config("my.yaml", [setting, f"data.store={store}"]).config


def test_a_model_folder_is_known_as_well(say, own_kitchen):
    assert say("train", "my.yaml")[0] == 0
    words = ["model.start_from=run/model", "model.shape={}", "model.family=auto"]
    longer = [
        "data.max_target_tokens=600",
        "data.store=new",
        "model.tokenizer=trained:512",
    ]
    recipe = (own_kitchen / "a.jsonl").read_text().splitlines()
    (own_kitchen / "a.jsonl").write_text("\n".join(recipe[:40]) + "\n")
    code, said = say("prepare", "my.yaml", *words, *longer, "adapter={}")
    assert code == 0, said  # the data is shorter than the limits
    (own_kitchen / "run" / "model" / "config.json").write_text(
        (own_kitchen / "run" / "model" / "config.json")
        .read_text()
        .replace('"n_positions": 512', '"n_positions": 100')
    )
    code, said = say("prepare", "my.yaml", *words, *longer, "data.store=newer")
    assert code == 2
    assert "context length is 100 tokens" in said


def test_a_model_that_is_not_here_is_not_known(say):
    words = [
        "model.start_from=org/model-of-nobody",
        "model.family=gpt2",
        "model.shape={}",
    ]
    code, said = say(
        "prepare", "my.yaml", *words, "model.tokenizer=trained:512", "data.store=new"
    )
    assert code == 0, said
