"""Float32 products by oneDNN: the loss and gradients of torch's own, to rounding."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from toque.hardware import onednn
from toque.models.forward import cpu_linear
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.loss import loss_sum


@pytest.fixture(autouse=True)
def _anywhere(monkeypatch):
    """The rule says yes on this machine too, if its torch has oneDNN at all."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    for module in (onednn, cpu_linear):
        monkeypatch.setattr(module, "onednn_is_faster", lambda: True)


def gradients_of(loss, parameters):
    return torch.autograd.grad(loss, list(parameters))


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("kind", ["linear", "no bias", "GPT-2's"])
def test_a_layer_and_its_gradients(kind, rows):
    layer = (
        Conv1D(40, 48)
        if kind == "GPT-2's"
        else nn.Linear(48, 40, bias=kind == "linear")
    )
    width = (
        layer.weight.shape[0] if isinstance(layer, Conv1D) else layer.weight.shape[1]
    )
    states = torch.randn(2, rows, width, requires_grad=True)
    slope = torch.randn(2, rows, 88 - width)
    wanted = [states, *layer.parameters()]
    before = layer(states)
    exact = gradients_of((before * slope).sum(), wanted)
    holder = nn.Sequential(layer)
    assert use_cpu_layers(holder) == 1
    after = layer(states)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    for found, was in zip(
        gradients_of((after * slope).sum(), wanted), exact, strict=True
    ):
        torch.testing.assert_close(found, was, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk_rows", [3, None])
def test_loss_and_gradients_of_a_packed_batch(
    kind, tiny, some_examples, packed, chunk_rows
):
    made = some_examples(6)
    batch = packed(kind, [made[:4], made[4:]])
    results = []
    for swap in (False, True):
        model = tiny(kind)
        if swap:
            assert use_cpu_layers(model) > 0
        loss = loss_sum(model, batch, chunk_rows=chunk_rows)
        torch.autograd.backward(loss)
        results.append(
            (float(loss.detach()), {n: p.grad for n, p in model.named_parameters()})
        )
    (before, exact), (after, found) = results
    assert after == pytest.approx(before, rel=1e-5)
    for name, gradient in exact.items():
        if gradient is not None:
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-3, atol=1e-4, msg=name
            )


def test_autocast_and_doubles_go_the_usual_way():
    layer = nn.Sequential(nn.Linear(8, 8))
    use_cpu_layers(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16
    assert layer.double()(torch.randn(2, 8).double()).dtype == torch.float64
    assert layer.float()(torch.randn(0, 8)).shape == (0, 8)
