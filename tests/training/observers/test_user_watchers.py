from __future__ import annotations

from pathlib import Path

import pytest

from toque.config import load_config
from toque.errors import ConfigError
from toque.training.observers.watchers import Watchers


def watchers(*overrides, own=()):
    config = load_config("demo", overrides).config
    settings = config.model_dump(mode="json")
    return Watchers.from_settings(
        config.observe, {}, own, run=Path("run"), settings=settings, scores=frozenset()
    )


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "class Good:\n    def on_step_end(self, state): ...\n"
        "class Misnamed:\n    def on_batch_end(self, state): ...\n"
        "class Silent: ...\n"
        "class Needy(Good):\n    def __init__(self, path): ...\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_classes_are_made_from_their_names():
    ((name, made),) = watchers("observe.callbacks=[mine:Good]").own
    assert (name, type(made).__name__) == ("mine:Good", "Good")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mine:Gone", "cannot be imported"),
        ("nowhere_at_all:Good", "cannot be imported"),
        ("mine:Misnamed", "Nearest: on_step_end"),
        ("mine:Silent", "none of the methods"),
        ("mine:Needy", "without arguments"),
        ("mine:number", "no class"),
        ("no colon", "module:Class"),
    ],
)
def test_what_cannot_watch_is_refused_before_the_run(path, said):
    with pytest.raises(ConfigError, match=said):
        watchers(f"observe.callbacks=['{path}']")


def test_the_address_comes_from_the_environment_or_the_setting(monkeypatch):
    monkeypatch.setenv("MY_HOOK", "https://example.org/token")
    assert watchers("observe.webhook=env:MY_HOOK").webhook == "https://example.org/token"
    assert watchers("observe.webhook=https://example.org/t").webhook == "https://example.org/t"
    monkeypatch.setenv("MY_HOOK", "token")
    with pytest.raises(ConfigError, match="MY_HOOK is no http") as refused:
        watchers("observe.webhook=env:MY_HOOK")
    assert "token" not in str(refused.value)
    monkeypatch.delenv("MY_HOOK")
    with pytest.raises(ConfigError, match="MY_HOOK is not set"):
        watchers("observe.webhook=env:MY_HOOK")
