"""setup.sh: what it would do on which machine, what it refuses, a second run without a network."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "setup.sh"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with what the script reads."""
    folder = tmp_path / "a clone"  # a blank, as many a folder has
    folder.mkdir()
    for name in ("setup.sh", "pyproject.toml", "requirements.lock"):
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def set_up(
    clone: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The script as someone with an empty home starts it."""
    path = f"{clone.parent / 'programs'}:/usr/local/bin:/usr/bin:/bin"
    bare = {"HOME": str(clone.parent), "PATH": path, "PYTHON": sys.executable}
    command = [clone / "setup.sh", *arguments]
    return subprocess.run(
        command, env=bare | environment, capture_output=True, text=True, check=False
    )


def planned(clone: Path, *arguments: str, **environment: str) -> str:
    done = set_up(clone, "--dry-run", *arguments, **environment)
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in clone.iterdir())
    assert names == ["pyproject.toml", "requirements.lock", "setup.sh"]
    return done.stdout


def program(clone: Path, name: str, text: str) -> None:
    folder = clone.parent / "programs"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_shell_as_old_as_that_of_macos_can_read_it():
    text = SCRIPT.read_text(encoding="utf-8")
    newer = (
        "declare -A",
        "mapfile",
        "readarray",
        "${!",
        ",,}",
        "^^}",
        "&>>",
        "|&",
        "[[ -v",
    )
    assert [word for word in newer if word in text] == []
    subprocess.run(["bash", "-n", SCRIPT], check=True)


@pytest.mark.skipif(
    shutil.which("shellcheck") is None, reason="shellcheck is not installed"
)
@pytest.mark.parametrize(
    "script",
    [SCRIPT, *sorted(REPOSITORY.glob("tools/*.sh"))],
    ids=lambda script: script.name,
)
def test_shellcheck_finds_nothing(script: Path):
    checked = subprocess.run(
        ["shellcheck", script], capture_output=True, text=True, check=False
    )
    assert checked.stdout == ""


def test_a_plan_names_every_step_and_ends_with_the_line_to_type(clone: Path):
    plan = planned(clone)
    steps = [line for line in plan.splitlines() if line.startswith("+ ")]
    assert [step.split()[2:4] for step in steps[:2]] == [["-m", "venv"], ["-m", "pip"]]
    assert all(" --constraint requirements.lock " in step for step in steps[1:3])
    assert steps[2].endswith("--editable .[data,serve]")
    assert steps[3:] == [
        "+ .venv/bin/python -m toque --version",
        "+ torch_computes",
        "+ .venv/bin/python -m toque doctor",
    ]
    assert plan.endswith("\nNext:\n  .venv/bin/toque demo\n")


def test_own_data_is_configured_and_trained_next(clone: Path):
    plan = planned(clone, "--data", "gs://bucket/my recipes/")
    assert (
        "+ .venv/bin/python -m toque init gs://bucket/my recipes/ --to my.yaml" in plan
    )
    assert ".[data,serve,gcs]" in plan
    assert plan.endswith(".venv/bin/toque train my.yaml\n")


def test_credentials_are_said_to_be_there_never_shown_and_choose_extras(clone: Path):
    key = clone.parent / "key.json"
    key.write_text("{}")
    secrets = {
        "HF_TOKEN": "hf_secret",
        "AWS_ACCESS_KEY_ID": "secret-id",
        "AWS_SECRET_ACCESS_KEY": "secret-key",
        "GOOGLE_APPLICATION_CREDENTIALS": str(key),
        "WANDB_API_KEY": "secret-wandb",
    }
    plan = planned(clone, **secrets)
    assert plan.count("credentials found\n") == 3
    assert plan.index("credentials found") < plan.index("-m pip install")
    assert ".[data,serve,gcs,s3,wandb]" in plan
    assert "secret" not in plan
    assert planned(clone).count("no credentials found") == 3


def test_a_gpu_is_named_unless_the_processor_is_asked_for(clone: Path):
    program(clone, "nvidia-smi", "echo 'NVIDIA H200'; echo 'NVIDIA H200'")
    assert "gpu           NVIDIA H200\n" in planned(clone)
    assert "gpu           none\n" in planned(clone, "--cpu")


def test_the_gigabytes_of_cuda_are_told_where_pip_knows_no_other_build(clone: Path):
    program(clone, "uname", "case $1 in -s) echo Linux;; -m) echo x86_64;; esac")
    bare = {"PIP_CONFIG_FILE": "/dev/null"}
    assert "some gigabytes" in planned(clone, **bare)
    assert "some gigabytes" not in planned(clone, PIP_FIND_LINKS="wheels", **bare)
    program(clone, "nvidia-smi", "echo 'NVIDIA H200'")
    assert "some gigabytes" not in planned(clone, **bare)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--fast"], {}, "does not know --fast. It takes --dry-run, --cpu"),
        (["--extras"], {}, "--extras needs a value"),
        (["--extras", "data,s4"], {}, "pyproject.toml has no extra s4. It has data, "),
        ([], {"GOOGLE_APPLICATION_CREDENTIALS": "/no/key.json"}, "names /no/key.json, and there"),
        ([], {"AWS_ACCESS_KEY_ID": "id"}, "AWS_SECRET_ACCESS_KEY is not"),
        ([], {"PYTHON": "/no/python"}, "No Python 3.11 or later that can make environments"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_made(
    clone: Path, arguments: list[str], environment: dict[str, str], said: str
):
    done = set_up(clone, *arguments, **environment)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (clone / ".venv").exists()


def test_a_mac_with_an_intel_processor_is_sent_to_the_container(clone: Path):
    program(clone, "uname", "case $1 in -s) echo Darwin;; -m) echo x86_64;; esac")
    done = set_up(clone)
    assert done.returncode == 2
    assert "docs/guides/container.md" in done.stderr


@pytest.mark.slow
def test_a_second_run_fetches_nothing_and_checks_again(clone: Path):
    venv.create(clone / ".venv", with_pip=True)
    here = os.pathsep.join(map(str, (REPOSITORY / "src", *filter(None, sys.path))))
    marker = clone / ".venv" / ".setup"
    marker.write_text("data,serve\n")
    offline = {"PIP_NO_INDEX": "1", "PYTHONPATH": here}
    done = set_up(clone, "--cpu", **offline)
    assert done.returncode == 0, done.stderr
    assert "environment   .venv is there\npackages      are there\n" in done.stdout
    assert "computes on cpu\n" in done.stdout
    assert done.stdout.endswith("Next:\n  .venv/bin/toque demo\n")

    later = marker.stat().st_mtime + 10  # other versions were tested
    os.utime(clone / "requirements.lock", (later, later))
    assert "+ .venv/bin/python -m pip install" in set_up(clone, "--dry-run").stdout


def test_a_half_made_environment_is_made_again(clone: Path):
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to("/no/python3.11")
    done = set_up(clone, "--dry-run")
    assert "cannot be used; made again" in done.stdout
    assert "-m venv --clear .venv" in done.stdout
