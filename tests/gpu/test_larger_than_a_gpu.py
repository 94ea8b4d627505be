"""Models that one GPU has no room for: in bf16 on it, or in float32 over two, to the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tiny import EOS, FAMILIES, PAD, model_of
from toque.models.loading.device_map import memory_for_weights, parts_of, placement_of
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import load_model
from written import generate

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("family", FAMILIES)]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [7]]


@pytest.fixture
def folder(family: str, tmp_path: Path) -> Path:
    save_model(model_of(family), None, tmp_path / "model", card="", files={})
    return tmp_path / "model"


def texts(model: torch.nn.Module) -> list[list[int]]:
    return generate(model, PROMPTS, max_new_tokens=24, eos_id=EOS, pad_id=PAD)


def test_one_gpu_holds_it_in_bf16(family, folder):
    (first,) = list(memory_for_weights(torch.device("cuda", 0)))
    room = {first: parts_of(model_of(family), torch.float32).bytes - 1}
    model = load_model(str(folder), place=lambda found: placement_of(found, room))
    assert {(p.device, p.dtype) for p in model.parameters()} == {
        (first, torch.bfloat16)
    }
    assert texts(model) == texts(model_of(family).to(torch.bfloat16).to(first))


def test_two_gpus_write_the_texts_of_one(family, folder):
    devices = list(memory_for_weights(torch.device("cuda")))[:2]
    if len(devices) < 2:
        pytest.skip("it needs two GPUs")
    most = parts_of(model_of(family), torch.float32).bytes - 1
    model = load_model(
        str(folder),
        place=lambda found: placement_of(found, dict.fromkeys(devices, most)),
    )
    assert {p.device for p in model.parameters()} == set(devices)
    assert texts(model) == texts(model_of(family).to(devices[0]))
