"""Tests of what a GPU does, and the same bodies on a CPU, so that they are tried in every run.

`pytest tests/gpu -m gpu` on a machine with CUDA; bench/gpu.sh runs them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from gpu_run import Losses, run_on
from toque.training.runtime import set_deterministic


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU is visible here")
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.device(request.param)
    set_deterministic(before)
    if request.param == "cuda":
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


@pytest.fixture
def run(device: torch.device, tmp_path: Path) -> partial[tuple[object, Losses]]:
    """`run(family, ...)`: a trainer on the device, continuing from its newest checkpoint."""
    return partial(run_on, device, folder=tmp_path / "run")
