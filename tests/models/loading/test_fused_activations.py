"""The fused activation is transformers' own, to rounding, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.activations import NewGELUActivation

from toque.models.loading.from_scratch import fuse_activations


@pytest.mark.parametrize("kind", ["gpt2", "t5-v1.1"])
def test_logits_and_gradients_equal_the_stock_models(kind, tiny):
    ours = tiny(kind)
    assert not any(isinstance(module, NewGELUActivation) for module in ours.modules())
    stock = copy.deepcopy(ours)
    for module in list(stock.modules()):
        for name, child in module.named_children():
            if isinstance(child, torch.nn.GELU):
                setattr(module, name, NewGELUActivation())
    assert any(isinstance(module, NewGELUActivation) for module in stock.modules())
    tokens = torch.tensor([[5, 9, 13, 21]])
    found = []
    for model in (ours, stock):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        found.append((loss, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][name], rtol=1e-4, atol=1e-5)


def test_other_activations_stay(tiny):
    model = tiny("llama")
    before = [type(module) for module in model.modules()]
    fuse_activations(model)
    assert [type(module) for module in model.modules()] == before
