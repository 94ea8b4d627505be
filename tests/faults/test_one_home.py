"""Paths that begin with `~`: a home folder everywhere, as in a shell, or a name everywhere."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from toque.cli import main
from toque.config import load_config
from toque.storage.download import cache_folder
from toque.user_paths import expanded, named_path
from toque.workflows.configure import configure
from toque.workflows.results import model_folder


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A home folder, and a working folder elsewhere."""
    folder = tmp_path / "home"
    work = tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(work)
    return folder


def pasted(command: str) -> list[str]:
    """The words that a shell passes on when a printed command is pasted into it."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True
    )
    return done.stdout.decode().split("\0")[:-1]


def test_fault_89_a_tilde_is_expanded_as_a_shell_expands_it(home):
    root = os.path.expanduser("~root")  # noqa: PTH111
    for typed in (
        "~",
        "~/x",
        "~root/x",
        "~nobody-has-this-name/x",
        "a~",
        "a/~/b",
        "./~/x",
    ):
        assert named_path(typed).absolute() == Path(*pasted(typed)).absolute()
    assert (expanded("~"), expanded("~root")) == (str(home), root)
    assert expanded("~\0") == str(Path.cwd() / "~\0")
    for name in ("./~", "./~root", "~tilde"):  # to expand it again changes nothing
        assert (
            named_path(named_path(name)) == named_path(name) == Path.cwd() / Path(name)
        )


def test_fault_89_settings_flags_and_arguments_mean_the_same_folder(home):
    words = ["run_dir=~/run", "data.store=~/store"]
    config = load_config("demo", words).config
    assert (config.run_dir, config.data.store) == (
        str(home / "run"),
        str(home / "store"),
    )
    from_python = configure("demo", run_dir=Path("~/run"), data={"store": "~/store"})
    assert (from_python.run_dir, from_python.data.store) == (
        config.run_dir,
        config.data.store,
    )
    assert model_folder("~/run") == model_folder(Path("~/run")) == Path(config.run_dir)
    assert load_config("demo", ["run_dir=./~/run"]).config.run_dir == str(
        Path.cwd() / "~/run"
    )
    assert load_config("demo", ["run_dir=gs://a/~/b"]).config.run_dir == "gs://a/~/b"


def test_fault_89_commands_read_and_write_in_the_home_folder(
    home, whole_run, monkeypatch, capsys
):
    shutil.copytree(whole_run, home / "run")
    monkeypatch.setenv("TOQUE_CACHE", "~/cache")
    assert cache_folder("x") == home / "cache" / "x"
    for words in (
        ["cookbook", "~/a.jsonl", "--n", "60"],
        ["init", "~/a.jsonl", "--to=~/my.yaml"],
        ["show", "~/my.yaml"],
        ["show", "~/run"],
        ["verify", "~/run"],
        ["report", "~/run", "--out=~/page.html"],
        ["export", "~/run", "--to=~/exported"],
        ["generate", "~/run", "--prompt", "soup", "--max-new-tokens", "2"],
    ):
        assert main(words) == 0, capsys.readouterr().err
    made = ["a.jsonl", "exported", "my.yaml", "page.html"]
    assert [name for name in made if not (home / name).exists()] == []
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "~tilde",
        "~/inside",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("./~", "./~root")),
    ],
)
@pytest.mark.usefixtures("home")
def test_fault_89_a_printed_command_opens_the_file_that_was_meant(name, capsys):
    """A file that is really named so, too, from which `init` ended in a traceback."""
    assert main(["cookbook", f"{name}.jsonl", "--n", "60"]) == 0
    assert main(["init", f"{name}.jsonl", "--to", f"{name}.yaml"]) == 0
    printed = capsys.readouterr().out.partition("then run: ")[2].splitlines()[0]
    [_, verb, config] = pasted(printed)
    assert verb == "train"
    [source] = load_config(config).config.data.sources
    assert named_path(source.path).read_bytes().startswith(b"{")
    assert main(["init", source.path, "--to", "again.yaml"]) == 0
    assert shlex.split(printed)[2] == config
