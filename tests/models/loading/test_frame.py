"""A base read matrix by matrix: the bits, the hash and the refusals of one that is read whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tiny import make, pack
from toque.config.schema_methods import AdapterConfig
from toque.errors import CheckpointError
from toque.models.forward.loss import loss_sum
from toque.models.loading.model_export import save_model
from toque.models.loading.pretrained import (
    check_folder,
    grow_vocabulary,
    load_frame,
    load_model,
    matrix_of,
)
from toque.models.lora.frozen import (
    base_sha256,
    frozen_matrices,
    hold_frozen,
    read_frozen,
)
from toque.models.lora.layers import attach
from toque.models.lora.quantised import Form, Int8

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, kind: str) -> Path:
    """As transformers or Toque writes it; GPT-2's as the hub has it, names without a prefix."""
    path = tmp_path / "model"
    save_model(make(kind), tmp_path, path, card="")
    if kind == "gpt2":
        tensors = load_file(path / "model.safetensors")
        bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        save_file(bare, path / "model.safetensors", {"format": "pt"})
    return path


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    grow_vocabulary(model, 63)
    attach(
        model, AdapterConfig(r=4, dropout=0.0), base="nowhere", seed=3, tokens=(61, 62)
    )
    return model


def read_whole(
    folder: Path, dtype: torch.dtype, form: Form | None
) -> tuple[PreTrainedModel, str]:
    model = adapted(load_model(str(folder)))
    base = base_sha256(model)
    hold_frozen(model, dtype, form)
    return model, base


def read_in_parts(
    folder: Path, dtype: torch.dtype, form: Form | None
) -> tuple[PreTrainedModel, str]:
    found = check_folder(str(folder))
    frame = load_frame(found)
    assert frame is not None
    model = adapted(frame)
    base = read_frozen(
        model, lambda n: matrix_of(found, model, n), dtype=dtype, form=form, device=CPU
    )
    return model, base


@pytest.mark.parametrize("form", [None, Int8()], ids=["plain", "int8"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"]
)
def test_the_same_model_to_the_bit(
    folder: Path, kind: str, dtype: torch.dtype, form: Form | None, some_examples
) -> None:
    (whole, first), (parts, second) = (
        read(folder, dtype, form) for read in (read_whole, read_in_parts)
    )
    assert first == second
    assert not parts.training
    ours, theirs = (
        dict(m.named_parameters()) | dict(m.named_buffers()) for m in (parts, whole)
    )
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(ours[name], tensor), name
    batch = pack(kind, [some_examples(3), some_examples(2, 1)])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        assert torch.equal(loss_sum(parts, batch), loss_sum(whole, batch))


def test_16_bit_files_too(tmp_path: Path) -> None:
    make("t5-v1.1").bfloat16().save_pretrained(tmp_path / "half")
    (whole, first), (parts, second) = (
        read(tmp_path / "half", torch.bfloat16, None)
        for read in (read_whole, read_in_parts)
    )
    assert first == second
    pairs = zip(whole.state_dict().values(), parts.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    kept = {n for n, p in parts.named_parameters() if p.dtype == torch.float32}
    assert any("shared" in n for n in kept)
    assert any("lora_A" in n for n in kept)
    assert not any(".wo." in n for n in kept)


def test_a_frame_has_no_memory_for_its_matrices_and_only_the_models_own_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m"
    make("llama").save_pretrained(path)
    frame = load_frame(check_folder(str(path)))
    assert frame is not None
    matrices = frozen_matrices(frame)
    assert len(matrices) == 14
    assert {m.weight.untyped_storage().nbytes() for m in matrices.values()} == {4}  # type: ignore[union-attr]
    tensors = load_file(path / "model.safetensors")
    lost = {n: t for n, t in tensors.items() if "layers.1.mlp.up" not in n}
    save_file(lost, path / "model.safetensors", {"format": "pt"})
    assert load_frame(check_folder(str(path))) is None
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        load_model(str(path))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    assert load_frame(check_folder(str(path))) is None
