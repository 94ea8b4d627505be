"""Push: a finished folder's copy on a hub, made private, or a paragraph that says why not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from fixtures.hub import Hub, hub
from toque.errors import ConfigError
from toque.models.loading.hub import push, refuse_push


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub() as server:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "soup" / "toque").mkdir(parents=True)
    (tmp_path / "soup" / "README.md").write_text("# Soup\n")
    (tmp_path / "soup" / "toque" / "model.json").write_text("{}")
    return tmp_path / "soup"


def test_every_file_arrives_in_a_private_repository(online: Hub, folder: Path) -> None:
    refuse_push("me/soup")
    push(folder, "me/soup")
    assert online.repositories == {"me/soup": True}
    assert online.files == {"README.md": b"# Soup\n", "toque/model.json": b"{}"}
    assert online.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_hub_that_refuses_or_is_away_is_a_paragraph_without_the_token(
    online: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    online.refuses = True
    if not is_there:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"is written and whole, and .* did not take it as me/soup"
    ) as found:
        push(folder, "me/soup")
    assert "hf_secret" not in str(found.value)
    assert online.files == {}


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("name", ["soup", "../soup", "a/b/c", "me/", "https://x/y"])
def test_only_a_repository_is_pushed_to(name: str) -> None:
    with pytest.raises(ConfigError, match="names no repository"):
        refuse_push(name)
