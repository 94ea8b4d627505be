"""Adapter files that are equal when the adapters are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save

from toque.storage.array_headers import with_sorted_metadata
from toque.storage.atomic import sha256_of

WRITE = """
import sys
from pathlib import Path

import tiny
from toque.models.lora.adapter_files import write_adapter
from toque.models.lora.layers import attach, resolve

model = tiny.make(sys.argv[1])
attach(model, resolve(model, kind="lora", r=2, target_modules="auto"), base="nowhere", seed=3)
for name in ("a", "b"):
    folder = Path(sys.argv[2]) / name
    folder.mkdir()
    write_adapter(model, folder, base_hash="c0ffee")
"""


def test_fault_61_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    found = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent.parent)])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": str(number)}
        words = [sys.executable, "-c", WRITE, "t5", str(tmp_path / str(number))]
        subprocess.run(words, env=environment, check=True)
        for folder in sorted((tmp_path / str(number)).iterdir()):
            found.append({file.name: sha256_of(file) for file in folder.iterdir()})
    assert sorted(found[0]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert found == [found[0]] * 4
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["toque_base_sha256"] == "c0ffee"


def test_sorting_keeps_every_tensor_and_its_alignment() -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.arange(3, dtype=torch.int8)}
    metadata = {f"é key {i}": "x" * i for i in range(9)}
    written = {with_sorted_metadata(save(tensors, metadata)) for _ in range(9)}
    assert len(written) == 1
    data = written.pop()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert all(load(data)[name].equal(tensor) for name, tensor in tensors.items())
    assert with_sorted_metadata(data) == data
