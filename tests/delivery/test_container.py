"""Dockerfile, .dockerignore and health check, read and run without an engine.

The whole is tried by tools/try_container.py, which takes half an hour and root.
"""

import fnmatch
import http.server
import json
import runpy
import shlex
import subprocess
import sys
import threading
import tomllib
import urllib.error
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
TRIAL = runpy.run_path(str(REPOSITORY / "tools" / "try_container.py"))
HEALTH = runpy.run_path(str(REPOSITORY / "tools" / "container_health.py"))
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
STEPS = TRIAL["instructions"](DOCKERFILE)
IGNORED = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()


def test_what_is_copied_is_there_and_not_ignored():
    copied = [
        word
        for name, rest in STEPS
        if name == "COPY"
        for word in shlex.split(rest)[:-1]
    ]
    assert {"pyproject.toml", "src"} <= set(copied)
    kept = {line.removeprefix("!") for line in IGNORED if line.startswith("!")}
    assert kept == {path.removeprefix("./") for path in copied}
    assert [path for path in copied if not (REPOSITORY / path).exists()] == []
    assert fnmatch.fnmatch("anything", IGNORED[1])  # all else stays out


def test_nothing_runs_as_root_and_the_entry_point_is_toque():
    names = [name for name, _ in STEPS]
    users = [rest for name, rest in STEPS if name == "USER"]
    assert users == ["toque"]
    assert "RUN" not in names[names.index("USER") :]
    assert dict(STEPS)["ENTRYPOINT"] == '["toque"]'


def test_the_volumes_are_folders_of_the_user():
    volumes = json.loads(dict(STEPS)["VOLUME"])
    made = next(rest for name, rest in STEPS if "mkdir" in rest)
    assert volumes == ["/workspace/models", "/workspace/stores", "/workspace/runs"]
    assert all(path in made for path in volumes)


def test_no_address_of_an_index_is_built_in():
    assert "://" not in DOCKERFILE


def program_of(word: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The program in the step that holds a word, run."""
    step = next(rest for _, rest in STEPS if word in rest)
    program = shlex.split(step.partition("python3 -c ")[2])[0]
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("device", "gpu"), [("cpu", []), ("cuda", ["nvidia-ml-py"])])
def test_requirements_are_those_of_pyproject_and_the_extras(
    device: str, gpu: list[str]
):
    done = program_of("requirements.txt", "data,s3", device)
    assert done.returncode == 0
    names = [line.partition(">")[0] for line in done.stdout.splitlines()]
    named = ("hatchling", "torch", "s3fs", "nvidia")
    assert [name for name in names if name.startswith(named)] == [*named[:3], *gpu]
    assert any("--constraint requirements.lock" in rest for _, rest in STEPS)
    assert not any("pytest" in name for name in names)


@pytest.mark.parametrize(("asked", "code"), [("cpu", 0), ("cuda", 1)])
def test_a_build_of_torch_for_another_device_ends_the_build(asked: str, code: int):
    import torch

    if torch.version.cuda:
        pytest.skip("torch of this machine is a build with CUDA")
    done = program_of("torch.version.cuda", asked)
    assert done.returncode == code
    assert ("a build for cpu, and DEVICE is cuda" in done.stderr) == bool(code)


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("toque train own/my.yaml", None),
        ("python3 /opt/toque/bin/toque serve runs/mine", 8000),
        ("docker-init -- toque serve runs/mine --port 9000 --host 0.0.0.0", 9000),
        ("toque serve runs/mine --port=9001", 9001),
    ],
)
def test_the_health_check_knows_where_to_ask(command: str, port: int | None):
    assert HEALTH["port_served"](command.split()) == port


class Answers(http.server.BaseHTTPRequestHandler):
    """A server that is well at /health and nowhere else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_does_not_answer_is_not_healthy(tmp_path: Path):
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        (tmp_path / "cmdline").write_bytes(
            f"toque\0serve\0runs/m\0--port\0{port}\0".encode()
        )
        HEALTH["main"](tmp_path)
        server.shutdown()
        thread.join()
    with pytest.raises(urllib.error.URLError):
        HEALTH["main"](tmp_path)
    (tmp_path / "cmdline").write_bytes(b"toque\0train\0my.yaml\0")
    HEALTH["main"](tmp_path)


def test_the_image_holds_constrained_writing():
    extras = next(
        rest for name, rest in STEPS if name == "ARG" and rest.startswith("EXTRAS=")
    )
    assert "structured" in extras.removeprefix("EXTRAS=").split(",")


def test_a_source_distribution_holds_what_its_makefile_reads():
    settings = tomllib.loads(
        (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    )
    included = settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    paths = {"requirements.lock", "bench", "tools", "tests"}
    assert all(path in makefile for path in paths)
    assert paths <= set(included)
