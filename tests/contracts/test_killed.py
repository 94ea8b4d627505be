"""SIGKILL at seeded random moments, and continued: the weights of an undisturbed run, bit for bit.

Every start is a fresh process. Half of the kills wait for a save to be under way, the others for a
random time after training began. Dropout is on, so a lost or repeated seed would show.
"""

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fixtures.ranks import losses_of
from tiny import shape_yaml
from toque.cooking.cookbook.recipes import write_cookbook

STEPS, SAVE_EVERY = 48, 3


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a prepared store and a configuration that all runs share."""
    folder = tmp_path_factory.mktemp("kitchen")
    write_cookbook(folder / "cookbook.jsonl", n=240, seed=3)
    (folder / "run.yaml").write_text(
        f"""
seed: 5
model: {{family: t5, tokenizer: "trained:600",
  shape: {shape_yaml("t5", width=48, inner=96, dropout=0.1)}}}
data: {{sources: [{{path: cookbook.jsonl}}], store: store, max_prompt_tokens: 96,
  max_target_tokens: 320}}
optim: {{peak_lr: 1e-3, warmup: "5 steps", label_smoothing: 0.1}}
train: {{stop_after: "{STEPS} steps", batch: "2048 tokens", micro_batch_rows: 2, precision: bf16,
  save_every: "{SAVE_EVERY} steps", evaluate_every: "7 steps", keep_last: 2}}
evaluation: {{max_examples: 8, generate: 0}}
observe: {{log_every: "1 step"}}
"""
    )
    toque(folder, "prepare", "run.yaml")
    return folder


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "toque", *words]
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log
        )


def toque(folder: Path, *words: str) -> None:
    code = start(folder, *words).wait()
    assert code == 0, (folder / "log.txt").read_text()[-3000:]


def fingerprint(run: Path) -> dict[str, str]:
    """SHA-256 of the last checkpoint's tensors and of the finished model."""
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    model = "model.safetensors"
    files = [last / model, last / "optimizer.safetensors", run / "model" / model]
    return {
        str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in files
    }


def kill_somewhere(
    process: subprocess.Popen[bytes], run: Path, chance: random.Random
) -> bool:
    """Kill during the next save, or at a random moment; False when the run ended first."""
    during_save, delay = chance.random() < 0.5, chance.uniform(0.0, 1.2)
    # Leftovers of an earlier kill are no save under way: the new process sweeps them first.
    saved = set((run / "checkpoints").glob("*")) if run.exists() else set()
    log = run / "metrics.jsonl"
    began, seen = log.stat().st_size if log.exists() else 0, None
    while process.poll() is None:
        folders = set((run / "checkpoints").glob("*")) if run.exists() else set()
        if during_save and any(f.name.startswith("temp-") for f in folders - saved):
            break
        if seen is None and log.exists() and log.stat().st_size > began:
            seen = time.monotonic()
        if not during_save and seen is not None and time.monotonic() - seen > delay:
            break
        time.sleep(0.0005)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def run_with_kills(
    kitchen: Path, name: str, kills: int, seed: int, *words: str
) -> Path:
    run, chance, done = kitchen / name, random.Random(seed), 0
    while done < kills:
        process = start(kitchen, "train", "run.yaml", f"run_dir={name}", *words)
        if not kill_somewhere(process, run, chance):
            log = (kitchen / "log.txt").read_text()[-2000:]
            pytest.fail(
                f"the run ended after {done} of {kills} kills: raise STEPS\n{log}"
            )
        done += 1
    toque(kitchen, "train", "run.yaml", f"run_dir={name}", *words)
    return run


def compare(kitchen: Path, kills: int, seed: int, *words: str) -> None:
    tag = "-".join(w.split("=")[1] for w in words) or "plain"
    whole = kitchen / f"whole-{tag}"
    if not whole.exists():
        toque(kitchen, "train", "run.yaml", f"run_dir={whole.name}", *words)
    killed = run_with_kills(kitchen, f"killed-{tag}-{seed}", kills, seed, *words)
    assert fingerprint(killed) == fingerprint(whole)
    assert losses_of(killed) == losses_of(whole)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_twice(kitchen: Path) -> None:
    compare(kitchen, 2, 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [11, 12])
def test_killed_twenty_times(kitchen: Path, seed: int) -> None:
    """Ten kills a run, two runs: twenty moments."""
    compare(kitchen, 10, seed, "train.compile=false")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killed_with_compiled_blocks(kitchen: Path) -> None:
    """Every start compiles again, so one layer and four kills."""
    compare(kitchen, 4, 13, "train.compile=true", "model.shape.num_layers=1")
