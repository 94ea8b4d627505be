"""The chunked head: the loss and gradients of F.cross_entropy, without its memory."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from toque.batch import IGNORE
from toque.models.forward.loss import cross_entropy_sum

N, D, V = 23, 6, 17


def is_product(name):
    return "mm" in name or "linear_pointwise" in name  # torch's own library, or oneDNN


def inputs(dtype=torch.float32, n=N, v=V):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(n, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(v, D, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(v, generator=generator, dtype=dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[::4] = IGNORE
    return hidden, weight, bias, labels


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk_rows", [1, 5, 1000, None])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_cross_entropy(smoothing, chunk_rows, with_bias):
    hidden, weight, bias, labels = inputs()
    wrt = (hidden, weight, bias) if with_bias else (hidden, weight)
    bias = bias if with_bias else None
    how = {"smoothing": smoothing, "chunk_rows": chunk_rows}
    ours = cross_entropy_sum(hidden, weight, labels, bias=bias, **how)
    logits, stock = (
        F.linear(hidden, weight, bias),
        {"reduction": "sum", "ignore_index": IGNORE},
    )
    theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing, **stock)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for mine, other in zip(
        torch.autograd.grad(3.0 * ours, wrt),
        torch.autograd.grad(3.0 * theirs, wrt),
        strict=True,
    ):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_kept_graph_gives_its_gradients_again():
    hidden, weight, _, labels = inputs()
    loss = cross_entropy_sum(hidden, weight, labels) / 3.0
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_labels_give_zero_and_zero_gradients():
    hidden, weight, _, labels = inputs()
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


class Elements(TorchDispatchMode):
    """Records the size of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.seen.append((str(func), tuple(out.shape)))
        return out


@pytest.mark.parametrize(
    ("wanted", "products"), [("all", 3), ("hidden", 2), ("nothing", 1)]
)
def test_the_logits_of_the_batch_never_exist(wanted, products):
    """Products a chunk: logits, hidden states, weight; positions without a label cost none."""
    hidden, weight, _, labels = inputs(n=4000, v=300)
    labels[50:] = IGNORE
    weight.requires_grad_(wanted == "all")
    with torch.set_grad_enabled(wanted != "nothing"), Elements() as record:
        loss = cross_entropy_sum(hidden, weight, labels, chunk_rows=8)
        if wanted != "nothing":
            loss.backward()
    assert loss.requires_grad == (wanted != "nothing")
    assert (weight.grad is not None) == (wanted == "all")
    largest = max(
        shape[0] for _, shape in record.seen if len(shape) == 2 and shape[1] == 300
    )
    assert largest == 8
    labelled = int((labels != IGNORE).sum())
    chunks = -(-labelled // 8)
    assert (
        len([name for name, _ in record.seen if is_product(name)]) == products * chunks
    )


def test_autocast_multiplies_in_bfloat16_and_sums_in_float32():
    hidden, weight, bias, labels = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, labels, bias=bias, chunk_rows=4)
    rounded = F.linear(hidden.bfloat16(), weight.bfloat16()).float() + bias
    expected = F.cross_entropy(rounded, labels, reduction="sum", ignore_index=IGNORE)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert weight.grad.dtype == torch.float32
    exact = torch.autograd.grad(
        cross_entropy_sum(hidden, weight, labels, bias=bias), (weight, hidden)
    )
    torch.testing.assert_close(weight.grad, exact[0], rtol=0.1, atol=0.05)
    torch.testing.assert_close(hidden.grad, exact[1], rtol=0.1, atol=0.05)


@pytest.mark.slow
# torch's own, wherever a graph breaks between tensors that need gradients
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_caller_gets_the_same():
    def caller(hidden, weight, labels):
        return cross_entropy_sum(hidden * 2.0, weight, labels) / 3.0

    hidden, weight, _, labels = inputs()
    expected = torch.autograd.grad(caller(hidden, weight, labels), (hidden, weight))
    compiled = torch.compile(caller)(hidden, weight, labels)
    for mine, other in zip(
        torch.autograd.grad(compiled, (hidden, weight)), expected, strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_what_does_not_fit_is_refused():
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match="must have the shapes"):
        cross_entropy_sum(hidden, weight, labels[:-1])
    with pytest.raises(ValueError, match=r"not 1\.5"):
        cross_entropy_sum(hidden, weight, labels, smoothing=1.5)


@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("chunk_rows", [5, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_labels_also_below_zero(dtype, chunk_rows, cap):
    hidden, weight, bias, labels = inputs()
    weights = torch.randn(labels.shape, generator=torch.Generator().manual_seed(4))
    how = {"bias": bias, "chunk_rows": chunk_rows, "cap": cap, "label_weights": weights}
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        ours = cross_entropy_sum(hidden, weight, labels, **how)
    logits = F.linear(hidden, weight, bias)
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    nats = F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)
    theirs = (weights * nats).sum()
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    wrt = (hidden, weight, bias)
    for mine, other in zip(
        torch.autograd.grad(ours, wrt), torch.autograd.grad(theirs, wrt), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=10 * tolerance, atol=tolerance)


def test_weights_of_another_shape_are_refused():
    hidden, weight, _, labels = inputs()
    with pytest.raises(ValueError, match="label_weights"):
        cross_entropy_sum(hidden, weight, labels, label_weights=torch.ones(3))
