"""Which reader a configured source gets, by what its first file holds."""

import json

import numpy as np
import pytest

import toque
from toque.cooking.schemas.reader import RecipeReader
from toque.sources.documents import DocumentReader, TextReader
from toque.sources.token_arrays import TokenReader
from toque.workflows.prepared_store import open_sources, prepare_settings

RECIPE = {
    "title": "Rice",
    "ingredients": ["rice"],
    "directions": ["Boil the rice until soft."],
}


def source_for(**source):
    model = {"family": "gpt2", "tokenizer": "some/folder"}
    (found,) = open_sources(toque.configure(model=model, data={"sources": [source]}))
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
        found = source_for(path=str(path))
        assert found.reader == reader
        assert found.files is not None
        assert [file.path for file in found.files] == [path]
    assert source_for(path=str(texts), format="text").reader == TextReader()
    body = source_for(path=str(texts), columns={"text": "text"}, format="text")
    assert body.reader == DocumentReader("text")
    assert source_for(path=str(prose), format="tokens").reader == TokenReader()


def test_a_saved_dataset_is_known_by_its_content(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([RECIPE]).save_to_disk(tmp_path / "folder")
    found = source_for(path=str(tmp_path / "folder"))
    assert found.files is not None
    assert [file.path.suffix for file in found.files] == [".arrow"]
    as_text = source_for(path=str(tmp_path / "folder"), format="text")
    assert as_text.reader == DocumentReader("text")


def test_examples_for_longrope_are_as_long_as_its_short_factors_reach(tmp_path):
    for config in (
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 4096},
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "original_max_position_embeddings": 4096,
            }
        },
        {
            "max_position_embeddings": 4096,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
    ):
        named = {"model_type": "phi3", "max_position_embeddings": 131_072} | config
        (tmp_path / "config.json").write_text(json.dumps(named))
        model = {
            "family": "auto",
            "start_from": str(tmp_path),
            "tokenizer": "some/folder",
        }
        data = {"sources": [{"path": "a.jsonl"}]}
        settings = prepare_settings(toque.configure(model=model, data=data))
        assert settings.room == 4097
