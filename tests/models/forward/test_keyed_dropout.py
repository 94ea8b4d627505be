"""Dropout drops the share it was asked for, and keeps the mean."""

import pytest
import torch
from torch import nn

from tiny import model_of
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.fast_dropout import Dropout, keep_mask, use_fast_dropout
from toque.models.lora.layers import attach


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_and_the_mean(p, dtype):
    torch.manual_seed(3)
    mask = keep_mask(torch.empty(301, 997, dtype=dtype), p)
    assert mask.dtype == dtype
    kept = mask != 0
    n = kept.numel()
    assert abs(kept.sum().item() / n - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5 + 1e-5
    assert mask[kept].unique().tolist() == pytest.approx([1 / (1 - p)], rel=4e-3)
    # Neighbours, whose bits are of one draw, are independent.
    together = (kept[:, 1:] & kept[:, :-1]).double().mean().item()
    assert together == pytest.approx((1 - p) ** 2, abs=0.005)


def test_ends_of_the_scale_and_odd_shapes():
    for shape in ((), (1,), (3,), (0, 4), (5, 7)):
        like = torch.ones(shape)
        assert torch.equal(keep_mask(like, 0.0), like)
        assert torch.equal(keep_mask(like, 1.0), torch.zeros(shape))
        assert keep_mask(like, 0.3).shape == like.shape
    assert keep_mask(torch.ones(6, 4).t(), 0.3).shape == (4, 6)


def test_a_seed_gives_the_same_mask_on_any_number_of_threads():
    masks = []
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(8)
        masks.append(keep_mask(torch.empty(700, 900), 0.1))
    torch.set_num_threads(before)
    assert torch.equal(*masks)


def test_the_gradient_is_that_of_what_was_kept():
    module, x = Dropout(0.4), torch.randn(50, 8, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert torch.equal(out != 0, x.grad != 0)
    assert torch.equal(out, x.detach() * x.grad)
    assert module.eval()(x) is x


def test_a_models_and_its_adapters_are_replaced():
    model = model_of("gpt2")
    attach(model, AdapterConfig(r=2, dropout=0.25), base="none", seed=1)
    model.train()
    model.transformer.h[1].mlp.dropout.eval()
    plain = [m for m in model.modules() if type(m) is nn.Dropout]
    assert use_fast_dropout(model) == len(plain) > 0
    assert not [m for m in model.modules() if type(m) is nn.Dropout]
    ours = [m for m in model.modules() if isinstance(m, Dropout)]
    assert {m.p for m in ours} == {0.1, 0.25}
    assert not model.transformer.h[1].mlp.dropout.training
    assert sum(m.training for m in ours) == len(ours) - 1
    assert use_fast_dropout(model) == 0
    ids = torch.arange(30).view(2, 15)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)
