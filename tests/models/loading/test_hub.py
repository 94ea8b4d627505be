"""Hub names without a network, and the upload of a finished folder: what fails, in words."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from fixtures.hub import Hub
from fixtures.hub import hub as hub_served
from toque.data.tokenizer.tokenizer_folder import resolve_tokenizer
from toque.errors import ConfigError, DataError
from toque.models.loading import hub
from toque.models.loading.hub import push, refuse_push, resolve_folder

NAME = "toque-tests/no-such-model"


@pytest.fixture
def online(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)


def test_offline_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{NAME}.*HF_HUB_OFFLINE is set"):
        resolve_folder(NAME)


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize("resolve", [resolve_folder, resolve_tokenizer])
def test_an_unreachable_or_silent_hub_is_said_and_not_retried(resolve, monkeypatch):
    monkeypatch.setattr(hub, "_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (9, silent.getsockname()[1]):  # nobody listens at the first
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            began = time.monotonic()
            words = rf"127\.0\.0\.1:{port} cannot be reached.*Use a folder"
            with pytest.raises((ConfigError, DataError), match=words):
                resolve(NAME)
            assert (
                time.monotonic() - began < 20
            )  # the library's own retries take longer


@pytest.mark.usefixtures("online")
def test_a_copy_in_the_cache_is_used_without_asking(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    revision = "0123456789" * 4
    repository = tmp_path / "models--toque-tests--no-such-model"
    (repository / "snapshots" / revision).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision / "tokenizer.json").write_text("{}")
    assert resolve_tokenizer(NAME) == repository / "snapshots" / revision
    with pytest.raises(
        ConfigError, match="cannot be reached"
    ):  # a model needs more than that
        resolve_folder(NAME)
    copy = repository / "snapshots" / revision
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (copy / name).touch()
    with pytest.raises(
        ConfigError, match="cannot be reached"
    ):  # a download that was broken off
        resolve_folder(NAME)
    (copy / "model-00002-of-00002.safetensors").touch()
    assert resolve_folder(NAME) == copy


@pytest.mark.usefixtures("online")
def test_weights_that_another_program_names_are_not_downloaded(monkeypatch, tmp_path):
    asked = []

    def downloaded(name, **how):
        files = ["config.json", "model.safetensors", "consolidated.safetensors"]
        asked.append(
            [*filter_repo_objects(files, **{k: how[k] for k in how if "patterns" in k})]
        )
        if how.get("local_files_only"):
            raise LocalEntryNotFoundError(name)
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    assert resolve_folder(NAME) == tmp_path
    assert asked == [["config.json", "model.safetensors"]] * 2


@pytest.mark.usefixtures("online")
@pytest.mark.parametrize(
    "path",
    ["/no/such/folder", "./models/absent", "a/b/c", "runs/x/model", "my--model", "runs/demo--v2",
     "a..b", "foo/..", "foo/bar-", "model.git", "x" * 97],
)  # fmt: skip
def test_what_can_only_be_a_folder_never_asks_the_hub(path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        resolve_folder(path, setting="model.tokenizer")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_served() as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "soup" / "toque").mkdir(parents=True)
    (tmp_path / "soup" / "README.md").write_text("# Soup\n")
    (tmp_path / "soup" / "toque" / "model.json").write_text("{}")
    return tmp_path / "soup"


def test_every_file_arrives_in_a_private_repository(server: Hub, folder: Path) -> None:
    refuse_push("me/soup")
    push(folder, "me/soup")
    assert server.repositories == {"me/soup": True}
    assert server.files == {"README.md": b"# Soup\n", "toque/model.json": b"{}"}
    assert server.tokens == {"Bearer hf_secret"}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_hub_that_refuses_or_is_away_is_a_paragraph_without_the_token(
    server: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    server.refuses = True
    if not is_there:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"is complete, but .* refused the upload to me/soup"
    ) as found:
        push(folder, "me/soup")
    assert "hf_secret" not in str(found.value)
    assert server.files == {}


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    "name", ["soup", "../soup", "a/b/c", "me/", "https://x/y", "me/a--b"]
)
def test_only_a_repository_is_pushed_to(name: str) -> None:
    with pytest.raises(ConfigError, match="must name a repository on the hub"):
        refuse_push(name)
