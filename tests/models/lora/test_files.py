"""Adapter files that are equal when the adapters are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, save

import tiny
from toque.config.schema_methods import AdapterConfig
from toque.models.lora.adapter_files import write_adapter
from toque.models.lora.layers import attach
from toque.storage.array_headers import sort_metadata
from toque.storage.atomic import sha256_of

WRITE = """
import pathlib, sys
from models.lora.test_files import write
write(pathlib.Path(sys.argv[1]))
"""


def write(folder: Path) -> None:
    """An adapter whose configuration names more modules than a set keeps in order."""
    model = tiny.make("t5")
    attach(model, AdapterConfig(r=2, target_modules="all"), base="nowhere", seed=3)
    folder.mkdir()
    write_adapter(model, folder, base_hash="c0ffee")


def test_fault_61_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    write(tmp_path / "here")
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent.parent)])
    words = [sys.executable, "-c", WRITE, str(tmp_path / "another process")]
    subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, check=True)
    found = [
        {file.name: sha256_of(file) for file in folder.iterdir()}
        for folder in tmp_path.iterdir()
    ]
    assert sorted(found[0]) == ["adapter_config.json", "adapter_model.safetensors"]
    assert found == [found[0]] * 2
    with safe_open(tmp_path / "here/adapter_model.safetensors", framework="pt") as file:
        assert file.metadata()["toque_base_sha256"] == "c0ffee"


def test_sorting_keeps_every_tensor_and_its_alignment() -> None:
    tensors = {"b": torch.arange(5.0), "a": torch.arange(3, dtype=torch.int8)}
    metadata = {f"é key {i}": "x" * i for i in range(9)}
    written = {sort_metadata(save(tensors, metadata)) for _ in range(9)}
    assert len(written) == 1
    data = written.pop()
    assert int.from_bytes(data[:8], "little") % 8 == 0
    assert all(load(data)[name].equal(tensor) for name, tensor in tensors.items())
    assert sort_metadata(data) == data
