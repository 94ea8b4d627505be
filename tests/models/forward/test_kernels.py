"""Attention kernels without masks: their plans, FlexAttention's dropout, and what is chosen.

On a CPU each kernel is computed by its definition; tests/gpu holds the kernels themselves to it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from toque.batch import DecoderBatch
from toque.models.forward import attention_choice, gpu_attention
from toque.models.forward import flex_attention as flex
from toque.models.forward.attention_choice import attention_of, use_attention
from toque.models.forward.attention_plan import (
    Runs,
    decoder_plan,
    encoder_decoder_plans,
    planned,
)
from toque.models.forward.compile import compile_blocks
from toque.models.forward.loss import loss_sum

CPU = torch.device("cpu")


def rows(*lengths: list[int], length: int) -> DecoderBatch:
    """Rows whose examples have these lengths."""
    segments = torch.zeros(len(lengths), length, dtype=torch.int32)
    for row, parts in enumerate(lengths):
        at = 0
        for number, part in enumerate(parts, start=1):
            segments[row, at : at + part] = number
            at += part
    tokens = torch.zeros(segments.shape, dtype=torch.int64)
    ids = tuple(tuple(range(len(parts))) for parts in lengths)
    return DecoderBatch(tokens, ids, tokens, segments, tokens)


UNEVEN = ([100, 30, 120], [256, 60], [], [130, 126, 44], [1] * 9)


def test_ends_are_those_of_the_runs():
    batch = rows([2, 1], [4], [], length=4)
    runs = decoder_plan(batch, "flash").own
    assert isinstance(runs, Runs)
    # Two examples, none, padding to the row's end; and empty runs that fill up the slots.
    assert runs.ends.tolist() == [0, 2, 3, *[4] * 6, *[8] * 8, *[8] * 2, *[12] * 6]
    assert runs.longest == 4


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_a_plan_is_cut_with_its_rows(kernel):
    batch = rows(*UNEVEN, length=320)
    whole = planned(batch, kernel)
    for part, alone in zip(whole.split(2), batch.split(2), strict=True):
        assert part.attention.keys() == whole.attention.keys()
        mine = decoder_plan(part, kernel).own
        if isinstance(mine, Runs):
            # Of no row more slots than the update's fullest needs: one shape for all.
            assert len(mine.ends) == 1 + 16 * part.n_rows
            true = decoder_plan(alone, kernel).own
            assert [*dict.fromkeys(mine.ends.tolist())] == [*dict.fromkeys(true.ends.tolist())]
        else:
            true = decoder_plan(alone, kernel).own
            assert torch.equal(dense_of(mine), dense_of(true))


def dense_of(mask: BlockMask) -> torch.Tensor:
    """The blocks a mask lists, by keys and by queries: 1 with a mask, 2 for full ones."""
    found = []
    for counts, where, other in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
        (mask.q_num_blocks, mask.q_indices, 1),
        (mask.full_q_num_blocks, mask.full_q_indices, 2),
    ):
        table = torch.zeros(where.shape, dtype=torch.int64)
        for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
            used = where[tuple(place)][: counts[tuple(place)]]
            table[(*place, used.long())] = other
        found.append(table)
    assert torch.equal(found[0] + found[1], (found[2] + found[3]).transpose(-1, -2))
    return found[0] + found[1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [320, 384])
def test_blocks_hold_every_allowed_pair(length, causal):
    batch = rows(*UNEVEN, length=length)
    if causal:
        mask = decoder_plan(batch, "flex").own
    else:
        mask = encoder_decoder_plans(as_encoder_decoder(batch))[0].own
    assert isinstance(mask, BlockMask)
    true = create_block_mask(mask.mask_mod, len(UNEVEN), None, length, length, device="cpu")
    mine, right = dense_of(mask), dense_of(true)
    assert ((mine > 0) >= (right > 0)).all()  # a block too many costs time, one too few is wrong
    assert ((mine == 2) <= (right == 2)).all()
    # Nearly as few as by looking at every pair.
    assert (mine > 0).sum() <= 1.1 * (right > 0).sum()


def as_encoder_decoder(batch):
    from toque.batch import EncoderDecoderBatch

    return EncoderDecoderBatch(
        labels=batch.labels, example_ids=batch.example_ids, source_tokens=batch.tokens,
        source_segments=batch.segments, target_tokens=batch.tokens,
        target_segments=batch.segments,
    )  # fmt: skip


def some(n_rows: int, length: int, *, heads: int = 2, size: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(n_rows, heads, length, size, dtype=torch.float64, requires_grad=True)
        for _ in range(3)
    ]


@pytest.mark.parametrize("biased", [True, False])
def test_dropout_of_flex_is_exact(biased):
    """Against softmax, then mask, then scale, with the pairs that the hash says."""
    batch, p, scale = rows([5, 9, 3], [17], [], length=20), 0.3, 0.4
    query, key, value = some(3, 20)
    bias = torch.randn(1, 2, 20, 20, dtype=torch.float64, requires_grad=biased)
    mask = decoder_plan(batch, "flex").own
    torch.manual_seed(3)
    ours = flex.attend(
        query, key, value, mask, bias=bias if biased else None, scale=scale, dropout=p
    )

    torch.manual_seed(3)
    seeds = torch.randint(-(2**31), 2**31, (3,), dtype=torch.int32)
    b, h, i, j = torch.meshgrid(
        *(torch.arange(n, dtype=torch.int32) for n in (3, 2, 20, 20)), indexing="ij"
    )
    kept = flex.drawn(seeds[b], h, i, j) >= round(p * 2**24)
    assert 0.65 < kept.double().mean() < 0.75
    scores = query @ key.transpose(-1, -2) * scale + (bias if biased else 0.0)
    allowed = (batch.segments[:, None, :, None] == batch.segments[:, None, None]) & (i >= j)
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    true = (shares * kept / (1 - round(p * 2**24) / 2**24)) @ value
    torch.testing.assert_close(ours, true)

    leaves = [query, key, value, *([bias] if biased else [])]
    slope = torch.randn_like(true)
    mine = torch.autograd.grad(ours, leaves, slope)
    for one, other in zip(mine, torch.autograd.grad(true, leaves, slope), strict=True):
        torch.testing.assert_close(one, other)


def test_a_query_that_keeps_no_key_gives_zero_and_a_gradient_without_nan():
    batch = rows([1, 1, 2], length=8)
    leaves = some(1, 8)
    torch.manual_seed(1)
    # Of the first two examples' single pairs, at 90 % most are dropped.
    out = flex.attend(*leaves, decoder_plan(batch, "flex").own, bias=None, scale=1.0, dropout=0.9)
    dropped = (out[0, :, :2] == 0).all(-1)
    assert dropped.any()
    out.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_drawn_numbers_are_even_and_unrelated():
    n = 64
    seeds = torch.arange(8, dtype=torch.int32)  # as near to each other as can be
    b, h, i, j = torch.meshgrid(
        *(torch.arange(m, dtype=torch.int32) for m in (8, 4, n, n)), indexing="ij"
    )
    drawn = flex.drawn(seeds[b], h, i, j).double() / 2**24
    assert drawn.min() >= 0
    assert drawn.max() < 1
    # Of 131,072 numbers: the mean is within five standard errors of a half, each tenth is as full.
    assert abs(drawn.mean() - 0.5) < 5 * math.sqrt(1 / 12 / drawn.numel())
    tenths = torch.histc(drawn, 10, 0, 1) / drawn.numel()
    assert (tenths - 0.1).abs().max() < 5 * math.sqrt(0.09 / drawn.numel())
    # Neighbours in every direction, and the same pair in the next row or head.
    centred = drawn - 0.5
    for dim in range(4):
        size = drawn.shape[dim]
        one, other = centred.narrow(dim, 0, size - 1), centred.narrow(dim, 1, size - 1)
        related = (one * other).mean() * 12
        assert abs(related) < 5 / math.sqrt(one.numel()), dim


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [False, True])
def test_flex_compiled_for_a_cpu_computes_the_definition(dropped):
    """The mask, the bias and the hash as the compiler reads them; PyTorch has no backward here."""
    batch = rows(*UNEVEN, length=320)
    mask = decoder_plan(batch, "flex").own
    torch.manual_seed(0)
    query, key, value = (torch.randn(len(UNEVEN), 2, 320, 16) for _ in range(3))
    bias = torch.randn(1, 2, 320, 320).expand(len(UNEVEN), -1, -1, -1)
    seeds = torch.randint(-(2**31), 2**31, (len(UNEVEN),), dtype=torch.int32)
    score_mod = flex._dropped(bias, seeds, 1 << 22) if dropped else flex.with_bias(bias)
    how = {"score_mod": score_mod, "block_mask": mask, "scale": 0.25}
    with torch.no_grad():
        ours = torch.compile(torchs.flex_attention)(query, key, value, **how)
        true = flex.reference(query, key, value, **how)
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


def test_what_is_chosen_on_a_cpu(tiny):
    model = tiny("gpt2")
    assert attention_of(model, CPU).name == "segments"
    for asked in ("flash", "flex", "dense", "segments"):
        use_attention(model, asked)
        assert attention_of(model, CPU).name == asked
    use_attention(model, "auto")
    compile_blocks(model, backend="eager")
    assert attention_of(model, CPU).name == "dense"


def test_what_cannot_be_used_says_why(tiny):
    model = tiny("t5")
    use_attention(model, "flash")
    found = attention_of(model, CPU)
    assert found.name == "dense"
    assert found.notes == (
        "attention without masks by flash is not used: T5 adds a bias to its scores",
    )
    use_attention(model, "segments")
    assert "needs a CPU" in attention_of(model, torch.device("meta")).notes[0]
    # Eager attention takes masks and nothing else.
    model.config._attn_implementation = "eager"
    assert attention_of(model, CPU) == attention_choice.Choice("dense")


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_the_probe_finds_a_kernel_that_sees_its_neighbours(kernel, monkeypatch):
    assert attention_choice._distance(kernel, CPU, torch.float32, 16) < 1e-5

    def blind(query, key, value, ends, **how):
        return flash_one_by_one(query, key, value, ends[[0, -1]], **how)

    def open_to_all(query, key, value, _mask, **how):
        def earlier(_b, _h, i, j):
            return i >= j

        whole = create_block_mask(earlier, None, None, 320, 320, device="cpu")
        return flex_attend(query, key, value, whole, **how)

    flash_one_by_one, flex_attend = gpu_attention._one_by_one, flex.attend
    monkeypatch.setattr(gpu_attention, "_one_by_one", blind)
    monkeypatch.setattr(flex, "attend", open_to_all)
    assert attention_choice._distance(kernel, CPU, torch.float32, 16) > 0.1


def test_dropout_of_either_kernel_leaves_the_loss_about_where_it_is(tiny, some_examples, packed):
    """GPT-2's default drops attention weights: neither kernel refuses, and both are unbiased."""
    examples = some_examples(12)
    batch = packed("gpt2", [examples[:6], examples[6:]])
    losses = {}
    for asked in ("dense", "flash", "flex"):
        model = tiny("gpt2").train()
        use_attention(model, asked)
        torch.manual_seed(5)
        with torch.no_grad():
            losses[asked] = sum(float(loss_sum(model, batch)) for _ in range(40)) / 40
    assert losses["flash"] == pytest.approx(losses["dense"], rel=0.02)
    assert losses["flex"] == pytest.approx(losses["dense"], rel=0.02)
