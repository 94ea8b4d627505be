"""Object stores of our own, and a tiny prepared run that the fault tests share."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures import remote_parts
from fixtures.buckets import Service
from toque.cli import main
from toque.cooking.cookbook.recipes import write_cookbook
from toque.storage.bucket import RUNS, Bucket, open_bucket

# Read when gcsfs is imported; with it, it asks an emulator over gRPC, which does not answer.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

STEPS = 12
CONFIG = """
run_dir: {run}
seed: 5
model: {{family: gpt2, tokenizer: "trained:512",
  shape: {{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}}}}
data: {{sources: [{{path: "{folder}/a.jsonl"}}], store: "{folder}/store", max_prompt_tokens: 64,
  max_target_tokens: 256}}
optim: {{warmup: "2 steps", peak_lr: 1e-2}}
train: {{stop_after: "{steps} steps", batch: "1024 tokens", evaluate_every: "5 steps",
  precision: float32, micro_batch_rows: 2, compile: false, save_every: "2 steps"}}
evaluation: {{max_examples: 4, generate: 0}}
observe: {{log_every: "1 step"}}
"""


@pytest.fixture(scope="session")
def s3() -> Iterator[Service]:
    yield from _running("s3", "s3fs", "moto.server")


@pytest.fixture(scope="session")
def gs() -> Iterator[Service]:
    yield from _running("gs", "gcsfs", "gcp_storage_emulator")


def _running(scheme: str, *needed: str) -> Iterator[Service]:
    for name in needed:
        pytest.importorskip(name)
    found = Service(scheme)
    yield found
    found.close()


@pytest.fixture(params=["s3", "gs"])
def service(request, monkeypatch) -> Service:
    monkeypatch.setattr("toque.storage.bucket_lock._SETTLE", 0.01)
    return request.getfixturevalue(request.param).lead_here(monkeypatch)


@pytest.fixture(scope="session")
def kitchen(tmp_path_factory) -> Path:
    """A folder with a prepared store."""
    folder = tmp_path_factory.mktemp("faults")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(run=folder / "unused", folder=folder, steps=STEPS))
    assert main(["prepare", str(path)]) == 0
    return folder


@pytest.fixture(scope="session")
def whole_run(kitchen: Path) -> Path:
    """A run that was left alone: twelve steps, the last four checkpoints kept."""
    run = kitchen / "whole-run"
    # A busy machine skips saves that are due while one is being written.
    words = ["train.keep_last=4", "train.optimisations.background_saves=false"]
    assert main(["train", str(kitchen / "run.yaml"), f"run_dir={run}", *words]) == 0
    return run


@pytest.fixture
def remote(service, request) -> Bucket:
    """A folder of a bucket for this test alone."""
    name = f"tests/{request.node.name}"
    return open_bucket(remote_parts.address(service, name), RUNS, deadline=5.0)
