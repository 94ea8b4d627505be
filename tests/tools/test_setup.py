"""setup.sh: what it would do on this machine, and what it refuses before anything is fetched."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ("setup.sh", "tools/try_container.sh")


def setup(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inside = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHON": sys.executable,
        "VENV": str(tmp_path / "venv"),
        **environment,
    }
    return subprocess.run(
        ["bash", str(REPOSITORY / "setup.sh"), *arguments],
        env=inside, capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip


def test_a_dry_run_says_what_would_be_done_and_does_nothing(tmp_path: Path) -> None:
    done = setup(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Machine: ")
    assert lines[1] == "Credentials: Google none, Amazon none, Hugging Face none, W&B none"
    assert f"would install Toque with data,gguf into {tmp_path / 'venv'}" in lines[2]
    assert lines[-1] == f"Next:  {tmp_path / 'venv'}/bin/toque demo"
    assert list(tmp_path.iterdir()) == []


def test_extras_follow_credentials_and_data_and_no_secret_is_printed(tmp_path: Path) -> None:
    done = setup(
        tmp_path, "--data", "s3://kitchen/recipes", "gs://kitchen/more", "--dry-run",
        WANDB_API_KEY="secret-1", AWS_ACCESS_KEY_ID="secret-2", HF_TOKEN="secret-3",  # noqa: S106
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "with data,gguf,gcs,s3,wandb into" in done.stdout
    assert "Google none, Amazon found, Hugging Face found, W&B found" in done.stdout
    assert "gs://kitchen/more is read without credentials" in done.stdout
    assert "s3://kitchen/recipes is read" not in done.stdout
    assert done.stdout.endswith("bin/toque train my.yaml\n")
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (("--data", "no-such.jsonl"), {}, "no-such.jsonl: there is no such file"),
        (("--data",), {}, "--data names a source after it"),
        (("--extras", "cream"), {}, "pyproject.toml has no such extra"),
        (("--quick",), {}, "--quick is none of"),
        ((), {"GOOGLE_APPLICATION_CREDENTIALS": "/no/key.json"}, "names /no/key.json"),
        ((), {"PYTHON": "/no/python"}, "no Python 3.11 or later"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_done(
    arguments: tuple[str, ...], environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = setup(tmp_path, *arguments, **environment)
    assert (done.returncode, done.stdout.count("Environment")) == (2, 0)
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_is_the_head_of_the_file(tmp_path: Path) -> None:
    done = setup(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Setup of Toque on this machine")
    assert "changes nothing." in done.stdout.splitlines()[-1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_shell_that_older_bashes_read(script: str) -> None:
    file = str(REPOSITORY / script)
    subprocess.run(["bash", "-n", file], check=True)
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([shellcheck, file], capture_output=True, text=True, check=False)
    assert done.stdout == ""
