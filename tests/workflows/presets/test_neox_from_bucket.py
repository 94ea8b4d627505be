"""The preset neox-1.2b-test with a smaller shape: token files of a bucket, checkpoints to a bucket.

Two processes, killed by SIGKILL and continued from the bucket alone, end with the bits of a run
that nothing happened to.
"""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
import pytest

from fixtures.buckets import Service
from tiny import shape_yaml
from toque.data.store.store_manifest import read_manifest
from toque.data.tokenizer.tokenizer_training import train_codec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS, VOCABULARY, FILES, DOCUMENTS = 48, 300, 7, 30
SHRUNKEN = (
    f"model.shape={shape_yaml('neox', width=32, layers=2, heads=2, positions=64)}",
    "data.max_target_tokens=64",
    "data.validation_fraction=0.1",
    "train.batch=512 tokens",
    "train.row_tokens=64",
    "train.compile=false",
    "train.precision=float32",
    f"train.stop_after={STEPS} steps",
    "train.micro_batch_rows=2",  # measured twice, it might be chosen twice, with other last bits
    "train.save_every=4 steps",
    "train.evaluate_every=16 steps",
    "observe.log_every=1 step",
)


@pytest.fixture
def kitchen(s3_service: Service, tmp_path: Path) -> Path:
    """A folder with a tokenizer, and in the bucket token files said to be written with it."""
    chance = np.random.default_rng(5)
    for number in range(FILES):
        lengths = chance.integers(1, 200, DOCUMENTS)
        data = BytesIO()
        ids = chance.integers(20, 256, lengths.sum()).astype(np.uint16)
        np.savez(data, ids=ids, ends=np.cumsum(lengths))
        s3_service.put(
            f"corpus/year-{number // 3}/part/{number:05}.npz", data.getvalue()
        )
    (tmp_path / "tokenizer").mkdir()
    codec = train_codec(["Onions and butter."] * 4, vocab_size=VOCABULARY, kind="bpe")
    codec.save(tmp_path / "tokenizer")
    return tmp_path


def start(kitchen: Path, name: str) -> subprocess.Popen[bytes]:
    """Two processes of the preset; each run has a cache of its own, as a machine of its own has."""
    words = (
        f"run_dir=s3://pantry/runs/{name}",
        "data.sources=[{path: 's3://pantry/corpus/', format: tokens, max_files: 5}]",
        f"data.store={kitchen / name / 'store'}",
        f"model.tokenizer={kitchen / 'tokenizer'}",
        *SHRUNKEN,
    )
    environment = os.environ | {
        "TOQUE_CACHE": str(kitchen / name / "cache"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "toque",
        "train",
        "neox-1.2b-test",
        "--gpus",
        "2",
        *words,
    ]
    with (kitchen / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command, cwd=kitchen, env=environment, stdout=log, stderr=log
        )


def run_folder(kitchen: Path, name: str) -> Path:
    return kitchen / name / "cache" / "runs" / "s3" / "pantry" / "runs" / name


def hashes(run: Path) -> dict[str, str]:
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    files = [last / "model.safetensors", last / "optimizer.safetensors"]
    files.append(run / "model" / "model.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def test_killed_and_continued_from_the_bucket_to_the_same_bits(s3_service, kitchen):
    whole = start(kitchen, "whole")
    assert whole.wait() == 0, (kitchen / "whole.log").read_text()[-4000:]
    log = (kitchen / "whole.log").read_text()
    assert "max_files is 5, so the first 5 of its 7 files by name are read." in log
    assert "bits per byte" in log
    manifest = read_manifest(kitchen / "whole" / "store")
    names = [f"s3://pantry/corpus/year-{n // 3}/part/{n:05}.npz" for n in range(5)]
    assert [entry.path for entry in manifest.sources] == names

    killed = start(kitchen, "killed")
    deadline = time.monotonic() + 300
    # A checkpoint is whole in the bucket when its manifest is there.
    while not any(
        "/step-" in k and "manifest" in k for k in s3_service.listed("runs/killed/")
    ):
        said = (kitchen / "killed.log").read_text()[-4000:]
        assert killed.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    launcher = psutil.Process(killed.pid)
    for process in (
        launcher,
        *launcher.children(recursive=True),
    ):  # it would start them again
        process.send_signal(signal.SIGKILL)
    killed.wait()
    lines = (run_folder(kitchen, "killed") / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["step"] for line in lines) < STEPS, (
        "it ended before it was killed"
    )
    shutil.rmtree(
        kitchen / "killed"
    )  # a machine that is gone: the bucket is all there is
    again = start(kitchen, "killed")
    assert again.wait() == 0, (kitchen / "killed.log").read_text()[-4000:]
    assert hashes(run_folder(kitchen, "killed")) == hashes(run_folder(kitchen, "whole"))
