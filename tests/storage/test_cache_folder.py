"""One root for all that may be made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.storage.cache_folder import cache_folder


@pytest.mark.parametrize("kind", ["sources", "measured", "runs"])
def test_each_kind_has_its_folder_in_the_one_root(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("TOQUE_CACHE", str(tmp_path / "cache"))
    assert cache_folder(kind) == tmp_path / "cache" / kind
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TOQUE_CACHE", "~/here")
    assert cache_folder(kind) == tmp_path / "here" / kind
    monkeypatch.delenv("TOQUE_CACHE")
    assert cache_folder(kind) == Path.home() / ".cache" / "toque" / kind
