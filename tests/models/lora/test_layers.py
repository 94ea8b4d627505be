"""LoRA and its relatives: sizes, gradients, packing, saving, loading elsewhere, merging."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.pytorch_utils import Conv1D

from tiny import KINDS
from toque.config.schema_methods import AdapterConfig
from toque.errors import CheckpointError, ConfigError
from toque.models.flops import parameter_counts
from toque.models.forward.loss import loss_sum
from toque.models.forward.packed import output_head
from toque.models.loading.model_export import (
    export_model,
    sample_logits,
    save_adapter,
    save_model,
)
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import (
    WEIGHTS,
    load_adapter,
    merge_adapter,
    use_adapter,
)
from toque.models.lora.frozen import base_sha256, hold_frozen
from toque.models.lora.layers import attach, refuse_unreached

NEW = (59, 60)
"""Tokens whose rows are trained besides."""
each_family = pytest.mark.parametrize("kind", KINDS)


def trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_parameters(model: PreTrainedModel, kind: str, r: int) -> int:
    """r (in + out) for each adapted layer, DoRA's `out` more; a row of each table for each token.

    FLAN-T5-large, r = 16 on q and v: 16 * 2048 * 144 = 4.72 million.
    """
    total = 0
    for module in model.modules():
        if hasattr(module, "lora_A"):
            weight = module.get_base_layer().weight
            n_out = weight.shape[
                1 if isinstance(module.get_base_layer(), Conv1D) else 0
            ]
            total += r * sum(weight.shape) + (n_out if kind == "dora" else 0)
    rows = sum(
        map(len, (model.peft_config["default"].trainable_token_indices or {}).values())
    )
    return total + rows * model.config.hidden_size


def disturb(model: PreTrainedModel, seed: int = 1) -> None:
    """Give B, which starts at zero, and everything else that is trained, some content."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.1 * drawn.to(parameter.device))


def adapted(tiny, name, *, tokens=NEW, targets="auto") -> PreTrainedModel:
    model = tiny(name)
    adapter = AdapterConfig(r=4, dropout=0.0, target_modules=targets)
    attach(model, adapter, base="nowhere", seed=3, tokens=tokens)
    return model


@pytest.fixture
def base_folder(tiny, kind, tmp_path):
    (tmp_path / "tokenizer").mkdir()
    save_model(tiny(kind), tmp_path / "tokenizer", tmp_path / "base", card="")
    return tmp_path / "base"


def saved(
    tiny, kind, base_folder, to: Path, *, seed=1, variant="lora", r=4, tokens=NEW
) -> PreTrainedModel:
    """A trained adapter of a new model of `kind`, written to the folder `to`."""
    model = tiny(kind)
    digest = base_sha256(model)
    adapter = AdapterConfig(kind=variant, r=r, dropout=0.0)
    attach(model, adapter, base=str(base_folder), seed=3, tokens=tokens)
    assert base_sha256(model) == digest  # attaching changes no weight of the model
    disturb(model, seed)
    save_adapter(model, to, card="", base_hash=digest)
    return model.eval()


@pytest.mark.parametrize(
    ("width", "inner", "heads", "r"), [(1024, 2816, 16, 16), (2048, 5120, 32, 8)]
)
def test_the_sizes_of_flan_t5_large_and_xl(width, inner, heads, r):
    """A model of 3B gets a smaller rank."""
    with torch.device("meta"):
        config = T5Config(
            d_model=width, d_kv=64, d_ff=inner, num_layers=24, num_heads=heads, vocab_size=32128,
            feed_forward_proj="gated-gelu"
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
        attach(model, AdapterConfig(), base="nowhere", seed=1)
    assert (
        model.peft_config["default"].r,
        model.peft_config["default"].lora_alpha,
    ) == (r, 2 * r)
    assert parameter_counts(model).trainable / 1e6 == pytest.approx(4.72, abs=0.005)


@each_family
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_training_starts_from_the_model_with_as_many_weights_as_the_paper_says(
    kind, tiny, variant
):
    model = tiny(kind)
    before = sample_logits(model)
    adapter = AdapterConfig(kind=variant, r=3, dropout=0.0, target_modules="all")
    attach(model, adapter, base="nowhere", seed=3, tokens=NEW)
    predicted = adapter_parameters(model, variant, 3)
    assert sum(p.numel() for p in trained(model).values()) == predicted
    assert parameter_counts(model).trainable == predicted
    torch.testing.assert_close(sample_logits(model), before, rtol=1e-5, atol=1e-5)


@each_family
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_packed_and_alone_an_adapter_gets_one_gradient(
    kind, tiny, packed, some_examples, targets
):
    model, rows = adapted(tiny, kind, targets=targets), some_examples(9)
    rows[0][0][0], rows[1][0][0] = NEW
    disturb(model)
    losses, gradients = [], []
    together = [packed(kind, [rows[:4], rows[4:7], rows[7:]])]
    for batches in (together, [packed(kind, [[row]]) for row in rows]):
        total = torch.zeros(())
        for batch in batches:
            total = total + loss_sum(model, batch)
        total.backward()
        losses.append(float(total.detach()))
        gradients.append({n: p.grad.clone() for n, p in trained(model).items()})
        model.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    largest = max(float(g.abs().max()) for g in gradients[0].values())
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(
            gradient, gradients[1][name], rtol=1e-4, atol=1e-4 * largest
        )
        assert float(gradient.abs().max()) > 0, name


def test_an_adapter_that_nothing_reaches_is_named(tiny, packed, some_examples):
    model = adapted(tiny, "gpt2", tokens=())
    loss_sum(model, packed("gpt2", [some_examples(3)])).backward()
    refuse_unreached(model)
    dead = model.get_parameter("transformer.h.1.attn.c_attn.lora_B.default.weight")
    dead.grad = torch.zeros_like(dead)
    with pytest.raises(ConfigError, match=r"transformer\.h\.1\.attn\.c_attn\.lora_B"):
        refuse_unreached(model)


def test_unknown_targets_are_refused_with_those_there_are(tiny):
    with pytest.raises(ConfigError) as error:
        attach(
            tiny("gpt2"),
            AdapterConfig(target_modules=("q_proj",)),
            base="nowhere",
            seed=3,
        )
    assert "q_proj" in str(error.value)
    assert "c_attn, c_fc, c_proj" in str(error.value)


@each_family
def test_frozen_matrices_in_bf16_give_the_bits_autocast_gives(
    kind, tiny, packed, some_examples
):
    batch, losses = packed(kind, [some_examples(3), some_examples(2, 1)]), []
    for held in (False, True):
        model = adapted(tiny, kind)
        disturb(model)
        if held:
            hold_frozen(model, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            losses.append(loss_sum(model, batch))
        losses[-1].backward()
    halves = [n for n, p in model.named_parameters() if p.dtype == torch.bfloat16]
    assert halves
    assert not any("lora_" in n or "norm" in n or "lm_head" in n for n in halves)
    assert torch.equal(losses[0], losses[1])


@each_family
# peft reads a name of transformers' that is going out.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_an_adapter_loads_here_and_in_peft_and_merges(
    kind, tiny, base_folder, tmp_path, variant
):
    folder = tmp_path / "adapter"
    model = saved(tiny, kind, base_folder, folder, variant=variant)
    expected = sample_logits(model)
    ours = load_with_adapter(folder, merge=False)
    assert torch.equal(sample_logits(ours), expected)
    plain = merge_adapter(ours)
    assert not any(
        "lora" in n or "token_adapter" in n for n, _ in plain.named_modules()
    )
    torch.testing.assert_close(sample_logits(plain), expected, rtol=1e-4, atol=1e-4)
    auto = (
        AutoModelForSeq2SeqLM
        if model.config.is_encoder_decoder
        else AutoModelForCausalLM
    )
    theirs = PeftModel.from_pretrained(auto.from_pretrained(base_folder), folder)
    torch.testing.assert_close(sample_logits(theirs), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_adapters_are_swapped_beside_one_base(kind, tiny, base_folder, tmp_path):
    first = saved(tiny, kind, base_folder, tmp_path / "first", seed=1)
    second = saved(tiny, kind, base_folder, tmp_path / "second", seed=2, r=2, tokens=())
    model = load_model(str(base_folder))
    bare = sample_logits(model)
    load_adapter(model, tmp_path / "first", name="a")
    load_adapter(model, tmp_path / "second", name="b")
    assert torch.equal(sample_logits(model), sample_logits(second))
    use_adapter(model, "a")
    assert torch.equal(sample_logits(model), sample_logits(first))
    use_adapter(model, None)
    assert torch.equal(sample_logits(model), bare)
    assert torch.equal(
        output_head(model)[0], output_head(load_model(str(base_folder)))[0]
    )
    use_adapter(model, "b")  # which trains no token, unlike the other
    assert torch.equal(output_head(model)[0], output_head(second)[0])
    with pytest.raises(ConfigError, match="Loaded adapters: a, b"):
        use_adapter(model, "c")


@pytest.mark.parametrize("kind", ["gpt2"])
def test_another_base_another_type_and_a_damaged_folder_are_refused(
    kind, tiny, base_folder, tmp_path
):
    saved(tiny, kind, base_folder, tmp_path / "adapter")
    other = load_file(base_folder / "model.safetensors")
    name = min(other)
    other[name] = other[name] + 1.0
    save_file(other, base_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match="trained on other weights than this base"
    ):
        load_with_adapter(tmp_path / "adapter")
    weights = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    (tmp_path / "adapter" / WEIGHTS).write_bytes(weights[:-40])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_with_adapter(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3"}))
    with pytest.raises(ConfigError, match="type IA3"):
        load_with_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["t5", "llama"])
def test_an_export_is_merged_read_back_and_compared(kind, tiny, base_folder, tmp_path):
    model = saved(tiny, kind, base_folder, tmp_path / "adapter")
    done = export_model(tmp_path / "adapter", tmp_path / "merged", card="# Merged\n")
    assert done.was_adapter
    assert done.difference < 1e-5
    whole = load_model(str(tmp_path / "merged"))
    torch.testing.assert_close(
        sample_logits(whole), sample_logits(model), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(CheckpointError, match="not empty"):
        export_model(tmp_path / "adapter", tmp_path / "merged", card="")


@pytest.mark.parametrize("kind", ["gpt2"])
def test_an_export_that_computes_something_else_is_refused_and_removed(
    kind, tiny, base_folder, tmp_path, monkeypatch
):
    saved(tiny, kind, base_folder, tmp_path / "adapter")

    def rounding(model, codec_folder, folder, **more):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        save_model(model, codec_folder, folder, **more)

    monkeypatch.setattr("toque.models.loading.model_export.save_model", rounding)
    with pytest.raises(CheckpointError, match="different logits"):
        export_model(tmp_path / "adapter", tmp_path / "merged", card="")
    assert not (tmp_path / "merged").exists()
