"""Bases too large in float32: read straight to the card, quantised there, activations moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import make, pack, uneven_examples
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.blocks import recompute_blocks, stop_recomputing
from toque.models.forward.loss import loss_sum
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import (
    check_folder,
    load_frame,
    load_model,
    matrix_of,
)
from toque.models.lora.frozen import base_sha256, hold_frozen, read_frozen
from toque.models.lora.layers import attach
from toque.models.lora.quantised import FormName, form_named

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
KINDS = ["t5-v1.1", "gpt2", "llama"]


def read(folder: Path, name: FormName | None):
    found = check_folder(str(folder))
    model = load_frame(found)
    assert model is not None
    attach(model, AdapterConfig(r=4, dropout=0.0), base="nowhere", seed=3)
    base = read_frozen(
        model,
        lambda n: matrix_of(found, model, n),
        dtype=torch.bfloat16,
        form=None if name is None else form_named(name),
        device=torch.device("cuda"),
    )
    return model, base


@pytest.mark.parametrize("name", [None, "int8", "nf4"])
@pytest.mark.parametrize("kind", KINDS)
def test_read_to_the_device_as_if_moved_there(kind, name, tmp_path):
    if name == "nf4":
        pytest.importorskip("bitsandbytes")
    save_model(make(kind), tmp_path, tmp_path / "m", card="")
    model, base = read(tmp_path / "m", name)
    whole = load_model(str(tmp_path / "m"))
    attach(whole, AdapterConfig(r=4, dropout=0.0), base="nowhere", seed=3)
    assert base_sha256(whole) == base
    whole.to("cuda")
    hold_frozen(whole, torch.bfloat16, None if name is None else form_named(name))
    ours, theirs = (
        dict(m.named_parameters()) | dict(m.named_buffers()) for m in (model, whole)
    )
    assert ours.keys() == theirs.keys()
    assert {t.device.type for t in ours.values()} == {"cuda"}
    assert all(
        torch.equal(ours[n], t) for n, t in theirs.items() if "inv_freq" not in n
    )
    made = uneven_examples(6)
    batch = pack(kind, [made[:3], made[3:]]).to(torch.device("cuda"))
    losses = []
    for one in (model, whole):
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(loss_sum(one, batch))
        torch.autograd.backward(losses[-1])
    assert torch.equal(*losses)
    slopes = [
        {n: p.grad for n, p in m.named_parameters() if p.requires_grad}
        for m in (model, whole)
    ]
    assert all(
        torch.equal(slopes[0][n], g) for n, g in slopes[1].items() if g is not None
    )


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_activations_give_the_same_bits_and_leave_the_card(kind):
    model = make(kind).to("cuda").train()
    made = uneven_examples(60)
    batch = pack(kind, [made[i : i + 2] for i in range(0, 60, 2)]).to(
        torch.device("cuda")
    )

    def update(*, offload: bool) -> tuple[dict[str, torch.Tensor], int]:
        stop_recomputing(model)
        recompute_blocks(model, offload=offload)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(7)
        before = torch.cuda.memory_allocated()
        loss = loss_sum(model, batch)
        kept = torch.cuda.memory_allocated() - before
        torch.autograd.backward(loss)
        return {
            n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }, kept

    plain, moved = update(offload=False), update(offload=True)
    assert all(torch.equal(gradient, moved[0][n]) for n, gradient in plain[0].items())
    assert moved[1] < plain[1]
