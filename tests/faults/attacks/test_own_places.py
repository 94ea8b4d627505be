"""Files and folders that are named by mistake: nothing of the user's is written over."""

import subprocess
from pathlib import Path

import pytest

from toque.cli import main
from toque.config import load_config
from toque.errors import in_shell

MINE = "what nobody has a copy of\n"


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    return path


def test_no_report_is_written_over_another_file(kitchen, mine, tmp_path, capsys):
    assert main(["report", str(kitchen / "store"), "--out", str(mine)]) == 2
    assert (
        "the file exists and is not a page that Toque wrote" in capsys.readouterr().err
    )
    assert mine.read_text() == MINE
    link = tmp_path / "page.html"
    link.symlink_to(mine)
    assert main(["report", str(kitchen / "store"), "--out", str(link)]) == 2
    assert mine.read_text() == MINE
    page = tmp_path / "new.html"
    for _ in range(2):  # a page of ours is made anew
        assert main(["report", str(kitchen / "store"), "--out", str(page)]) == 0
    page.write_text("")  # as mktemp leaves it
    assert main(["report", str(kitchen / "store"), "--out", str(page)]) == 0


def test_no_cookbook_is_written_over_another_file(mine, capsys):
    assert main(["cookbook", str(mine), "--n", "3"]) == 2
    assert "overwrite it with --replace" in capsys.readouterr().err
    assert mine.read_text() == MINE
    assert main(["cookbook", str(mine), "--n", "3", "--replace"]) == 0
    assert len(mine.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("run", "store", "refused"),
    [
        ("a", "a", True),
        ("a", "b/../a/", True),
        ("a/run", "a", True),
        ("a", "a/model", True),
        ("a", "a/checkpoints/x", True),
        ("link", "a", True),
        ("a", "link/outbox", True),
        ("a", "a/data", False),
        ("a", "ab", False),
        ("gs://a/b", "a", False),
    ],
)
def test_a_run_and_a_store_never_share_a_folder(
    run, store, refused, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("a")
    code = main(["show", "demo", f"run_dir={run}", f"data.store={store}"])
    said = " ".join(capsys.readouterr().err.split())
    assert (code, "Choose separate folders" in said) == (
        (2, True) if refused else (0, False)
    )


@pytest.mark.parametrize("name", ["a\nb", "my #1 run", "a\n\nb", "a #", "a\n"])
def test_a_path_on_the_command_line_is_the_path(name):
    assert load_config("demo", [f"run_dir={name}"]).config.run_dir == name


def test_values_are_still_read_as_yaml():
    words = [
        'run_dir="a\\nb"',
        "seed= 5 ",
        "data.tasks=[write,\n difficulty]",
        "run_dir= c ",
    ]
    assert load_config("demo", words[:1]).config.run_dir == "a\nb"
    config = load_config("demo", words[1:]).config
    assert (config.seed, config.data.tasks, config.run_dir) == (
        5,
        ("write", "difficulty"),
        "c",
    )


def test_an_error_shows_a_line_break_in_a_path(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for verb in ("report", "verify", "evaluate", "train"):
        assert main([verb, "no\nsuch"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("toque: no\\nsuch")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["my run", "a\nb", "it's $HOME `id`\n", '"', "\t'\"\\", "ü\u2028"]
)
def test_a_printed_path_can_be_pasted(name):
    printed = in_shell(name)
    assert printed.splitlines() == [printed]
    told = subprocess.run(
        ["bash", "-c", f"printf %s {printed}"], capture_output=True, check=True
    )
    assert told.stdout.decode() == name


def test_a_configuration_of_an_odd_name_can_be_read_and_its_command_pasted(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["cookbook", "a b.jsonl", "--n", "60"]) == 0
    assert main(["init", "a b.jsonl", "--to", "my\nrun.yaml"]) == 0
    assert "toque train $'my\\nrun.yaml'" in capsys.readouterr().out
    assert load_config("my\nrun.yaml").config.data.sources[0].path == "a b.jsonl"
