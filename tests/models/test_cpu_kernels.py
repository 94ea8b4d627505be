"""The C kernels against torch's operators in float32, and what happens where they are missing."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from toque.models.cpu_kernels import fused, library

BF16 = torch.bfloat16
needs_kernels = pytest.mark.skipif(
    library.library() is None, reason=f"no C kernels: {library.why_not()}"
)
WIDTHS = (1, 15, 16, 33, 384)
"""Less than a vector, whole vectors, and a rest."""


def drawn(*shape: int, spread: float = 1.0, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=made) * spread).to(BF16)


def near(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Rounded once: within half a unit of bfloat16's last place, and a float32's breath."""
    exact = exact.detach()
    assert torch.isfinite(found).all()
    allowed = exact.abs() * 2**-8 + 2e-6 * float(exact.abs().max())
    assert ((found.float() - exact).abs() <= allowed).all()


@needs_kernels
@pytest.mark.parametrize("vocabulary", [2, 17, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_heads_losses_and_slopes_are_cross_entropys(vocabulary, with_bias):
    logits = drawn(9, vocabulary + 7, spread=4.0)
    targets = torch.arange(9) % vocabulary
    bias = drawn(vocabulary, seed=1).float() if with_bias else None
    exact = logits[:, :vocabulary].float() + (0.0 if bias is None else bias)
    exact.requires_grad_()
    expected = functional.cross_entropy(exact, targets, reduction="none")
    (slopes,) = torch.autograd.grad(expected.sum(), exact)
    losses = fused.head_slopes(logits, targets, bias, vocabulary)
    assert torch.allclose(losses, expected, atol=2e-5)
    near(logits[:, :vocabulary], slopes)
    assert not logits[:, vocabulary:].any()


@needs_kernels
def test_a_label_outside_the_vocabulary_is_refused_before_anything_is_written():
    logits = drawn(2, 16)
    before = logits.clone()
    for target in (-100, 10):
        with pytest.raises(IndexError, match="vocabulary of 10"):
            fused.head_slopes(logits, torch.tensor([0, target]), None, 10)
    assert torch.equal(logits, before)


def attended(scores, keys, *, scale, bias, causal):
    """The definition: [H, G, t, s] in float32, zero at keys that are not seen."""
    _, _, t, s = scores.shape
    exact = scores.float() * scale
    distance = torch.arange(s)[None] - torch.arange(t)[:, None]
    if bias is not None:
        exact = exact + bias[:, distance + bias.shape[1] // 2][:, None]
    hidden = torch.arange(s)[None, None] >= keys[:, None, None]
    if causal:
        hidden = hidden | (distance > 0)[None]
    return exact.masked_fill(hidden, -torch.inf).softmax(-1)


@needs_kernels
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("t", "s"), [(32, 32), (5, 40), (64, 33)])
def test_attention_weights_and_their_gradient_are_the_softmaxs(causal, with_bias, t, s):
    heads, keys, scale = 3, torch.tensor([s, s - 1, 1, 17]), 0.3
    scores, slopes = drawn(heads, 4, t, s, spread=3.0), drawn(heads, 4, t, s, seed=1)
    zero = max(t, s) - 1
    bias = drawn(heads, 2 * zero + 1, seed=2).float().requires_grad_() if with_bias else None
    exact = scores.float().requires_grad_()
    expected = attended(exact, keys, scale=scale, bias=bias, causal=causal)
    fused.attention_weights(scores, keys, scale=scale, bias=bias, causal=causal)
    near(scores, expected)

    # The kernel's gradient is by the rounded weights, so the definition's is taken of them, too.
    p, g = scores.float(), slopes.float()
    inner = p * (g - (p * g).sum(-1, keepdim=True))
    of_bias = None if bias is None else torch.zeros_like(bias)
    fused.attention_weights_backward(
        scores, slopes, keys, scale=scale, of_bias=of_bias, causal=causal
    )
    near(slopes, inner * scale)
    if of_bias is not None:
        distance = torch.arange(s)[None] - torch.arange(t)[:, None] + zero
        sums = torch.zeros(heads, 2 * zero + 1)
        sums.index_add_(1, distance.flatten(), inner.sum(1).flatten(1))
        assert torch.allclose(of_bias, sums, atol=1e-5)


@needs_kernels
def test_a_bias_that_is_too_short_for_its_scores_is_refused():
    scores = drawn(2, 1, 8, 8)
    with pytest.raises(ValueError, match="a bias"):
        fused.attention_weights(
            scores, torch.tensor([8]), scale=1.0, bias=torch.zeros(2, 13), causal=False
        )


ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@needs_kernels
@pytest.mark.parametrize("kind", sorted(ACTIVATIONS))
@pytest.mark.parametrize("width", WIDTHS)
def test_activations_and_gates_are_torchs_in_float64_rounded_once(kind, width):
    values, up, slopes = (drawn(7, width, spread=3.0, seed=i) for i in range(3))
    exact, other = values.double().requires_grad_(), up.double().requires_grad_()
    plain = ACTIVATIONS[kind](exact)
    near_tail(fused.activate(values, kind, gated=False), plain)
    (of_plain,) = torch.autograd.grad(plain, exact, slopes.double(), retain_graph=True)
    near_tail(fused.activate_backward(values, slopes, kind, gated=False), of_plain)

    both = torch.cat([values, up], -1)
    gated = plain * other
    near_tail(fused.activate(both, kind, gated=True), gated)
    parts = torch.autograd.grad(gated, (exact, other), slopes.double())
    near_tail(fused.activate_backward(both, slopes, kind, gated=True), torch.cat(parts, -1))


def near_tail(found, exact):
    """Half a unit of bfloat16's last place, and 3e-6, which is what formula 7.1.26 allows."""
    exact = exact.detach().float()
    assert ((found.float() - exact).abs() <= exact.abs() * 2**-8 + 3e-6).all()


@needs_kernels
@pytest.mark.parametrize("rows", [1, 64, 150])
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm_and_its_gradients_are_the_formulas(rows, width):
    values = drawn(rows, width).float()
    values = (values + 0.1 * values.sign()).requires_grad_()  # near zero the gradient cancels
    weight = torch.linspace(0.5, 1.5, width).requires_grad_()
    slopes = drawn(rows, width, seed=3)
    exact = weight * values * values.square().mean(-1, keepdim=True).add(1e-6).rsqrt()
    of_values, of_weight = torch.autograd.grad(exact, (values, weight), slopes.float())
    out, scales = fused.rms_norm(values.detach(), weight, 1e-6)
    near(out, exact)
    back, summed = fused.rms_norm_backward(values.detach(), weight, slopes, scales)
    assert torch.allclose(back, of_values, atol=1e-5)
    assert torch.allclose(summed, of_weight, atol=1e-4)


@needs_kernels
def test_tokens_are_stacked_by_example_and_put_back():
    tokens = drawn(10, 3, 5)
    counts, length = torch.tensor([2, 4]), 4
    where = torch.tensor([7, 8, 8, 8, 1, 2, 3, 4])
    stacked = fused.stack(tokens, where, counts, length)
    assert torch.equal(stacked, tokens[where].view(2, 4, 3, 5).permute(2, 0, 1, 3))
    hollow = fused.stack(tokens, where, counts, length, hollow=True)
    assert not hollow[:, 0, 2:].any()
    assert torch.equal(hollow[:, 1], stacked[:, 1])
    back = torch.zeros_like(tokens)
    fused.unstack(stacked, where, counts, back)
    real = torch.tensor([7, 8, 1, 2, 3, 4])
    assert torch.equal(back[real], tokens[real])
    assert not back[torch.tensor([0, 5, 6, 9])].any()


@needs_kernels
@pytest.mark.parametrize("turned", [4, 10, 64])
def test_rotary_positions_turn_the_first_heads_and_turn_back(turned):
    packed = drawn(6, 4, 64)
    angles = drawn(6, turned // 2, seed=1).float().repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    exact = packed.float()
    first, second = exact[:, :3, : turned // 2], exact[:, :3, turned // 2 : turned]
    c, s = cos[:, None, : turned // 2], sin[:, None, : turned // 2]
    expected = exact.clone()
    expected[:, :3, :turned] = torch.cat((first * c - second * s, second * c + first * s), -1)
    found = packed.clone()
    fused.rotate(found, cos, sin, 3)
    near(found, expected)
    fused.rotate(found, cos, sin, 3, back=True)
    assert torch.allclose(found.float(), packed.float(), atol=0.03)


@needs_kernels
@pytest.mark.parametrize("rows", [1, 64, 130])
def test_sums_by_column_and_in_place_are_float32s(rows):
    values = drawn(rows, 37)
    assert torch.allclose(fused.column_sums(values), values.float().sum(0), atol=1e-4)
    total = torch.full((rows, 37), math.nan)
    fused.add(total, values, first=True)
    fused.add(total, values, first=False)
    assert torch.equal(total, values.float() * 2)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_results_have_the_same_bits_with_any_number_of_threads(threads):
    def everything() -> list[torch.Tensor]:
        logits, scores, slopes = drawn(33, 500), drawn(2, 3, 40, 40), drawn(2, 3, 40, 40, seed=1)
        keys, of_bias = torch.tensor([40, 9, 33]), torch.zeros(2, 79)
        losses = fused.head_slopes(logits, torch.arange(33), None, 500)
        how = {"scale": 0.5, "causal": True}
        fused.attention_weights(scores, keys, bias=torch.ones(2, 79), **how)
        fused.attention_weights_backward(scores, slopes, keys, of_bias=of_bias, **how)
        values, weight = torch.linspace(-3, 3, 200 * 24).view(200, 24), torch.ones(24)
        _, scales = fused.rms_norm(values, weight, 1e-6)
        norm = fused.rms_norm_backward(values, weight, drawn(200, 24), scales)
        return [losses, logits, scores, slopes, of_bias, *norm, fused.column_sums(drawn(200, 24))]

    before = torch.get_num_threads()
    usual = everything()
    try:
        torch.set_num_threads(threads)
        again = everything()
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, usual, again))


@needs_kernels
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_to_be_found(bad):
    logits = drawn(1, 40)
    logits[0, 3] = bad
    assert not torch.isfinite(fused.head_slopes(logits, torch.tensor([5]), None, 40)).any()
    assert not torch.isfinite(logits[0, :40]).any()
    for kind in ACTIVATIONS:
        values = torch.full((1, 16), bad, dtype=BF16)
        assert not torch.isfinite(fused.activate(values, kind, gated=False)).any()
    scores = drawn(1, 1, 32, 32)
    scores[0, 0, 31, 2] = bad
    fused.attention_weights(scores, torch.tensor([32]), scale=1.0, bias=None, causal=True)
    assert not torch.isfinite(scores[0, 0, 31]).any()
    assert torch.isfinite(scores[0, 0, :31]).all()


@needs_kernels
@pytest.mark.parametrize("other", ["strides", "float32", "float16"])
def test_a_tensor_that_a_kernel_would_misread_is_refused(other):
    values = drawn(8, 8)
    values = values.T if other == "strides" else values.to(getattr(torch, other))
    with pytest.raises(ValueError, match="a kernel reads contiguous"):
        fused.column_sums(values)


@needs_kernels
def test_tensors_without_memory_get_results_without_memory():
    with FakeTensorMode():
        values = torch.empty(4, 32, dtype=BF16)
        assert fused.activate(values, "silu", gated=True).shape == (4, 16)


@pytest.fixture
def fresh(monkeypatch):
    """`library()` as a new process would find it, in this test alone."""

    def forget() -> None:
        library.library.cache_clear()
        library._built.cache_clear()

    forget()
    yield monkeypatch
    monkeypatch.undo()
    forget()


@needs_kernels
@pytest.mark.parametrize("kind", ["no gcc", "no instructions", "fails", "hangs", "no OpenMP"])
def test_where_they_cannot_be_compiled_there_is_a_reason_and_nothing_is_left(fresh, tmp_path, kind):
    fresh.setattr(tempfile, "tempdir", str(tmp_path))
    if kind == "no gcc":
        fresh.setattr(shutil, "which", lambda _: None)
    elif kind == "no instructions":
        fresh.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    elif kind == "no OpenMP":
        fresh.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    else:
        script = tmp_path / "gcc"
        script.write_text(
            "#!/bin/sh\n" + ("sleep 9\n" if kind == "hangs" else "echo no >&2; exit 1\n")
        )
        script.chmod(0o700)
        fresh.setattr(shutil, "which", lambda _: str(script))
        fresh.setattr(library, "_SECONDS", 0.2)
    assert library.library() is None
    expected = {"no gcc": "no gcc", "no instructions": "AVX512-BF16", "no OpenMP": "OpenMP"}
    assert expected.get(kind, "failed") in str(library.why_not())
    assert not list(tmp_path.glob("toque-kernels-*"))


@needs_kernels
def test_the_kernels_share_torchs_openmp_and_leave_no_file(tmp_path):
    code = f"""
import tempfile, torch
tempfile.tempdir = {str(tmp_path)!r}
torch.ones(9) @ torch.ones(9)
from toque.models.cpu_kernels.library import library
assert library() is not None
maps = open("/proc/self/maps").read().split()
print(len({{name for name in maps if "gomp" in name or "iomp" in name or "libomp" in name}}))
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "1"
    assert not list(Path(tmp_path).iterdir())
