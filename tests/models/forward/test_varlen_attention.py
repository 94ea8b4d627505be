"""Attention by segments: what PyTorch's attention gives under a mask, and when it is used."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from toque.models.forward.attention import attention_of, use_attention
from toque.models.forward.loss import loss_sum
from toque.models.forward.packed import same_segment
from toque.models.forward.varlen_attention import AttentionPlan, _attend, examples_in

SOURCE = torch.tensor([[1, 1, 1, 2, 2, 3], [1, 2, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0]])
TARGET = torch.tensor([[1, 2, 2, 3, 3, 3, 3, 0], [1, 1, 1, 1, 2, 0, 0, 0], [0] * 8])
H, D = 2, 3
CASES = {
    "encoder": (SOURCE, SOURCE, False),
    "decoder": (TARGET, TARGET, True),
    "across": (TARGET, SOURCE, False),
}


def flat(segments):
    """One number for each real token of all rows, another for every example."""
    unique = segments + 10 * torch.arange(len(segments))[:, None]
    return unique[segments > 0][None]


def tensors(case, *, biased, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()

    n, m = (flat(segments).shape[1] for segments in CASES[case][:2])
    table = draw(H, 2 * max(n, m))  # one number for each distance, as T5 has it
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] + max(n, m)
    bias = table[:, distance][None] if biased else None
    return draw(1, H, n, D), draw(1, H, m, D), draw(1, H, m, D), bias, table


def ours(case, q, k, v, bias, dropout=0.0):
    queries, keys, causal = CASES[case]
    module = SimpleNamespace(is_causal=causal, is_decoder=case != "encoder")
    across = examples_in(queries, keys) if case == "across" else None
    plan = AttentionPlan(examples_in(queries), across)
    return _attend(
        module, q, k, v, None, plan=plan, position_bias=bias, dropout=dropout
    )[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [True, False])
def test_values_and_gradients_are_those_under_a_mask(case, biased):
    queries, keys, causal = CASES[case]
    biased = biased and case != "across"  # T5 has none there
    q, k, v, bias, table = tensors(case, biased=biased)
    # The bias of a distance is that within an example, wherever in the row the example stands.
    mask = same_segment(flat(queries), flat(keys))
    mask = mask.tril() if causal else mask
    added = mask if bias is None else torch.where(mask, bias, -torch.inf)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=added).transpose(1, 2)
    got = ours(case, q, k, v, bias)
    torch.testing.assert_close(got, expected)
    wanted = (q, k, v, table) if biased else (q, k, v)
    weights = torch.randn(
        got.shape, generator=torch.Generator().manual_seed(1)
    ).double()
    mine = torch.autograd.grad((got * weights).sum(), wanted, retain_graph=True)
    theirs = torch.autograd.grad((expected * weights).sum(), wanted)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("case", CASES)
def test_gradients_hold_with_dropout(case):
    q, k, v, _, _ = tensors(case, biased=False)
    bias = torch.randn(1, H, q.shape[2], k.shape[2], dtype=torch.float64)

    def run(q, k, v, bias):
        torch.manual_seed(5)
        return ours(case, q, k, v, bias, 0.4)

    assert torch.autograd.gradcheck(
        run, (q, k, v, bias.requires_grad_(case != "across")), fast_mode=True
    )


def test_dropout_keeps_the_mean():
    q, k, v, bias, _ = tensors("decoder", biased=True)
    whole = ours("decoder", q, k, v, bias)
    torch.manual_seed(0)
    draws = torch.stack(
        [ours("decoder", q, k, v, bias, 0.3).detach() for _ in range(300)]
    )
    assert not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - whole).abs().max() < 0.3


def test_a_torn_segment_is_refused():
    with pytest.raises(ValueError, match="segment 1 of row 0 is not consecutive"):
        examples_in(torch.tensor([[1, 2, 1]]))


def test_what_is_chosen(tiny, some_examples, packed):
    model, cpu = tiny("gpt2"), torch.device("cpu")
    for asked in ("flex", "dense", "segments"):
        use_attention(model, asked)
        assert attention_of(model, cpu).name == asked
    found = attention_of(model, torch.device("cuda"))
    assert found.name == "dense"
    assert "needs a CPU" in found.notes[0]
    use_attention(model, "auto")
    assert attention_of(model, cpu).name == "segments"
    assert attention_of(model, torch.device("meta")).name == "dense"
    loss_sum(model, packed("gpt2", [some_examples(3)]))
    assert model.config._attn_implementation == "sdpa"
    model.transformer.h[1].compile()
    assert attention_of(model, cpu).name == "dense"
