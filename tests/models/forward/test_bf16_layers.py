"""Bfloat16 layers on a CPU: as near to float32 as autocast, and float32 itself untouched."""

import copy

import pytest
import torch

from toque.config.schema_methods import AdapterConfig
from toque.models.forward import cpu_linear, varlen_attention
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.loss import (
    _add_in_pieces,
    _input_gradient,
    cross_entropy_sum,
    loss_sum,
)
from toque.models.forward.packed import position_bias
from toque.models.loading.model_export import sample_logits
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach
from toque.training.runtime import Runtime


def loss_and_gradients(model, batch, *, bf16):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = loss_sum(model, batch)
    torch.autograd.backward(loss)
    grads = {
        n: p.grad.float().clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }
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
    assert use_cpu_layers(model) > 0
    ours, our_grads = loss_and_gradients(model, batch, bf16=True)
    assert our_grads.keys() == exact_grads.keys()
    assert abs(ours - exact) < max(2 * abs(theirs - exact), 2e-3 * exact)
    assert (
        distance(our_grads, exact_grads)
        < 1.5 * distance(their_grads, exact_grads) + 1e-3
    )


def test_attention_and_gates_are_computed_by_our_own_layers(
    family_kind, tiny, some_examples, packed, monkeypatch
):
    """transformers' own would work as well, only slower, and nothing else would tell."""

    def not_ours(*_, **__):
        raise AssertionError("transformers' attention layer was used")

    monkeypatch.setattr(varlen_attention, "_attend", not_ours)
    model, made = tiny(family_kind), some_examples(5)
    use_cpu_layers(model)
    loss_and_gradients(model, packed(family_kind, [made[:2], made[2:]]), bf16=True)
    gated = [
        m for m in model.modules() if hasattr(m, "gate_proj") or hasattr(m, "wi_1")
    ]
    assert all("_toque_bf16" in module.__dict__ for module in gated)


def test_float32_keeps_its_bits(kind, tiny, some_examples, packed, monkeypatch):
    monkeypatch.setattr(cpu_linear, "onednn_is_faster", lambda: False)
    model, made = tiny(kind), some_examples(5)
    batch = packed(kind, [made[:2], made[2:]])
    before = loss_and_gradients(model, batch, bf16=False)
    use_cpu_layers(model)
    after = loss_and_gradients(model, batch, bf16=False)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])


def test_dropout_draws_by_the_seed_and_keeps_the_mean(tiny, some_examples, packed):
    model, made = tiny("t5-v1.1"), some_examples(5)
    batch = packed("t5-v1.1", [made[:2], made[2:]])
    use_cpu_layers(model)
    quiet, _ = loss_and_gradients(model, batch, bf16=True)
    model.train()
    losses = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        losses.append(loss_and_gradients(model, batch, bf16=True)[0])
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] == pytest.approx(quiet, rel=0.3)


def test_an_adapter_trains_and_the_base_gets_no_gradient(
    family_kind, tiny, some_examples, packed
):
    model, made = tiny(family_kind), some_examples(5)
    batch = packed(family_kind, [made[:2], made[2:]])
    attach(model, AdapterConfig(r=4, dropout=0.0), base="tiny", seed=0)
    hold_frozen(model, torch.bfloat16)
    with torch.no_grad():  # B is zero at first, and so is A's gradient
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    _, exact = loss_and_gradients(model, batch, bf16=True)
    use_cpu_layers(model)
    _, found = loss_and_gradients(model, batch, bf16=True)
    assert found.keys() == exact.keys()
    assert all(".lora_" in name for name in found)
    assert distance(found, exact) < 0.05


@pytest.mark.parametrize("adapted", [False, True])
def test_texts_may_be_written_before_the_first_update(
    family_kind, tiny, some_examples, packed, adapted
):
    model, made = tiny(family_kind), some_examples(5)
    batch = packed(family_kind, [made[:2], made[2:]])
    if adapted:
        attach(model, AdapterConfig(r=4, dropout=0.0), base="tiny", seed=0)
    use_cpu_layers(model)
    expected, _ = loss_and_gradients(copy.deepcopy(model), batch, bf16=True)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        sample_logits(model)
    found, gradients = loss_and_gradients(model, batch, bf16=True)
    assert found == expected
    assert gradients


@pytest.mark.parametrize("vocabulary", [70, 128])
def test_a_padded_vocabulary_takes_no_share(vocabulary):
    made = torch.Generator().manual_seed(3)
    hidden = torch.randn(40, 16, generator=made).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocabulary, 16, generator=made))
    bias = torch.nn.Parameter(torch.randn(vocabulary, generator=made))
    labels = torch.randint(0, vocabulary, (40,), generator=made)
    found = []
    for bf16 in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = cross_entropy_sum(hidden, weight, labels, bias=bias, chunk_rows=4)
        gradients = torch.autograd.grad(loss, (hidden, weight, bias))
        found.append((loss.detach(), *gradients))
    for exact, rounded in zip(*found, strict=True):
        assert rounded.shape == exact.shape
        assert rounded.dtype == torch.float32
        torch.testing.assert_close(
            rounded, exact, rtol=2e-2, atol=2e-2 * float(exact.abs().max())
        )


def test_pieces_of_the_head_sum_to_the_whole():
    made = torch.Generator().manual_seed(4)
    slopes = torch.randn(3, 10_000, generator=made).to(torch.bfloat16)
    matrix = torch.randn(10_000, 8, generator=made).to(torch.bfloat16)
    whole = slopes.double() @ matrix.double()
    torch.testing.assert_close(
        _input_gradient(slopes, matrix).double(), whole, rtol=0, atol=1.5
    )
    total, part = (
        torch.full((600_000, 4), torch.nan),
        torch.ones(600_000, 4, dtype=torch.bfloat16),
    )
    _add_in_pieces(total, part, first=True)
    _add_in_pieces(total, 2 * part, first=False)
    assert bool((total == 3.0).all())


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("length", [1, 7, 150])
def test_a_bias_by_distance_is_t5s_own(tiny, is_decoder, length):
    stack = tiny("t5").get_submodule("decoder" if is_decoder else "encoder")
    attention = stack.get_submodule("block.0.layer.0.SelfAttention")
    table = attention.relative_attention_bias.weight
    torch.manual_seed(1)
    slopes = torch.randn(1, attention.n_heads, length, length)
    found, stock = (
        position_bias(attention, length),
        attention.compute_bias(length, length),
    )
    assert torch.equal(found, stock)
    (mine,) = torch.autograd.grad(found, table, slopes)
    (theirs,) = torch.autograd.grad(stock, table, slopes)
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("in_one", [False, True])
def test_updates_reach_the_copies(tiny, some_examples, packed, in_one):
    model, made = tiny("llama"), some_examples(5)
    batch = packed("llama", [made[:2], made[2:]])
    use_cpu_layers(model)
    before, _ = loss_and_gradients(model, batch, bf16=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, fused=in_one)
    Runtime().optimizer_step(optimizer, lr=1e-2, only_if=torch.tensor(True), step=0)
    after, _ = loss_and_gradients(model, batch, bf16=True)
    fresh, _ = loss_and_gradients(copy.deepcopy(model), batch, bf16=True)
    assert after == fresh
    assert after < before
