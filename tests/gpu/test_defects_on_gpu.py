"""What the fake card showed, on a real one: settings that are read once, and the head's bytes."""

import subprocess
import sys

import pytest
import torch

from toque.models.forward.loss import cross_entropy_sum, logits_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA GPU is visible here"
    ),
]
_SETTLED = """
import torch
from toque.hardware.devices import device_named
device = device_named("auto")
torch.empty(2, 2, device=device) @ torch.empty(2, 2, device=device)  # not deterministic
torch.use_deterministic_algorithms(True)
torch.empty(2, 2, device=device) @ torch.empty(2, 2, device=device)
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""


def test_what_cuda_reads_once_is_set_in_time(monkeypatch):
    for name in (
        "CUBLAS_WORKSPACE_CONFIG",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
    ):
        monkeypatch.delenv(name, raising=False)
    command = [sys.executable, "-c", _SETTLED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def test_the_head_takes_the_bytes_that_are_counted():
    rows, vocabulary, width = 512, 32_128, 2
    hidden = torch.randn(3 * rows, width, device="cuda", requires_grad=True)
    weight = torch.randn(vocabulary, width, device="cuda", requires_grad=True)
    labels = torch.zeros(3 * rows, dtype=torch.int64, device="cuda")

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            cross_entropy_sum(
                hidden, weight, labels, chunk_rows=rows, n_labels=len(labels)
            )
        return torch.cuda.max_memory_allocated() - before

    peak()  # cuBLAS takes its workspace
    assert peak() == pytest.approx(
        logits_bytes(vocabulary, "cuda", positions=rows), rel=0.05
    )
