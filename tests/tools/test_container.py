"""The container's files: what is copied exists, and health is that of what runs in it."""

from __future__ import annotations

import importlib.util
import re
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parent.parent.parent
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()


@pytest.fixture
def health() -> ModuleType:
    file = REPOSITORY / "tools" / "container_health.py"
    spec = importlib.util.spec_from_file_location("container_health", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = {
        line[1:] for line in (REPOSITORY / ".dockerignore").read_text().split() if line[0] == "!"
    }
    copied = {
        name for line in re.findall(r"(?m)^COPY (.+)$", DOCKERFILE) for name in line.split()[:-1]
    }
    assert copied == sent
    assert all((REPOSITORY / name).exists() for name in copied)


def test_the_extras_exist() -> None:
    named = re.search(r"(?m)^ARG EXTRAS=(.+)$", DOCKERFILE)
    assert named is not None
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(named[1].split(",")) <= set(project["optional-dependencies"])


def test_the_image_does_not_run_as_root() -> None:
    order = re.findall(r"(?m)^(RUN|USER|ENTRYPOINT)", DOCKERFILE)
    assert order[-2:] == ["USER", "ENTRYPOINT"]


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("python toque serve runs/mine", 8000),
        ("python toque serve runs/mine --port 9000", 9000),
        ("python toque serve runs/mine --port=9001", 9001),
        ("python toque train my.yaml", None),
    ],
)
def test_only_a_server_is_asked(command: str, port: int | None, health: ModuleType) -> None:
    assert health.port_of(command.split()) == port


class Well(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_server_is_healthy_while_it_answers(health: ModuleType) -> None:
    server = HTTPServer(("127.0.0.1", 0), Well)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert health.answers(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not health.answers(server.server_port)


def test_the_other_build_of_torch_ends_the_build(
    health: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found, other = ("cpu", "cuda") if torch.version.cuda is None else ("cuda", "cpu")
    assert health.main([found]) == 0
    assert health.main([other]) == 1
    assert f"DEVICE is {other}, and pip took torch" in capsys.readouterr().err
