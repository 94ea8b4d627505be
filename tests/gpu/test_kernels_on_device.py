"""Packed rows by each kernel give the loss and gradients of each example alone, stock."""

from __future__ import annotations

import pytest
import torch

from gpu_run import model_on
from models.forward.test_packing import gradients, stock_sum
from tiny import FAMILIES, pack
from tiny import examples as some_examples
from toque.models.forward import flex_attention
from toque.models.forward.attention import attention_of
from toque.models.forward.flex_attention import kernels_on
from toque.models.forward.loss import loss_sum

TOLERANCE = 1e-3
"""Of a gradient's norm; products of float32 on a GPU may be rounded to TF32."""


@pytest.mark.parametrize("asked", ["auto", "flex", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_each_example_alone(device, family, asked):
    model, examples = (
        model_on(device, family, dropout=0.0, attention=asked),
        some_examples(14),
    )
    chosen = attention_of(model, device)
    best = "segments" if device.type == "cpu" else "flex"
    assert (chosen.name, chosen.notes) == (best if asked == "auto" else asked, ())
    loss = loss_sum(
        model, pack(family, [examples[:6], examples[6:7], examples[7:]]).to(device)
    )
    loss.backward()
    loss = loss.detach()
    ours = gradients(model)
    true = sum(stock_sum(model, example) for example in examples)
    true.backward()
    assert float(loss) == pytest.approx(float(true.detach()), rel=TOLERANCE / 4)
    theirs = gradients(model)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        apart = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-2)
        assert apart < TOLERANCE, f"{name}: {apart:.1e}"


@pytest.mark.parametrize("size", [32, 64, 128])
@pytest.mark.parametrize("precise", [True, False], ids=["exact", "bf16"])
@pytest.mark.parametrize("biased", [True, False])
def test_dropout_of_flex_is_exact(device, biased, precise, size):
    """Forward and backward, hash included, against softmax, then mask, then scale."""
    batch = pack("gpt2", [some_examples(9)[:5], some_examples(9)[5:]]).to(device)
    mask = flex_attention.decoder_masks(batch).self_attention
    n_rows, length = batch.segments.shape
    exact = torch.float64 if device.type == "cpu" else torch.float32
    close = 3e-2 if not precise else 1e-7 if device.type == "cpu" else 2e-3
    dtype = exact if precise else torch.bfloat16
    options = flex_attention.DEFAULT_KERNELS[0]
    if device.type == "cuda":
        found = kernels_on(device, dtype, size, biased=biased)
        assert found.options is not None, found.why
        options = found.options
    made = torch.Generator().manual_seed(0)
    shapes = [(n_rows, 2, length, size)] * 4 + [(1, 2, length, length)]
    drawn = [
        torch.randn(shape, generator=made, dtype=exact).to(device) for shape in shapes
    ]
    slope = drawn.pop(3)
    leaves = [t.to(dtype).requires_grad_() for t in drawn[:3]]
    leaves += [t.requires_grad_() for t in drawn[3:] if biased]
    q, k, v, bias = (*leaves, None)[:4]
    pair = [
        torch.randint(-(2**31), 2**31, (n_rows, length), device=device)
        for _ in range(2)
    ]
    how = {
        "bias": bias,
        "scale": 0.2,
        "dropout": 0.25,
        "options": options,
        "pair": pair,
    }
    ours = flex_attention.attend(q, k, v, mask, **how)

    sizes = (n_rows, 2, length, length)
    _, _, i, j = torch.meshgrid(
        *(torch.arange(n, dtype=torch.int32, device=device) for n in sizes),
        indexing="ij",
    )
    numbers = flex_attention.head_numbers(pair[0], 2)[..., None]
    kept = flex_attention.pair_number(numbers, pair[1].int()[:, None, None]) >= 1 << 22
    assert 0.7 < kept.double().mean() < 0.8
    allowed = (batch.segments[:, None, :, None] == batch.segments[:, None, None]) & (
        i >= j
    )
    scores = q.to(exact) @ k.to(exact).transpose(-1, -2) * 0.2 + (
        0.0 if bias is None else bias
    )
    shares = scores.masked_fill(~allowed, -torch.inf).softmax(-1) * kept / 0.75
    true = shares @ v.to(exact)
    torch.testing.assert_close(ours.to(exact), true, rtol=close, atol=close)
    pairs = zip(
        torch.autograd.grad(ours, leaves, slope.to(dtype)),
        torch.autograd.grad(true, leaves, slope),
        strict=True,
    )
    for mine, theirs in pairs:
        assert (mine - theirs).norm() / theirs.norm() < close


BLOCKS = [{}, *flex_attention._FORWARD, *flex_attention._BACKWARD]


@pytest.mark.parametrize(
    "blocks", BLOCKS, ids=lambda of: "x".join(map(str, of.values()))
)
def test_kernels_of_all_blocks_that_fit_compute_the_definition(device, blocks):
    by = {**flex_attention._TORCH_BLOCKS, **blocks}
    try:
        apart = flex_attention._largest_error(
            device, torch.bfloat16, 64, by, biased=True
        )
    except RuntimeError as error:
        if "Required" not in str(error):
            raise
        pytest.skip(str(error).splitlines()[0])
    assert apart < flex_attention._TOLERANCE[torch.bfloat16]
