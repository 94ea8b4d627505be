"""Flags about shared runs that are refused before anything starts."""

import shlex
from pathlib import Path

import pytest

from toque.cli import main
from toque.cli.commands_run import _raise_interrupted
from toque.cli.launch import check_rank_flags, starts_ranks, without_secrets
from toque.errors import Interrupted
from toque.workflows.results import TrainedRun


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--restarts 1", "--restarts needs --gpus"),
        ("--gpus 0", "--gpus must be"),
    ],
)
def test_what_cannot_be_meant_ends_with_2(words, told, capsys):
    assert main(["train", "demo", "--no-prepare", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_gpus_beside_a_launcher_of_somebody_else(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with monkeypatch.context() as patch:
        patch.setattr("toque.cli.launch.exit_immediately", lambda _: None)
        assert main(["train", "demo", "--gpus", "2"]) == 2
    assert "this process is already one of 4 (WORLD_SIZE)" in capsys.readouterr().err


def test_a_rank_of_our_own_starts_none(monkeypatch):
    monkeypatch.setenv("TOQUE_LAUNCHER", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    check_rank_flags(4, None)
    assert not starts_ranks(4)


def test_words_that_continue_a_run_can_be_pasted_and_hold_no_secret():
    kept = [
        "my.yaml",
        "run_dir=runs/webhook-test",
        "data.sources=[{path: webhooks.jsonl}]",
    ]
    kept += ["observe.webhook=env:HOOK", "observe={webhook: env:HOOK}"]
    assert without_secrets(kept) == kept
    secret = ["observe.webhook = https://x/token", "observe={webhook: https://x/token}"]
    assert not any("token" in word for word in without_secrets([*kept, *secret]))
    run = TrainedRun(Path("runs/webhook-test"), 5, "interrupted")
    with pytest.raises(Interrupted) as said:
        _raise_interrupted(
            run, ["train", *kept, *secret], {"--gpus": 2, "--hardware": None}
        )
    assert "(add the webhook again: its address is a secret)" in str(said.value)
    again = shlex.split(str(said.value).partition(": toque ")[2])
    assert again == ["train", *kept, "--gpus", "2"]
