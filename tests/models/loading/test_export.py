"""An exported folder loads in transformers and here, with equal logits, and says the truth."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from toque.errors import CheckpointError
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import load_model
from toque.models.loading.provenance import Provenance


def logits(model):
    tokens = torch.tensor([[5, 9, 13, 21]])
    extra = {"decoder_input_ids": torch.tensor([[0, 7, 8]])} if is_t5(model) else {}
    with torch.no_grad():
        return model(input_ids=tokens, **extra).logits


def is_t5(model):
    return model.config.is_encoder_decoder


@pytest.fixture
def codec_folder(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "codec.json").write_text("{}")  # not a tokenizer file of Hugging Face's
    return folder


def test_every_kind_reloads_with_equal_logits(kind, tiny, codec_folder, tmp_path):
    model = tiny(kind)
    before = model.config.to_dict()
    save_model(model, codec_folder, tmp_path / "model", card="# A card\n")
    assert model.config.to_dict() == before
    auto = AutoModelForSeq2SeqLM if is_t5(model) else AutoModelForCausalLM
    stock = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    # GPT-2's and T5 v1.1's activation is fused here and not there: rounding, no more.
    torch.testing.assert_close(logits(stock), logits(model), rtol=2e-6, atol=2e-6)
    assert torch.equal(logits(load_model(str(tmp_path / "model"))), logits(model))
    names = "README.md config.json generation_config.json model.safetensors"
    names += " tokenizer.json tokenizer_config.json"
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == names.split()
    assert (tmp_path / "model" / "README.md").read_text() == "# A card\n"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert config["tie_word_embeddings"] == ("lm_head.weight" not in tensors)
    assert config["architectures"] == [type(model).__name__]
    assert (config["pad_token_id"], config["eos_token_id"]) == (0, 1)


@pytest.mark.parametrize(
    "idle",
    [{"temperature": 0.9, "top_p": 0.6}, {"length_penalty": 0.8}, {"pad_token_id": -1}],
    ids=lambda idle: next(iter(idle)),
)
@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_settings_of_generation_that_do_nothing_are_kept(idle, file, tiny, tmp_path):
    """transformers saves them unchanged alone; a record changes the length and the end."""
    save_model(tiny("gpt2"), None, tmp_path / "base", card="")
    if file == "config.json":
        (tmp_path / "base" / "generation_config.json").unlink()
    path = tmp_path / "base" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | idle))
    record = Provenance(form="documents", max_new_tokens=30)
    model = load_model(str(tmp_path / "base"))
    save_model(model, None, tmp_path / "model", card="", record=record, end_ids=(2,))
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert (
        written.items()
        >= {**idle, "max_new_tokens": 30, "eos_token_id": [2, 1]}.items()
    )
    load_model(str(tmp_path / "model"))


def test_a_bases_own_way_of_writing_is_not_that_of_what_is_trained_from_it(
    tiny, tmp_path
):
    """Several published chat models draw samples, and make repetitions less likely."""
    model, prompt = tiny("gpt2"), torch.tensor([[5, 9, 13]])
    expected = model.generate(prompt, max_new_tokens=20)
    odd = {
        "do_sample": True,
        "temperature": 0.7,
        "repetition_penalty": 3.0,
        "num_beams": 2,
    }
    odd |= {"no_repeat_ngram_size": 2, "suppress_tokens": expected[0, -5:].tolist()}
    model.generation_config.update(**odd)
    save_model(model, None, tmp_path / "base", card="")
    base = load_model(str(tmp_path / "base"))
    assert not torch.equal(
        base.generate(prompt, max_new_tokens=20, do_sample=False), expected
    )
    record = Provenance(form="documents", max_new_tokens=20)
    save_model(base, None, tmp_path / "model", card="", record=record)
    for asked in ({}, {"do_sample": False}):
        assert torch.equal(
            load_model(str(tmp_path / "model")).generate(prompt, **asked), expected
        )


def test_unscaled_outputs_are_written_as_untied_even_when_shared(
    tiny, codec_folder, tmp_path
):
    """What transformers 5 makes of a v1.1 from scratch: one table, outputs not scaled."""
    model = tiny("t5")
    model.config.scale_decoder_outputs = False
    save_model(model, codec_folder, tmp_path / "model", card="")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model").eval()
    assert torch.equal(logits(again), logits(model))
    assert torch.equal(logits(load_model(str(tmp_path / "model"))), logits(model))


def test_an_older_model_is_replaced_and_the_users_files_stay(
    tiny, codec_folder, tmp_path
):
    save_model(tiny("gpt2"), codec_folder, tmp_path / "model", card="old")
    (tmp_path / "model" / "chat_template.jinja").write_text("of the old one")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    save_model(tiny("t5"), codec_folder, tmp_path / "model", card="new")
    assert (tmp_path / "model" / "README.md").read_text() == "new"
    assert not (tmp_path / "model" / "chat_template.jinja").exists()
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert load_model(str(tmp_path / "model")).config.model_type == "t5"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "tokenizer"]
    readme = tmp_path / "photos" / "README.md"
    readme.parent.mkdir()
    readme.write_text("x")
    with pytest.raises(CheckpointError, match="does not contain a model"):
        save_model(tiny("gpt2"), codec_folder, readme.parent, card="")
    assert readme.read_text() == "x"


def test_a_failed_write_leaves_what_was_there(
    tiny, codec_folder, tmp_path, monkeypatch
):
    save_model(tiny("gpt2"), codec_folder, tmp_path / "model", card="old")
    fsync = os.fsync

    def full(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "model.safetensors":
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_model(tiny("t5"), codec_folder, tmp_path / "model", card="new")
    assert load_model(str(tmp_path / "model")).config.model_type == "gpt2"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "tokenizer"]
