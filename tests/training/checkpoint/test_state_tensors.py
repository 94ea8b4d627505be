from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from toque.errors import CheckpointError
from toque.training.checkpoint.resume import load_model_tensors, model_tensors
from toque.training.checkpoint.tensor_files import bytes_of, opened_tensors, write_tensors


def test_views_and_transposes_are_written_as_they_read(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {"t": base.T, "row": base[1], "base": base, "nan": torch.tensor([float("nan"), -0.0])}
    write_tensors(tensors, tmp_path / "a")
    back = load_file(tmp_path / "a")
    assert torch.equal(back["t"], base.T)
    assert torch.equal(back["row"], base[1])
    assert torch.equal(back["base"], base)
    assert back["nan"].view(torch.int32).tolist() == tensors["nan"].view(torch.int32).tolist()
    assert bytes_of(tensors) == 48 + 16 + 48 + 8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "claims a header"),
        ((10**10).to_bytes(8, "little") + b"{}", "claims a header of 10,000,000,000 bytes"),
        ((2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        (b"\x80\x04\x95 a pickle, say, of some length", "claims a header"),
        (None, "cannot be read: No such file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message), opened_tensors(path):
        pass


def test_tied_parameters_come_once_and_buffers_are_state(tiny_model):
    names = model_tensors(tiny_model).keys()
    assert "embed.weight" in names
    assert "head.weight" not in names
    assert "scale" in names


def test_loading_keeps_ties_and_copies(tiny_model):
    saved = {n: t.clone() for n, t in model_tensors(tiny_model).items()}
    with torch.no_grad():
        for p in tiny_model.parameters():
            p.zero_()
    load_model_tensors(tiny_model, saved, where="x")
    assert tiny_model.head.weight is tiny_model.embed.weight
    assert torch.equal(tiny_model.embed.weight, saved["embed.weight"])


def test_each_difference_is_named_and_nothing_is_loaded(tiny_model):
    saved = {n: t.clone() for n, t in model_tensors(tiny_model).items()}
    saved["norm.weight"] = torch.zeros(3)
    saved["norm.bias"] = saved["norm.bias"].double()
    saved["extra"] = saved.pop("scale")
    before = tiny_model.embed.weight.detach().clone()
    saved["embed.weight"].zero_()
    with pytest.raises(CheckpointError) as error:
        load_model_tensors(tiny_model, saved, where="step-9")
    for part in ("norm.weight is float32 3", "norm.bias is float64", "extra is unk", "scale is mi"):
        assert part in str(error.value)
    assert torch.equal(tiny_model.embed.weight, before)
