"""Pretrained models: the stock loss, the whole weights, and refusals in words."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import T5ForConditionalGeneration

from toque.errors import CheckpointError, ConfigError
from toque.models.forward.loss import loss_sum
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import (
    check_folder,
    grow_vocabulary,
    load_model,
    matrix_of,
)


@pytest.fixture
def folder(tmp_path, family_kind, tiny):
    """A model that transformers itself saved; the T5 v1.1 as FLAN-T5's folder is."""
    path = tmp_path / "model"
    model = tiny(family_kind)
    model.save_pretrained(path)
    if family_kind == "t5-v1.1":
        save_model(model, tmp_path, path, card="")
    return path


def same_weights(a, b):
    mine, theirs = a.state_dict(), b.state_dict()
    return mine.keys() == theirs.keys() and all(
        torch.equal(mine[n], theirs[n]) for n in mine
    )


def test_a_folder_loads_bit_for_bit(folder, family_kind, tiny):
    model = load_model(str(folder))
    assert same_weights(model, tiny(family_kind))
    assert not model.training
    model.bfloat16().save_pretrained(folder)
    assert {p.dtype for p in load_model(str(folder)).parameters()} == {torch.float32}


@pytest.mark.parametrize("equal", [False, True])
def test_a_flan_t5_keeps_its_head_and_the_stock_loss(
    tmp_path, tiny, some_examples, packed, equal
):
    """As Google's folder is: tied false, both tables in the file, were they equal at first."""
    model = tiny("t5-v1.1")
    if equal:
        model.lm_head.weight.data.copy_(model.shared.weight)
    save_model(model, tmp_path, tmp_path / "flan", card="")
    config = json.loads((tmp_path / "flan" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    ours = load_model(str(tmp_path / "flan"))
    stock = T5ForConditionalGeneration.from_pretrained(tmp_path / "flan").eval()
    for prompt, target in some_examples(4):
        theirs = stock(
            input_ids=torch.tensor([prompt]), labels=torch.tensor([target])
        ).loss
        mine = loss_sum(ours, packed("t5", [[(prompt, target)]])) / len(target)
        torch.testing.assert_close(mine, theirs)
    assert ours.lm_head.weight is not ours.shared.weight
    assert torch.equal(ours.lm_head.weight, ours.shared.weight) == equal
    assert not ours.config.scale_decoder_outputs


def test_the_vocabulary_grows_and_never_shrinks(folder, family_kind, tiny):
    before = tiny(family_kind)
    model = load_model(str(folder))
    grow_vocabulary(model, 50)
    assert model.config.vocab_size == 61
    grow_vocabulary(model, 70)
    assert model.config.vocab_size == 70
    for table, old in (
        (model.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (model.get_output_embeddings().weight, before.get_output_embeddings().weight),
    ):
        assert table.shape[0] == 70
        assert torch.equal(table[:61], old)
        torch.testing.assert_close(table[61:], old.mean(0).expand(9, -1))
    shared = (
        before.get_output_embeddings().weight is before.get_input_embeddings().weight
    )
    now = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert now == shared


def without(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def configured(folder, **other):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | other))


LOST = "transformer.h.1.ln_1.weight"


@pytest.mark.parametrize(
    ("breaking", "error", "words"),
    [
        (
            lambda f: cut(f / "model.safetensors"),
            CheckpointError,
            "damaged or truncated",
        ),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64),
            CheckpointError,
            "declares a header of .* bytes",
        ),
        (
            lambda f: without(f, LOST),
            CheckpointError,
            r"lacks 1 weights.*h\.1\.ln_1\.weight",
        ),
        (
            lambda f: configured(f, n_embd=64),
            CheckpointError,
            "but the folder has 29,472",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
            CheckpointError,
            r"only as pickles \(pytorch_model\.bin\)",
        ),
        (
            lambda f: (f / "model.safetensors").unlink(),
            CheckpointError,
            r"no model\.safetensors",
        ),
        (
            lambda f: (f / "config.json").write_text("{"),
            CheckpointError,
            "cannot be read as JSON",
        ),
        (
            lambda f: (f / "config.json").write_text("[]"),
            CheckpointError,
            "must contain a JSON object, not a list",
        ),
        (lambda f: configured(f, model_type="vit"), ConfigError, 'model_type "vit"'),
    ],
)
def test_damage_is_named(breaking, error, words, tmp_path, tiny):
    tiny("gpt2").save_pretrained(tmp_path / "model")
    breaking(tmp_path / "model")
    with pytest.raises(error, match=words):
        load_model(str(tmp_path / "model"))


def test_the_wrong_family_and_a_missing_shard_are_named(tmp_path, tiny):
    tiny("gpt2").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(shards) > 1
    assert same_weights(load_model(str(tmp_path / "model")), tiny("gpt2"))
    with pytest.raises(ConfigError, match=r"model\.family is t5.*\"gpt2\""):
        load_model(str(tmp_path / "model"), family="t5")
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        load_model(str(tmp_path / "model"))


def test_a_whole_file_beside_an_index_is_the_model_for_every_reader(tmp_path, tiny):
    """transformers reads it, and so must what reads a base matrix by matrix."""
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    other = {
        name: 2 * tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    shard = "model-00001-of-00001.safetensors"
    save_file(other, tmp_path / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(other, shard)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = check_folder(str(tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(matrix_of(found, model, name), model.get_parameter(name))
    assert same_weights(load_model(str(tmp_path)), model)


def test_what_is_not_a_model_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="contains an adapter"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="which is a file"):
        load_model(str(tmp_path / "adapter_config.json"))
