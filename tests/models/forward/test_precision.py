"""What is float32 under bf16 autocast, where a rounding would be felt."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toque.models.forward.loss import loss_sum

_EXACT = ("softmax", "layer_norm", "rsqrt", "logsumexp")


class Seen(TorchDispatchMode):
    """Number formats of the operations that must be exact, and of matrix products.

    A softmax may write its shares in 16 bits, which the next product reads, if they are those of a
    softmax in float32, rounded once: that is checked bit by bit, and counts as float32.
    """

    def __init__(self):
        super().__init__()
        self.exact, self.products = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__
        shares = None
        if (
            "softmax" in name
            and "backward" not in name
            and args[0].dtype == torch.bfloat16
        ):
            shares = (
                args[0].float().softmax(args[1]).to(torch.bfloat16)
            )  # its input may be its out
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple | list) else out
        if shares is not None and torch.equal(first, shares):
            self.exact.add((name, torch.float32))
        elif any(word in name for word in _EXACT):
            self.exact.add((name, first.dtype))
        elif name.startswith(("mm", "addmm", "bmm")):
            self.products.add(first.dtype)
        return out


def test_norms_softmax_and_loss_are_float32_in_bf16(
    family_kind, tiny, some_examples, packed
):
    model, made = tiny(family_kind), some_examples(5)
    batch = packed(family_kind, [made[:2], made[2:]])
    exact = float(loss_sum(model, batch).detach())
    stream = []
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            module.register_forward_hook(lambda _m, _a, out: stream.append(out.dtype))
    with Seen() as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_sum(model, batch)
    assert torch.bfloat16 in seen.products
    assert {dtype for _, dtype in seen.exact} == {torch.float32}, seen.exact
    assert set(stream) == {torch.float32}
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) - exact) < 0.02 * exact
