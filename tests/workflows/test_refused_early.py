"""Mistakes about folders, starts and shapes: each one true paragraph, before work is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import toque
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError

CONFIG = """
run_dir: runs/a
seed: 5
model: {family: gpt2, tokenizer: "trained:512",
  shape: {n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}
data: {sources: [{path: a.jsonl}], store: store, max_prompt_tokens: 64, max_target_tokens: 256}
optim: {warmup: "1 steps", peak_lr: 1e-2}
train: {stop_after: "2 steps", batch: "1024 tokens", precision: float32, micro_batch_rows: 2,
  compile: false}
evaluation: {max_examples: 4, generate: 0}
"""

Toque = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("early")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    (folder / "my.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["prepare", "my.yaml"]) == 0
    return folder


@pytest.fixture
def kitchen(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a source, a configuration and a store."""
    shutil.copytree(prepared, tmp_path / "k")
    monkeypatch.chdir(tmp_path / "k")
    return tmp_path / "k"


@pytest.fixture
def say(kitchen: Path, capfd: pytest.CaptureFixture[str]) -> Toque:
    """`say(words...)`: exit code and error of a command, which is no traceback."""
    assert kitchen.exists()

    def command(*words: str) -> tuple[int, str]:
        code = main(list(words))
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return code, " ".join(said.err.split())

    return command


@pytest.mark.parametrize("name", ["file", "file/inside", "link"])
def test_a_store_that_is_a_file(say, kitchen, name):
    (kitchen / "file").write_text("mine")
    (kitchen / "link").symlink_to("nowhere")
    for verb in ("prepare", "train"):
        code, said = say(verb, "my.yaml", f"data.store={name}")
        assert code == 3
        assert f"data.store is {name}" in said
        assert ("is a link to nothing" if name == "link" else "is a file") in said
    assert (kitchen / "file").read_text() == "mine"
    assert not (kitchen / "runs").exists()


def test_a_run_folder_that_is_a_file(say, kitchen):
    (kitchen / "file").write_text("mine")
    code, said = say("train", "my.yaml", "run_dir=file")
    assert code == 4
    assert "file" in said
    assert "run_dir" in said
    assert (kitchen / "file").read_text() == "mine"


@pytest.mark.parametrize("verb", ["generate", "evaluate", "export"])
def test_a_run_that_is_not_there(say, kitchen, verb):
    (kitchen / "runs" / "lentils").mkdir(parents=True)
    words = {
        "generate": ["--prompt", "soup"],
        "evaluate": ["my.yaml"],
        "export": ["--to", "out"],
    }[verb]
    code, said = say(verb, "runs/lentil", *words)
    assert code == 2
    assert "There is no folder runs/lentil" in said
    assert "runs/lentils" in said
    assert "hub" not in said
    assert "model.start_from" not in said


@pytest.mark.parametrize("start", ["runs/nope", "runs/empty"])
def test_a_start_that_is_not_there_makes_no_folder(say, kitchen, start):
    (kitchen / "runs" / "empty").mkdir(parents=True)
    code, said = say("train", "my.yaml", "run_dir=runs/new", "--from", start)
    assert code == 4
    assert f"--from {start}: no checkpoint there" in said
    assert not (kitchen / "runs" / "new").exists()
    shutil.rmtree(kitchen / "store")
    assert say("train", "my.yaml", "run_dir=runs/new", "--from", start)[0] == 4
    assert not (kitchen / "store").exists()  # nor is anything prepared for it


def test_a_start_that_does_not_fit_makes_no_folder(say, kitchen):
    assert say("train", "my.yaml")[0] == 0
    wider = "model.shape={n_embd: 32, n_layer: 1, n_head: 2, n_positions: 512}"
    code, said = say("train", "my.yaml", wider, "run_dir=runs/new", "--from", "runs/a")
    assert code == 4
    assert "does not fit the model" in said
    assert not (kitchen / "runs" / "new").exists()
    code, said = say("train", "my.yaml", "run_dir=runs/a", "--from", "runs/a")
    assert code == 4
    assert "already holds a run" in said


def test_a_folder_that_was_there_is_left_there(say, kitchen):
    (kitchen / "runs" / "new").mkdir(parents=True)
    (kitchen / "runs" / "new" / "notes.txt").write_text("mine")
    assert say("train", "my.yaml", "run_dir=runs/new", "train.row_tokens=16")[0] == 2
    assert (kitchen / "runs" / "new" / "notes.txt").read_text() == "mine"


UNFIT = [
    ("model.shape={n_embd: 16, n_layer: 1, n_head: 2, n_positions: 128}", "128 positions"),
    ("model.shape={n_embd: 16, n_layer: 1, n_head: 3}", "does not make a gpt2 model"),
    ("model.shape={n_embd: 16, n_heads: 2}", "Did you mean"),
    ("train.row_tokens=64", "train.row_tokens gives rows of 64 tokens"),
    ("train.batch=64 tokens", 'Use at least train.batch="320 tokens"'),
]


@pytest.mark.parametrize(("setting", "words"), UNFIT)
def test_what_training_would_refuse_is_said_when_the_store_is_prepared(
    say, kitchen, setting, words
):
    code, said = say("prepare", "my.yaml", setting, "data.store=new")
    assert code == 2
    assert "new is prepared, and `toque train` would refuse it" in said
    assert words in said
    assert say("verify", "new")[0] == 0  # whole, for other settings
    code, said = say("train", "my.yaml", setting, "data.store=new", "run_dir=runs/new")
    assert code == 2
    assert words in said
    assert not (kitchen / "runs").exists()
    with pytest.raises(ConfigError, match=r"would refuse it"):
        toque.prepare(_settings(setting, "newer"))


def _settings(setting: str, store: str) -> toque.RunConfig:
    from toque.config import load_config

    return load_config("my.yaml", [setting, f"data.store={store}"]).config


def test_a_model_folder_is_known_as_well(say, kitchen):
    assert say("train", "my.yaml")[0] == 0
    words = ["model.start_from=runs/a/model", "model.shape={}", "model.family=auto"]
    longer = ["data.max_target_tokens=600", "data.store=new", "model.tokenizer=trained:512"]
    recipe = (kitchen / "a.jsonl").read_text().splitlines()
    (kitchen / "a.jsonl").write_text("\n".join(recipe[:40]) + "\n")
    code, said = say("prepare", "my.yaml", *words, *longer, "adapter={}")
    assert code == 0, said  # the data is shorter than the limits
    (kitchen / "runs" / "a" / "model" / "config.json").write_text(
        (kitchen / "runs" / "a" / "model" / "config.json")
        .read_text()
        .replace('"n_positions": 512', '"n_positions": 100')
    )
    code, said = say("prepare", "my.yaml", *words, *longer, "data.store=newer")
    assert code == 2
    assert "100 positions" in said


def test_a_model_that_is_not_here_is_not_known(say):
    words = ["model.start_from=org/model-of-nobody", "model.family=gpt2", "model.shape={}"]
    code, said = say("prepare", "my.yaml", *words, "model.tokenizer=trained:512", "data.store=new")
    assert code == 0, said
