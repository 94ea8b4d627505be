"""Whole matrices next to an adapter: the embedding and the output head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from models.loading.test_beside_adapters import of_peft
from models.lora.test_layers import disturb, trained
from tiny import make
from toque.config.field_types import TableName
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError
from toque.models.families import embedding
from toque.models.loading.model_export import (
    export_adapter,
    export_model,
    sample_logits,
    save_model,
)
from toque.models.loading.pretrained import (
    AdaptedBase,
    check_folder,
    load_model,
    load_with_adapter,
    load_with_adapters,
)
from toque.models.lora.adapter_files import WEIGHTS, load_adapter, write_adapter
from toque.models.lora.frozen import PLAIN, FrozenFormat, base_sha256
from toque.models.lora.layers import attach

CPU = torch.device("cpu")
MODULES = {
    "t5": ["embed_tokens", "lm_head"],
    "t5-v1.1": ["embed_tokens", "lm_head"],
    "gpt2": ["lm_head", "wte"],
    "llama": ["embed_tokens", "lm_head"],
}
each_kind = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] * (kind.startswith("t5")))
        for kind in MODULES
    ],
)


@pytest.fixture
def base(kind: str, tmp_path: Path) -> Path:
    save_model(make(kind), None, tmp_path / "base", card="")
    return tmp_path / "base"


def begun(
    base: Path,
    *names: TableName,
    held: FrozenFormat = PLAIN,
    tokens: tuple[int, ...] = (),
) -> tuple[PreTrainedModel, str]:
    """A model at the beginning of a run, with random values in everything that is trained."""
    adapter = AdapterConfig(r=4, dropout=0.0, also_train=names)

    def add(model: PreTrainedModel) -> None:
        attach(model, adapter, base=str(base), seed=3, tokens=tokens)

    checked = AdaptedBase(check_folder(str(base)), add, read_whole=False)
    model, base_hash = checked.placed(held, CPU)
    disturb(model)
    return model.eval(), base_hash


def saved(base: Path, to: Path, *names: TableName, **options: Any) -> PreTrainedModel:
    """The same model. Its adapter is in the folder `to`."""
    model, base_hash = begun(base, *names, **options)
    to.mkdir()
    write_adapter(model, to, base_hash=base_hash)
    return model


@each_kind
# peft warns that merging separate copies of a shared matrix needs care.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_it_loads_here_and_in_peft_and_merges(kind, base, tmp_path):
    model = saved(base, tmp_path / "a", "embeddings", "head")
    expected = sample_logits(model)
    assert model.peft_config["default"].modules_to_save == MODULES[kind]

    loaded = load_with_adapter(tmp_path / "a", merge=False)
    assert torch.equal(sample_logits(loaded), expected)
    is_encoder_decoder = model.config.is_encoder_decoder
    auto = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    theirs = PeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "a")
    torch.testing.assert_close(sample_logits(theirs), expected, rtol=1e-5, atol=1e-5)

    assert export_model(tmp_path / "a", tmp_path / "merged", card="").difference < 1e-5
    merged = load_model(str(tmp_path / "merged"))
    torch.testing.assert_close(sample_logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(embedding(merged), embedding(model))
    export_adapter(tmp_path / "a", tmp_path / "copy", card="")


@each_kind
def test_the_trained_weights_are_the_adapter_and_the_matrices(kind, base):
    model, base_hash = begun(base, "embeddings")
    tables = {name: p for name, p in trained(model).items() if "lora" not in name}
    assert [id(p) for p in tables.values()] == [id(embedding(model))]
    is_tied = model.get_parameter("lm_head.weight") is embedding(model)
    assert is_tied == (kind in ("gpt2", "t5"))
    assert base_hash == base_sha256(load_model(str(base)))

    model, _ = begun(base, "head")
    tables = {name: p for name, p in trained(model).items() if "lora" not in name}
    head = model.get_parameter("lm_head.weight")
    assert [id(p) for p in tables.values()] == [id(head)]


@pytest.mark.parametrize("kind", ["llama"])
def test_new_tokens_train_their_rows_in_the_other_matrix(base, tmp_path):
    model = saved(base, tmp_path / "a", "embeddings", tokens=(59, 60))
    assert model.peft_config["default"].trainable_token_indices == {"lm_head": [59, 60]}
    loaded = load_with_adapter(tmp_path / "a", merge=False)
    assert torch.equal(sample_logits(loaded), sample_logits(model))
    both, _ = begun(base, "embeddings", "head", tokens=(59, 60))
    assert both.peft_config["default"].trainable_token_indices is None


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("quantised", [None, "int8"])
def test_it_is_loaded_on_a_base_in_fewer_bits(quantised, base, tmp_path):
    held = FrozenFormat(torch.bfloat16, quantised)
    model = saved(base, tmp_path / "a", "embeddings", held=held)
    assert embedding(model).dtype == torch.float32
    loaded = load_with_adapters({"a": tmp_path / "a"}, [held], CPU)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sample_logits(loaded), sample_logits(model))


@pytest.mark.parametrize("kind", ["llama"])
def test_a_shared_base_is_refused_by_name(base, tmp_path):
    saved(base, tmp_path / "a", "embeddings")
    saved(base, tmp_path / "b")
    both = {"a": tmp_path / "a", "b": tmp_path / "b"}
    message = r"adapter .*/a also changes embed_tokens, .* Use it alone, or merge it"
    with pytest.raises(ConfigError, match=message):
        load_with_adapters(both, [PLAIN], CPU)
    with pytest.raises(ConfigError, match=message):
        load_adapter(load_model(str(base)), tmp_path / "a")


@pytest.mark.parametrize(
    ("kind", "modules", "reason"),
    [
        ("gpt2", ["wte"], "Without lm_head.weight, which shares its matrix"),
        ("gpt2", ["wte", "lm_head"], "differ, but they are one matrix in the base"),
        ("llama", ["norm"], "Only the embedding and the output head"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_other_modules_of_peft_are_refused(kind, modules, reason, base, tmp_path):
    targets = ["c_attn"] if kind == "gpt2" else ["q_proj"]
    of_peft(base, tmp_path / "a", target_modules=targets, modules_to_save=modules)
    with pytest.raises(ConfigError, match=rf"{reason}.*Merge the adapter with peft"):
        load_with_adapter(tmp_path / "a")


@pytest.mark.parametrize("kind", ["llama"])
def test_an_untied_head_of_peft_is_read(base, tmp_path):
    model = of_peft(base, tmp_path / "a", modules_to_save=["model.embed_tokens"])
    loaded = load_with_adapter(tmp_path / "a")
    torch.testing.assert_close(sample_logits(loaded), sample_logits(model))
    names = load_file(tmp_path / "a" / WEIGHTS)
    assert "base_model.model.model.embed_tokens.weight" in names
