"""Flags about shared runs that are refused before anything starts."""

import pytest

from toque.cli import main
from toque.cli.launch import starts_ranks


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--restarts 1", "and --gpus, which says how many, is missing"),
        ("--gpus 0", "--gpus 0 and --restarts 3 cannot be"),
    ],
)
def test_what_cannot_be_meant_ends_with_2(words, told, capsys):
    assert main(["train", "demo", "--no-prepare", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_gpus_beside_a_launcher_of_somebody_else(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with monkeypatch.context() as patch:
        patch.setattr("toque.cli.launch.leave", lambda _: None)
        assert main(["train", "demo", "--gpus", "2"]) == 2
    assert "this is one of 4 already (WORLD_SIZE)" in capsys.readouterr().err


def test_a_rank_of_our_own_starts_none(monkeypatch):
    monkeypatch.setenv("TOQUE_LAUNCHER", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert not starts_ranks(4, None)
