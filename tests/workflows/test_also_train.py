"""Runs that train the embedding or the head next to an adapter."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import toque
from fixtures.kitchens import Notices, StopAt, adapter_config
from toque.errors import ConfigError
from toque.models.families import embedding
from toque.models.loading.model_export import sample_logits
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import WEIGHTS
from toque.storage.atomic import sha256_of
from toque.workflows.inference.open_served import open_models


@pytest.fixture(
    scope="module",
    params=[
        "gpt2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "t5")),
    ],
)
def settings(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    return adapter_config(
        tmp_path_factory.mktemp(request.param),
        request.param,
        adapter={"r": 4, "also_train": ["embeddings", "head"]},
        train={"keep_best": 0},
    )


@pytest.fixture(scope="module")
def first(settings: toque.RunConfig) -> Path:
    return toque.train(settings).folder


def test_a_stopped_run_gives_the_same_bits_and_is_merged(settings, first, tmp_path):
    stopped = toque.configure(settings, run_dir=str(tmp_path / "stopped"))
    toque.train(stopped, callbacks=[StopAt(2)])
    toque.train(stopped)
    assert sha256_of(tmp_path / "stopped/model" / WEIGHTS) == sha256_of(
        first / "model" / WEIGHTS
    )
    base = embedding(load_model(settings.model.start_from))
    tables = [
        tensor
        for name, tensor in load_file(first / "model" / WEIGHTS).items()
        if "lora" not in name
    ]
    assert len(tables) >= 2
    assert not any(torch.equal(table, base) for table in tables)
    assert toque.export(first, to=tmp_path / "merged").difference < 1e-5


def test_a_continued_adapter_trains_the_same_matrices(settings, first, tmp_path):
    adapter = {"start_from": str(first), "r": "auto", "also_train": []}
    config = toque.configure(
        settings, adapter=adapter, run_dir=str(tmp_path / "second")
    )
    heard = Notices()
    second = toque.train(config, reporter=heard)
    assert f"the optimizer continues from step 4 of {first}" in heard.notices
    saved = json.loads((second.folder / "model/adapter_config.json").read_text())
    expected = json.loads((first / "model/adapter_config.json").read_text())
    assert saved["modules_to_save"] == expected["modules_to_save"]
    assert saved["modules_to_save"]
    before = load_file(first / "model" / WEIGHTS)
    after = load_file(second.folder / "model" / WEIGHTS)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    toque.export(second.folder, to=tmp_path / "merged")


@pytest.mark.slow
def test_a_plan_counts_the_matrices(settings):
    model = load_model(settings.model.start_from)
    heads = {id(embedding(model)), id(model.get_parameter("lm_head.weight"))}
    plain = toque.configure(settings, adapter={"also_train": []})
    counts = [toque.plan(config).parameters.trainable for config in (settings, plain)]
    expected = len(heads) * embedding(model).numel()
    if model.config.is_encoder_decoder:  # otherwise it trains the row of the line break
        expected -= model.config.d_model
    assert counts[0] - counts[1] == expected


@pytest.mark.slow
def test_it_is_served_with_its_own_copy_of_the_base(settings, first):
    base = Path(settings.model.start_from)
    folders = {"base": base, "adapter": first, "again": first / "model"}
    models = [served.model for served in open_models(folders).values()]
    assert len({id(model) for model in models}) == 3
    expected = sample_logits(load_with_adapter(first / "model"))
    assert torch.equal(sample_logits(models[0]), sample_logits(load_model(str(base))))
    assert torch.equal(sample_logits(models[1]), expected)


def test_it_cannot_share_its_base(settings, first):
    with pytest.raises(
        ConfigError, match=r"also changes .*, so its base cannot be shared"
    ):
        toque.generate(
            settings.model.start_from,
            ["Rice"],
            adapters=[str(first), str(first / "model")],
        )
