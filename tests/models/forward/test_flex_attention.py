"""FlexAttention's dropout over packed rows, and what is chosen.

On a CPU the kernel is computed by its definition; tests/gpu holds the kernel itself to it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import create_block_mask

from toque.batch import DecoderBatch
from toque.models.forward import flex_attention as flex
from toque.models.forward.keyed_dropout import _hash_in_place

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


def some(
    n_rows: int, length: int, *, heads: int = 2, size: int = 16
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(
            n_rows, heads, length, size, dtype=torch.float64, requires_grad=True
        )
        for _ in range(3)
    ]


def test_a_query_that_keeps_no_key_gives_zero_and_a_gradient_without_nan():
    batch = rows([1, 1, 2], length=8)
    leaves = some(1, 8)
    torch.manual_seed(1)
    # Of the first two examples' single pairs, at 90 % most are dropped.
    out = flex.attend(
        *leaves,
        flex.decoder_masks(batch).self_attention,
        bias=None,
        scale=1.0,
        dropout=0.9,
    )
    dropped = (out[0, :, :2] == 0).all(-1)
    assert dropped.any()
    out.sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)


def test_drawn_numbers_are_even_and_unrelated():
    n = 64
    keys = torch.arange(8 * n).view(8, n)  # as near to each other as can be
    others = _hash_in_place(torch.arange(8 * n) + 1).view(8, 1, 1, n).int()
    drawn = (
        flex.pair_number(flex.head_numbers(keys, 4)[..., None], others).double() / 2**24
    )
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
    mask = flex.decoder_masks(batch).self_attention
    torch.manual_seed(0)
    query, key, value = (torch.randn(len(UNEVEN), 2, 320, 16) for _ in range(3))
    bias = torch.randn(1, 2, 320, 320).expand(len(UNEVEN), -1, -1, -1)
    keys = torch.randint(-(2**31), 2**31, (len(UNEVEN), 320))
    score_mod = (
        flex._dropout_score_mod(
            flex.bias_score_mod(bias), flex.head_numbers(keys, 2), keys.int(), 1 << 22
        )
        if dropped
        else flex.bias_score_mod(bias)
    )
    how = {"score_mod": score_mod, "block_mask": mask, "scale": 0.25}
    with torch.no_grad():
        ours = torch.compile(torchs.flex_attention)(query, key, value, **how)
        true = flex.reference(query, key, value, **how)
    torch.testing.assert_close(ours, true, rtol=1e-4, atol=1e-5)


def test_the_probe_finds_a_kernel_that_sees_its_neighbours(monkeypatch):
    assert flex._largest_error(CPU, torch.float32, 16, {}, biased=True) < 1e-5
    attend = flex.attend

    def open_to_all(query, key, value, mask, **how):
        if how["kernel"] is not flex.reference:
            mask = create_block_mask(
                lambda _b, _h, i, j: i >= j, None, None, 320, 320, device="cpu"
            )
        return attend(query, key, value, mask, **how)

    monkeypatch.setattr(flex, "attend", open_to_all)
    assert flex._largest_error(CPU, torch.float32, 16, {}, biased=True) > 0.1
