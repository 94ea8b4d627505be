"""Hub names without a network: an answer in words, at once."""

from __future__ import annotations

import pytest
from huggingface_hub import constants

from toque.errors import ConfigError
from toque.models.loading.hub import resolve_folder

NAME = "toque-tests/no-such-model"


def test_a_folder_is_itself(tmp_path):
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_offline_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"{NAME}.*HF_HUB_OFFLINE is set"):
        resolve_folder(NAME)


def test_an_unreachable_hub_is_said_and_not_retried(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9 cannot be reached.*Name a folder"):
        resolve_folder(NAME)


@pytest.mark.parametrize("path", ["/no/such/folder", "./models/absent", "a/b/c", "runs/x/model"])
def test_what_can_only_be_a_folder_never_asks_the_hub(path, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        resolve_folder(path, setting="model.tokenizer")
