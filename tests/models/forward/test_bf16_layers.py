"""Bfloat16 layers on a CPU: as near to float32 as autocast, and float32 itself untouched."""

from __future__ import annotations

import copy

import pytest
import torch

from toque.models.forward.attention_groups import groups_of
from toque.models.forward.bf16.layers import use_bf16_layers
from toque.models.forward.bf16.weights import bf16_copy, padded_length
from toque.models.forward.loss import loss_sum
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach, resolve
from toque.training.runtime import Runtime


def loss_and_gradients(model, batch, *, bf16):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = loss_sum(model, batch)
    torch.autograd.backward(loss)
    grads = {n: p.grad.float().clone() for n, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def distance(found, exact):
    """Of all gradients as one vector, relative to its length."""
    difference = sum(float((found[n] - exact[n]).square().sum()) for n in exact)
    return (difference / sum(float(g.square().sum()) for g in exact.values())) ** 0.5


@pytest.mark.parametrize("examples", [1, 2, 9])
def test_loss_and_gradients_are_as_near_to_float32_as_autocasts(
    kind, tiny, some_examples, packed, examples
):
    made = some_examples(examples)
    batch = packed(kind, [made[: examples // 2 + 1], made[examples // 2 + 1 :]])
    model = tiny(kind)
    exact, exact_grads = loss_and_gradients(model, batch, bf16=False)
    theirs, their_grads = loss_and_gradients(model, batch, bf16=True)
    assert use_bf16_layers(model) > 0
    ours, our_grads = loss_and_gradients(model, batch, bf16=True)
    assert our_grads.keys() == exact_grads.keys()
    assert abs(ours - exact) < max(2 * abs(theirs - exact), 2e-3 * exact)
    assert distance(our_grads, exact_grads) < 1.5 * distance(their_grads, exact_grads) + 1e-3


def test_float32_keeps_its_bits(kind, tiny, some_examples, packed):
    model, made = tiny(kind), some_examples(5)
    batch = packed(kind, [made[:2], made[2:]])
    before = loss_and_gradients(model, batch, bf16=False)
    use_bf16_layers(model)
    after = loss_and_gradients(model, batch, bf16=False)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_splitting_rows_sums_to_the_same(family_kind, tiny, some_examples, packed):
    model, made = tiny(family_kind), some_examples(8)
    batch = packed(family_kind, [made[:3], made[3:6], made[6:]])
    use_bf16_layers(model)
    whole, whole_grads = loss_and_gradients(model, batch, bf16=True)
    parts = [loss_and_gradients(model, part, bf16=True) for part in batch.split(1)]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=2e-3)
    summed = {name: sum(grads[name] for _, grads in parts) for name in whole_grads}
    assert distance(summed, whole_grads) < 0.02


def test_dropout_draws_by_the_seed_and_keeps_the_mean(tiny, some_examples, packed):
    model, made = tiny("t5-v1.1"), some_examples(5)
    batch = packed("t5-v1.1", [made[:2], made[2:]])
    use_bf16_layers(model)
    quiet, _ = loss_and_gradients(model, batch, bf16=True)
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_and_gradients(model, batch, bf16=True)[0])
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] == pytest.approx(quiet, rel=0.3)


def test_an_adapter_trains_and_the_base_gets_no_gradient(family_kind, tiny, some_examples, packed):
    model, made = tiny(family_kind), some_examples(5)
    batch = packed(family_kind, [made[:2], made[2:]])
    attach(model, resolve(model, kind="lora", r=4), base="tiny", seed=0)
    hold_frozen(model, torch.bfloat16)
    with torch.no_grad():  # B is zero at first, and so is A's gradient
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    _, exact = loss_and_gradients(model, batch, bf16=True)
    use_bf16_layers(model)
    _, found = loss_and_gradients(model, batch, bf16=True)
    assert found.keys() == exact.keys()
    assert all(".lora_" in name for name in found)
    assert distance(found, exact) < 0.05


def test_a_copy_is_made_anew_after_an_update_only():
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))
    first = bf16_copy(weight)
    assert bf16_copy(weight) is first
    with torch.no_grad():
        weight.mul_(2.0)
    assert torch.equal(bf16_copy(weight), weight.to(torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
def test_updates_reach_the_copies(tiny, some_examples, packed, fused):
    model, made = tiny("llama"), some_examples(5)
    batch = packed("llama", [made[:2], made[2:]])
    use_bf16_layers(model)
    before, _ = loss_and_gradients(model, batch, bf16=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=fused)
    Runtime().optimizer_step(optimizer, lr=1e-2, only_if=torch.tensor(True))
    after, _ = loss_and_gradients(model, batch, bf16=True)
    fresh, _ = loss_and_gradients(copy.deepcopy(model), batch, bf16=True)
    assert after == fresh
    assert after < before


@pytest.mark.parametrize("n", [1, 31, 32, 33, 970, 1024, 1025, 3000, 100_000])
def test_padded_lengths_are_few_and_near(n):
    assert n <= padded_length(n) <= max(n + 31, n * 17 // 16)
    assert len({padded_length(m) for m in range(1, 4097)}) < 100


def test_groups_hold_every_example_once_and_no_longer_than_allowed():
    lengths = [5, 300, 7, 298, 31, 900, 64, 1]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    groups = groups_of([(a, n, a, n) for a, n in zip(starts, lengths, strict=True)], causal=True)
    tokens = torch.arange(float(sum(lengths)))[:, None]
    rows, parts = groups.queries.room(tokens, 1)
    for group, part in zip(groups.each, parts, strict=True):
        part.copy_(tokens[group.queries.where])
    beyond = 3  # rounding adds tokens of no example
    found = groups.queries.tokens(rows, len(tokens) + beyond)
    assert torch.equal(found, torch.cat((tokens, torch.zeros(beyond, 1))))
    assert len(groups.each) < len(lengths)
