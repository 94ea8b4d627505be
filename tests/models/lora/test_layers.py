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
from toque.errors import CheckpointError, ConfigError
from toque.models.flops import flops_per_token, parameter_counts
from toque.models.forward.loss import loss_sum
from toque.models.forward.packed import output_head
from toque.models.loading.model_export import export_model, sample_logits, save_adapter, save_model
from toque.models.loading.pretrained import load_model, load_with_adapter
from toque.models.lora.adapter_files import (
    WEIGHTS,
    adapter_tensors,
    load_adapter,
    merged,
    use_adapter,
)
from toque.models.lora.frozen import base_sha256, hold_frozen
from toque.models.lora.layers import AdapterShape, attach, is_linear, refuse_unreached, resolve
from written import generate

NEW = (59, 60)
"""Tokens whose rows are trained besides."""
each_family = pytest.mark.parametrize("kind", KINDS)


def trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def adapter_parameters(model: PreTrainedModel, shape: AdapterShape) -> int:
    """r (in + out) for each adapted layer, DoRA's `out` more; a row of each table for each token.

    FLAN-T5-large, r = 16 on q and v: 16 * 2048 * 144 = 4.72 million.
    """
    total = 0
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in shape.targets and is_linear(module):
            sides = module.weight.shape
            n_out = sides[1 if isinstance(module, Conv1D) else 0]
            total += shape.r * sum(sides) + (n_out if shape.kind == "dora" else 0)
    table, head = model.get_input_embeddings().weight, model.get_submodule("lm_head").weight
    return total + table.shape[1] * len(shape.tokens) * (1 if head is table else 2)


def disturb(model: PreTrainedModel, seed: int = 1) -> None:
    """Give B, which starts at zero, and everything else that is trained, some content."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trained(model).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def adapted(tiny, name, *, tokens=NEW, targets="auto") -> PreTrainedModel:
    model = tiny(name)
    shape = resolve(model, kind="lora", r=4, target_modules=targets, tokens=tokens)
    attach(model, shape, base="nowhere", seed=3)
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
    attach(model, resolve(model, kind=variant, r=r, tokens=tokens), base=str(base_folder), seed=3)
    assert base_sha256(model) == digest  # attaching changes no weight of the model
    disturb(model, seed)
    save_adapter(model, base_folder, to, card="", base_hash=digest)
    return model.eval()


@pytest.mark.parametrize(("r", "million", "share"), [(16, 4.72, 0.0060), (8, 2.36, 0.0030)])
def test_the_sizes_of_flan_t5_large(r, million, share):
    with torch.device("meta"):
        config = T5Config(
            d_model=1024, d_kv=64, d_ff=2816, num_layers=24, num_heads=16, vocab_size=32128,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
    shape = resolve(model, kind="lora", r=r)
    count = adapter_parameters(model, shape)
    assert count / 1e6 == pytest.approx(million, abs=0.005)
    whole = sum(p.numel() for p in model.parameters()) + 32128 * 1024  # FLAN's own head
    assert count / whole == pytest.approx(share, abs=0.00005)


def test_a_model_of_3b_gets_a_smaller_rank():
    with torch.device("meta"):
        config = T5Config(
            d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32, vocab_size=32128,
            feed_forward_proj="gated-gelu",
        )  # fmt: skip
        model = T5ForConditionalGeneration(config)
    shape = resolve(model, kind="lora")
    assert (shape.r, shape.alpha) == (8, 16)
    assert adapter_parameters(model, shape) / 1e6 == pytest.approx(4.72, abs=0.005)


@each_family
@pytest.mark.parametrize("variant", ["lora", "dora", "rslora"])
def test_predicted_and_real_size_agree_and_training_starts_from_the_model(kind, tiny, variant):
    plain = tiny(kind)
    shape = resolve(plain, kind=variant, r=3, target_modules="all", tokens=NEW)
    before, predicted = sample_logits(plain), adapter_parameters(plain, shape)
    attach(plain, shape, base="nowhere", seed=3)
    assert sum(p.numel() for p in trained(plain).values()) == predicted
    assert parameter_counts(plain).trainable == predicted
    torch.testing.assert_close(sample_logits(plain), before, rtol=1e-5, atol=1e-5)


@each_family
@pytest.mark.parametrize("targets", ["auto", "all"])
def test_packed_and_alone_an_adapter_gets_one_gradient(kind, tiny, packed, some_examples, targets):
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
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-4 * largest)
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
        resolve(tiny("gpt2"), kind="lora", target_modules=("q_proj",))
    assert "q_proj" in str(error.value)
    assert "c_attn, c_fc, c_proj" in str(error.value)


@each_family
def test_frozen_matrices_in_bf16_give_the_bits_autocast_gives(kind, tiny, packed, some_examples):
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
def test_an_adapter_loads_here_and_in_peft_and_merges(kind, tiny, base_folder, tmp_path, variant):
    folder = tmp_path / "adapter"
    model = saved(tiny, kind, base_folder, folder, variant=variant)
    expected = sample_logits(model)
    ours = load_with_adapter(folder, merge=False)
    assert torch.equal(sample_logits(ours), expected)
    plain = merged(ours)
    assert not any("lora" in n or "token_adapter" in n for n, _ in plain.named_modules())
    torch.testing.assert_close(sample_logits(plain), expected, rtol=1e-4, atol=1e-4)
    auto = AutoModelForSeq2SeqLM if model.config.is_encoder_decoder else AutoModelForCausalLM
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
    assert torch.equal(output_head(model)[0], output_head(load_model(str(base_folder)))[0])
    use_adapter(model, "b")  # which trains no token, unlike the other
    assert torch.equal(output_head(model)[0], output_head(second)[0])
    with pytest.raises(ConfigError, match="there are a, b"):
        use_adapter(model, "c")


@pytest.mark.parametrize("kind", ["gpt2"])
def test_another_base_and_a_damaged_folder_are_refused(kind, tiny, base_folder, tmp_path):
    saved(tiny, kind, base_folder, tmp_path / "adapter")
    other = load_file(base_folder / "model.safetensors")
    name = min(other)
    other[name] = other[name] + 1.0
    save_file(other, base_folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="trained on other weights"):
        load_with_adapter(tmp_path / "adapter")
    weights = (tmp_path / "adapter" / WEIGHTS).read_bytes()
    (tmp_path / "adapter" / WEIGHTS).write_bytes(weights[:-40])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        load_with_adapter(tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["gpt2"])
def test_an_adapter_of_another_type_is_refused_by_its_name(kind, tiny, base_folder, tmp_path):
    saved(tiny, kind, base_folder, tmp_path / "adapter")
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
    torch.testing.assert_close(sample_logits(whole), sample_logits(model), rtol=1e-4, atol=1e-4)
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
    with pytest.raises(CheckpointError, match="other logits"):
        export_model(tmp_path / "adapter", tmp_path / "merged", card="")
    assert not (tmp_path / "merged").exists()


@each_family
def test_generation_with_an_adapter_is_that_of_the_merged_model(kind, tiny):
    model = adapted(tiny, kind, tokens=())
    disturb(model)
    model.eval()
    options = {"max_new_tokens": 6, "eos_id": 1, "pad_id": 0}
    beside = generate(model, [[5, 9, 13], [7]], **options)
    assert beside == generate(merged(model), [[5, 9, 13], [7]], **options)


def test_frozen_weights_cost_four_operations(tiny):
    full, part = tiny("gpt2"), adapted(tiny, "gpt2", tokens=())
    ratio = flops_per_token(full, context=0) / flops_per_token(part, context=0)
    assert 1.2 < ratio < 1.5


def test_a_file_holds_only_the_adapter(tiny):
    model = adapted(tiny, "llama")
    names = adapter_tensors(model).keys()
    assert all("lora_" in n or "trainable_tokens_delta" in n for n in names)
    assert sum(t.numel() for t in adapter_tensors(model).values()) == sum(
        p.numel() for p in trained(model).values()
    )
