"""A studio of an empty folder, with a client that has its token."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from toque.serving.gate import Limits
from toque.studio.application import build_studio
from toque.studio.workplace import Workplace

TOKEN = secrets.token_hex()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "kitchen"
    place.mkdir()
    (place / ".studio").mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def client(folder: Path) -> Iterator[TestClient]:
    app = build_studio(Workplace(folder), token=TOKEN, hosts=None, limits=Limits())
    with TestClient(app, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client
