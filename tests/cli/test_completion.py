"""Shell completion: what Tab offers."""

import shutil
import subprocess

import pytest

from toque.cli import main


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]):
    def of(shell: str) -> str:
        assert main(["completion", shell]) == 0
        return capsys.readouterr().out

    return of


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["toque", "tr"], {"train"}),
        (["toque", "show"], {"show", "show-batch"}),
        (["toque", "prepare", "--re"], {"--replace"}),
        (["toque", "init", "--size", "3"], {"300k", "3m", "30m"}),
    ],
)
def test_bash_completes(script, typed: list[str], offered: set[str]) -> None:
    words = " ".join(typed)
    asked = f"COMP_WORDS=({words}); COMP_CWORD={len(typed) - 1}; _toque; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(
        ["bash", "-c", f"{script('bash')}\n{asked}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(done.stdout.split()) == offered
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_flag_is_known(script, shell: str) -> None:
    text = script(shell)
    for name in (
        "init",
        "prepare",
        "train",
        "show-batch",
        "completion",
        "replace",
        "start-from",
    ):
        assert name in text
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)
