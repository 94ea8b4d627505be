"""Runs shared by processes give the losses of one: on GPUs as many as there are, on a CPU two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from tiny import shape_yaml
from toque.config.schema import TrainConfig
from toque.cooking.cookbook.recipes import write_cookbook

STRATEGIES = [
    name
    for name in get_args(TrainConfig.model_fields["strategy"].annotation)
    if name not in {"auto", "single"}
]
CONFIG = """
model: {{family: gpt2, tokenizer: "trained:512", shape: {shape}}}
data: {{sources: [{{path: "{folder}/cookbook.jsonl"}}], store: {folder}/store}}
train: {{stop_after: "6 steps", batch: "4096 tokens", compile: false, micro_batch_rows: 2,
  precision: float32, evaluate_every: "3 steps", save_every: "3 steps"}}
evaluation: {{max_examples: 8, generate: 0}}
observe: {{log_every: "1 step"}}
"""


@pytest.fixture
def kitchen(tmp_path: Path) -> Path:
    write_cookbook(tmp_path / "cookbook.jsonl", n=60, seed=3)
    shape = shape_yaml("gpt2", width=64, heads=2, positions=512, dropout=0.0)
    (tmp_path / "run.yaml").write_text(CONFIG.format(folder=tmp_path, shape=shape))
    return tmp_path


def losses(
    kitchen: Path, name: str, processes: int, *settings: str, on_a_cpu: bool
) -> list[float]:
    """Of a run by torchrun, every update."""
    command = [sys.executable, "-m"]
    if processes > 1:
        command += [
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            "-m",
        ]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_a_cpu else {}
    done = subprocess.run(
        [
            *command,
            "toque",
            "train",
            str(kitchen / "run.yaml"),
            f"run_dir={kitchen / name}",
            *settings,
        ],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        | hidden,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (kitchen / name / "metrics.jsonl").read_text().splitlines()
    return [e["loss"] for e in map(json.loads, lines) if e["event"] == "step"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
def test_processes_train_as_one(kitchen, device, strategy):
    processes = 2 if device == "cpu" else torch.cuda.device_count()
    if processes < 2:
        pytest.skip(f"{processes} CUDA GPUs are visible here; {strategy} needs two")
    alone = losses(kitchen, "alone", 1, on_a_cpu=device == "cpu")
    shared = losses(
        kitchen,
        "shared",
        processes,
        f"train.strategy={strategy}",
        on_a_cpu=device == "cpu",
    )
    assert len(alone) == 6
    assert shared == pytest.approx(alone, rel=1e-4)
