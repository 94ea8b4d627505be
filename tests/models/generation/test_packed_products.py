"""Generation in bf16: the texts of float32 where margins are clear, the model left as it is."""

import copy

import pytest
import torch
from torch import nn

from tiny import EOS, PAD, VOCAB
from toque.config.schema_methods import AdapterConfig
from toque.hardware.onednn import PackedLinear, has_fast_bf16
from toque.models.generation import packed_products
from toque.models.generation.kv_cache import cache_dtype, uses_gathered_attention
from toque.models.generation.packed_products import (
    has_bf16_products,
    with_packed_products,
)
from toque.models.lora.adapter_files import use_adapter
from toque.models.lora.layers import attach
from written import generate

PROMPTS = [[5, 9, 7, 3, 8, 6, 4], [12, 5], [9, 9, 30, 11], [7]]
IDS = {"eos_id": EOS, "pad_id": PAD}


def written(model, rows=None):
    return generate(
        model, PROMPTS, max_new_tokens=12, precision="bf16", batch_rows=rows, **IDS
    )


def test_a_product_is_that_of_rounded_factors():
    torch.manual_seed(0)
    layer = nn.Linear(48, 40)
    states = torch.randn(3, 48)
    fast = has_fast_bf16(layer.weight.device)
    got = PackedLinear(layer.weight, layer.bias, torch.bfloat16, is_packed=fast)(states)
    rounded = [
        t.detach().bfloat16().double() for t in (states, layer.weight, layer.bias)
    ]
    exact = rounded[0] @ rounded[1].T + rounded[2]
    assert got.dtype == torch.float32
    # One rounding to 8 bits at the end, besides the order of the float32 sum.
    assert torch.all((got - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6)


def test_every_linear_layer_but_the_head_is_replaced_and_the_model_is_not(kind, tiny):
    model = tiny(kind)
    before = copy.deepcopy(model)
    twin = with_packed_products(model, "bf16")
    left = [name for name, m in twin.named_modules() if isinstance(m, nn.Linear)]
    assert left == ["lm_head"]
    assert has_bf16_products(twin)
    assert cache_dtype(twin) == (
        torch.float16 if uses_gathered_attention(twin) else torch.bfloat16
    )
    assert not has_bf16_products(model)
    assert cache_dtype(model) == torch.float32
    written(model)
    for (name, old), (_, new) in zip(
        before.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(old, new), name
    assert [type(m) for m in before.modules()] == [type(m) for m in model.modules()]


def test_a_text_parts_from_float32s_at_a_near_tie_alone(kind, tiny):
    """The first other token is, in float32, nearly as likely as the one float32 writes."""
    model = tiny(kind)
    single, texts = generate(model, PROMPTS, max_new_tokens=12, **IDS), written(model)
    assert written(model) == texts
    for prompt, mine, other in zip(PROMPTS, texts, single, strict=True):
        if mine == other:
            continue
        a, b = [*mine, EOS], [*other, EOS]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            if model.config.is_encoder_decoder:
                begun = torch.tensor([[PAD, *mine[:at]]])
                logits = model(
                    input_ids=torch.tensor([prompt]), decoder_input_ids=begun
                ).logits
            else:
                logits = model(input_ids=torch.tensor([prompt + mine[:at]])).logits
        last = logits[0, -1]
        # Sixteen roundings of 2**-8, measured by how far the tokens' logits lie apart.
        assert last[b[at]] - last[a[at]] <= last.std() * 2.0**-4


@pytest.mark.parametrize(
    ("adapter", "precision"),
    [("lora", "float32"), ("lora", "bf16"), ("dora", "bf16"), ("rslora", "float32")],
)
def test_an_adapter_writes_as_in_the_model(
    family_kind, tiny, adapter, precision, monkeypatch
):
    if torch.backends.mkldnn.is_available():
        monkeypatch.setattr(packed_products, "onednn_is_faster", lambda: True)
    model = tiny(family_kind)
    attach(model, AdapterConfig(kind=adapter, r=4, dropout=0.0), base="tiny", seed=0)
    with torch.no_grad():  # B is zero at first
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    states = torch.randint(1, VOCAB, (2, 5))
    twin = with_packed_products(model, precision)
    assert any(isinstance(m, PackedLinear) for m in twin.modules())
    inputs = {"input_ids": states}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = states
    with torch.inference_mode():
        exact, found = model(**inputs).logits, twin(**inputs).logits
    tolerance = 1e-4 if precision == "float32" else 0.1
    assert float((found - exact).abs().mean()) < tolerance * float(exact.abs().mean())
    use_adapter(model, None)
    with torch.inference_mode():
        assert float((model(**inputs).logits - exact).abs().max()) > 1e-3
