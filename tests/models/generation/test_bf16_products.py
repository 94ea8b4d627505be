"""Generation in bf16: the texts of float32 where margins are clear, the model left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tiny import EOS, PAD, VOCAB
from toque.models.generation.base import cache_dtype
from toque.models.generation.bf16_products import (
    Bf16Linear,
    has_bf16_products,
    with_bf16_products,
)
from toque.models.generation.engine import generate

PROMPTS = [[5, 9, 7, 3, 8, 6, 4], [12, 5], [9, 9, 30, 11], [7]]
IDS = {"eos_id": EOS, "pad_id": PAD}


def first_tokens(model, precision, rows=None):
    return generate(model, PROMPTS, max_new_tokens=1, precision=precision, batch_rows=rows, **IDS)


def written(model, rows=None):
    return generate(model, PROMPTS, max_new_tokens=12, precision="bf16", batch_rows=rows, **IDS)


def test_a_product_is_that_of_rounded_factors():
    torch.manual_seed(0)
    layer = nn.Linear(48, 40)
    states = torch.randn(3, 48)
    got = Bf16Linear(layer.weight, layer.bias)(states)
    rounded = [t.detach().bfloat16().double() for t in (states, layer.weight, layer.bias)]
    exact = rounded[0] @ rounded[1].T + rounded[2]
    assert got.dtype == torch.float32
    # One rounding to 8 bits at the end, besides the order of the float32 sum.
    assert torch.all((got - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6)


def test_every_linear_layer_but_the_head_is_replaced_and_the_model_is_not(kind, tiny):
    model = tiny(kind)
    before = copy.deepcopy(model)
    twin = with_bf16_products(model)
    left = [name for name, m in twin.named_modules() if isinstance(m, nn.Linear)]
    assert left == ["lm_head"]
    assert has_bf16_products(twin)
    assert cache_dtype(twin) == torch.bfloat16
    assert not has_bf16_products(model)
    assert cache_dtype(model) == torch.float32
    written(model)
    for (name, old), (_, new) in zip(
        before.named_parameters(), model.named_parameters(), strict=True
    ):
        assert torch.equal(old, new), name
    assert [type(m) for m in before.modules()] == [type(m) for m in model.modules()]


def test_clear_margins_give_float32s_tokens(kind, tiny):
    model = tiny(kind)
    # A token is likeliest by far that has a column of the last norm to itself.
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.clone())
        head.weight[VOCAB // 2 :].mul_(30.0)
    assert first_tokens(model, "bf16") == first_tokens(model, "float32")


def test_the_same_texts_again(kind, tiny):
    model = tiny(kind)
    assert written(model) == written(model)


@pytest.mark.parametrize("rows", [1, 2])
def test_draws_come_in_bf16_too(kind, rows, tiny):
    model = tiny(kind)
    texts = generate(
        model,
        PROMPTS,
        max_new_tokens=6,
        strategy="sample",
        top_p=0.9,
        precision="bf16",
        batch_rows=rows,
        **IDS,
    )
    assert len(texts) == len(PROMPTS)
    assert all(0 <= token < VOCAB for text in texts for token in text)
