"""The mean of tensors in several checkpoints."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from toque.errors import CheckpointError
from toque.training.checkpoint.averaging import MeanTensors
from toque.training.checkpoint.tensor_files import open_whole, write_tensors


def mean_of(folder: Path, *checkpoints: dict[str, Tensor]) -> dict[str, Tensor]:
    opened, paths = [], [folder / f"{i}" for i in range(len(checkpoints))]
    for path, tensors in zip(paths, checkpoints, strict=True):
        write_tensors(tensors, path)
        opened.append(open_whole(path))
    return dict(MeanTensors(paths, [files.__enter__() for files in opened]))


def test_the_mean_is_rounded_once(tmp_path):
    """In bfloat16, 1 + 1/512 rounds to 1, so a sum in bfloat16 would lose the small terms."""
    values = [1.0, 1 / 512, 1 / 512, 1 / 512, 1 / 512, 1 / 512, 1 / 512, 1 / 512]
    parts = [{"w": torch.tensor([[v]], dtype=torch.bfloat16)} for v in values]
    expected = torch.tensor([[sum(values) / 8]]).to(torch.bfloat16)
    found = mean_of(tmp_path, *parts)["w"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert expected.item() != 1 / 8


def test_equal_checkpoints_give_the_same_bits(tmp_path):
    weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))
    assert torch.equal(mean_of(tmp_path, *[{"w": weights}] * 7)["w"], weights)


def test_integers_are_taken_from_the_first(tmp_path):
    counts = [{"n": torch.tensor(n)} for n in (5, 2)]
    assert mean_of(tmp_path, *counts)["n"] == 5


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"v": torch.zeros(3)}, "1 and .*0 cannot be averaged: only one of them has v"),
        ({"w": torch.zeros(4)}, "1 and .*0 cannot be averaged: w differs"),
        ({"w": torch.zeros(3).half()}, "w differs in its shape or type"),
    ],
)
def test_checkpoints_of_other_models_are_refused(tmp_path, other, words):
    with pytest.raises(CheckpointError, match=words):
        mean_of(tmp_path, {"w": torch.zeros(3)}, other)
