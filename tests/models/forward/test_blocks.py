"""Transformer blocks: recomputed to the bit, compiled, and what compiling took."""

import pytest
import torch
from torch import nn

from toque.models.forward.attention import use_attention
from toque.models.forward.blocks import (
    CompileSeconds,
    compile_blocks,
    recompute_blocks,
    stop_compiling,
    stop_recomputing,
)
from toque.models.forward.loss import loss_sum

# torch's compiler reads .grad of every tensor it meets, and warns itself about it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")


def computed(model, batch, precision=None):
    """Loss, gradients, and bytes autograd kept for backward."""
    model.train()
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)  # dropout
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_sum(model, batch)
        size = sum(kept.values())
    torch.autograd.backward(loss)
    gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    return float(loss.detach()), gradients, size


def same(one, other):
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("path", ["segments", "dense", "flex"])
def test_gradients_are_the_same_to_the_bit_and_memory_is_less(
    family_kind, path, precision, tiny, some_examples, packed
):
    model, made = tiny(family_kind), some_examples(9)
    use_attention(model, path)
    batch = packed(family_kind, [made[:3], made[3:4], made[4:9]])
    plain = computed(model, batch, precision)
    assert recompute_blocks(model) >= 2
    again = computed(model, batch, precision)
    same(plain, again)
    assert again[2] < 0.7 * plain[2]
    stop_recomputing(model)
    recompute_blocks(
        model, offload=True
    )  # that it leaves a GPU's memory is seen in tests/gpu
    same(plain, computed(model, batch, precision))
    stop_recomputing(model)
    last = computed(model, batch, precision)
    same(plain, last)
    assert last[2] == pytest.approx(
        plain[2], rel=0.1
    )  # counted by address, and some are reused


def test_frozen_inputs_and_no_gradient_are_fine(
    family_kind, tiny, some_examples, packed
):
    model, made = tiny(family_kind), some_examples(4)
    batch = packed(family_kind, [made[:2], made[2:]])
    for name, p in model.named_parameters():
        p.requires_grad_("norm" in name or "ln" in name)
    plain = computed(model, batch)
    recompute_blocks(model)
    same(plain, computed(model, batch))
    with torch.no_grad():
        torch.manual_seed(7)
        assert float(loss_sum(model, batch)) == plain[0]


def test_compiled_blocks_are_recomputed_too(tiny, some_examples, packed):
    model, made = tiny("gpt2"), some_examples(4)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attn_pdrop = 0.0
    batch = packed("gpt2", [made[:2], made[2:]])
    compile_blocks(model, backend="aot_eager")
    plain = computed(model, batch)
    recompute_blocks(model)
    again = computed(model, batch)
    same(plain, again)
    assert again[2] < 0.8 * plain[2]
    stop_recomputing(model)
    assert computed(model, batch)[2] == plain[2]
    stop_compiling(model)
    assert all(m._compiled_call_impl is None for m in model.modules())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


def test_seconds_come_with_a_shape_that_is_new():
    torch.compiler.reset()
    model = nn.Sequential(nn.ModuleList([Block()]))
    compile_blocks(model, backend="aot_eager")
    (block,) = model[0]
    seconds = CompileSeconds()
    assert seconds() == 0.0
    block(torch.ones(2, 4))
    assert seconds() > 0.0
    block(torch.ones(2, 4))
    assert seconds() == 0.0
    block(torch.ones(3, 4))
    assert seconds() > 0.0
