"""Which reader a configured source gets, by what its first file holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from toque.config import load_config
from toque.cooking.schemas.reader import RecipeReader
from toque.errors import ConfigError, DataError
from toque.sources.documents import DocumentReader, TextReader
from toque.sources.token_arrays import TokenReader
from toque.workflows.prepared_store import sources_of

RECIPE = {"title": "Rice", "ingredients": ["rice"], "directions": ["Boil the rice until soft."]}


def source_for(tmp_path, tokenizer="some/folder", **source):
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "run_dir": "run",
                "model": {"family": "gpt2", "tokenizer": tokenizer},
                "data": {"sources": [source], "store": "store"},
            }
        )
    )
    (found,) = sources_of(load_config(str(path), []).config)
    return found


def test_readers_are_chosen_by_content(tmp_path):
    recipes = tmp_path / "a.txt"
    recipes.write_text(json.dumps(RECIPE))
    prose = tmp_path / "b.jsonl"
    prose.write_text("Once there was a cook.\nShe stirred.\n")
    texts = tmp_path / "c.csv"
    texts.write_text('{"text": "Stir.", "id": 1}\n')
    tokens = tmp_path / "d.json"
    with tokens.open("wb") as file:
        np.save(file, np.arange(9))
    for path, reader in (
        (recipes, RecipeReader()),
        (prose, TextReader()),
        (texts, DocumentReader("text")),
        (tokens, TokenReader()),
    ):
        found = source_for(tmp_path, path=str(path))
        assert found.reader == reader
        assert found.files is not None
        assert [file.path for file in found.files] == [path]
    assert source_for(tmp_path, path=str(texts), format="text").reader == TextReader()
    body = source_for(tmp_path, path=str(texts), columns={"text": "text"}, format="text")
    assert body.reader == DocumentReader("text")
    assert source_for(tmp_path, path=str(prose), format="tokens").reader == TokenReader()


def test_no_tokenizer_is_learnt_from_ids(tmp_path):
    np.save(tmp_path / "d.npy", np.arange(9))
    with pytest.raises(ConfigError, match="no tokenizer can be learnt from ids"):
        source_for(tmp_path, tokenizer="trained:512", path=str(tmp_path / "d.npy"))


def test_a_saved_dataset_is_known_by_its_content(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([RECIPE]).save_to_disk(tmp_path / "folder")
    found = source_for(tmp_path, path=str(tmp_path / "folder"))
    assert found.files is not None
    assert [file.path.suffix for file in found.files] == [".arrow"]
    as_text = source_for(tmp_path, path=str(tmp_path / "folder"), format="text")
    assert as_text.reader == DocumentReader("text")


def test_an_address_of_another_kind_is_refused(tmp_path):
    with pytest.raises(DataError, match="is at a kind of address that is not read"):
        source_for(tmp_path, path="https://example.org/a.json")
