"""Compiled products: no more are kept than a run's memory has room for, and the user may say."""

import os
import subprocess
import sys

import pytest
import torch

from toque.hardware.onednn import keep_fewer_kernels

SIZES = """
import sys
import torch
from toque.hardware.onednn import keep_fewer_kernels
if sys.argv[1] == "fewer":
    keep_fewer_kernels()
weight = torch.ones(16, 16)
for _ in range(2):
    for rows in range(1, 321):  # more than are kept
        torch.ops.mkldnn._linear_pointwise(torch.ones(rows, 16), weight, None, "none", [], "")
"""


def made(mode: str) -> int:
    """Products compiled while each size is met twice, as oneDNN itself tells it."""
    settings = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"}
    unset = {name: text for name, text in os.environ.items() if name not in settings}
    said = subprocess.run(
        [sys.executable, "-c", SIZES, mode],
        env=unset | {"ONEDNN_VERBOSE": "profile_create"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Linear layers are inner products up to torch 2.12.
    kinds = (",matmul,", ",inner_product,")
    made = [line for line in said.splitlines() if "create:cache_miss" in line]
    return sum(any(kind in line for kind in kinds) for line in made)


@pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch without oneDNN"
)
def test_old_products_are_forgotten() -> None:
    everything, fewer = made("all"), made("fewer")
    assert everything >= 320
    assert fewer == 2 * everything


def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1000")
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1001")
    keep_fewer_kernels()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1000"
    assert os.environ["LRU_CACHE_CAPACITY"] == "1001"
