"""An adapter beside its base, as it was trained: the logits and texts of the merged model."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from models.loading.test_beside_adapters import run_beside
from models.lora.test_layers import disturb
from tiny import EOS, KINDS, PAD, make
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import load_with_adapter, load_with_adapters
from toque.models.lora.adapter_files import write_adapter
from toque.models.lora.frozen import PLAIN, FrozenFormat, computing, frozen_matrices
from toque.models.lora.quantised import QuantisedLinear, form_named
from written import generate

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7]]
BF16 = torch.bfloat16
# Distance of the logits, as a share of their length: products of a card may be TF32's, bf16 has 8
# bits; what is held in fewer was rounded to them before, or the draw of weights would decide.
APART = {
    PLAIN: 5e-3, FrozenFormat(BF16): 0.05, FrozenFormat(BF16, "int8"): 0.05,
    FrozenFormat(BF16, "nf4"): 0.05,
}  # fmt: skip


def logits(model) -> torch.Tensor:
    ids = torch.arange(3, 35, device=model.device).view(2, 16)
    extra = (
        {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    )
    with computing(model), torch.no_grad():
        return model(input_ids=ids, **extra).logits.float()


def texts(model) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=16, eos_id=EOS, pad_id=PAD)


def rounded(model: PreTrainedModel, held: FrozenFormat) -> PreTrainedModel:
    """The model, its matrices as the format gives them back."""
    if held.quantised is not None:
        form = form_named(held.quantised)
        for layer in frozen_matrices(model).values():
            matrix = (
                layer.weight.data.T if isinstance(layer, Conv1D) else layer.weight.data
            )
            matrix.copy_(QuantisedLinear(matrix, None, form).matrix(torch.float32))
    return model


@pytest.mark.parametrize("held", APART, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_run_and_close_to_the_merged_model(device, kind, held, tmp_path):
    if held.quantised == "nf4":
        pytest.importorskip("bitsandbytes")
    base, folder = tmp_path / "base", tmp_path / "one"
    save_model(rounded(make(kind), held), None, base, card="")
    run, base_hash = run_beside(base).placed(held, device)
    disturb(run)
    folder.mkdir()
    write_adapter(run.eval(), folder, base_hash=base_hash)
    used = load_with_adapters({"one": folder}, [held], device)
    assert {t.device.type for t in (*used.parameters(), *used.buffers())} == {
        device.type
    }
    assert torch.equal(logits(used), logits(run))
    assert texts(used) == texts(run)
    merged = load_with_adapter(folder).to(device)
    expected = logits(merged)
    assert (logits(used) - expected).norm() < APART[held] * expected.norm()
    if held == PLAIN:
        assert texts(used) == texts(merged)
