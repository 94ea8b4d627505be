"""Runs that FSDP divides, saved in shards: the same ranks go on to the bit, others as closely."""

import json
import shutil
from pathlib import Path

import pytest

from fixtures.processes import python, toque
from toque.runs.history import read_metrics
from toque.storage.atomic import sha256_of
from toque.training.checkpoint.saved import verify_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
UNDROPPED = (
    "resid_pdrop: 0.0, embd_pdrop: 0.0, attn_pdrop: 0.0"  # draws differ between ranks
)
SHAPE = (
    f"model.shape={{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512, {UNDROPPED}}}"
)
SHARDED = (
    "checkpoint.layout=sharded",
    "train.keep_last=4",
    "train.batch=2048 tokens",
    SHAPE,
)


def train(kitchen: Path, run: Path, ranks: int, *words: str) -> None:
    """Train by so many ranks, or end the test with what they said."""
    start = ["-m"]
    if ranks > 1:
        start += [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
            "-m",
        ]
    words = (kitchen / "run.yaml", f"run_dir={run}", *SHARDED, *words)
    ended = python(*start, "toque", "train", *words)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]


def losses(run: Path) -> list[float]:
    steps = [e for e in read_metrics(run / "metrics.jsonl") if e["event"] == "step"]
    assert [e["step"] for e in steps] == list(range(1, 13))
    return [e["loss"] for e in steps]


def files(step: Path) -> dict[str, str]:
    return {p.name: sha256_of(p) for p in step.iterdir() if p.suffix == ".safetensors"}


@pytest.fixture(scope="module")
def whole(kitchen: Path) -> Path:
    """Twelve updates by two ranks, each with half of the weights."""
    train(kitchen, kitchen / "fsdp", 2, "train.strategy=fsdp")
    return kitchen / "fsdp"


def test_two_ranks_go_back_and_on_to_the_bit(kitchen, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    train(kitchen, run, 2, "train.strategy=fsdp", "--resume", "step-00000008")
    last = "checkpoints/step-00000012"
    assert len(files(run / last)) == 2
    assert files(run / last) == files(whole / last)
    assert losses(run) == losses(whole)
    model = "model/model.safetensors"
    assert sha256_of(run / model) == sha256_of(whole / model)


def test_one_four_and_two_ranks_go_on_from_each_others(kitchen, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    wanted = losses(whole)
    for ranks, strategy in ((1, "auto"), (4, "fsdp"), (2, "fsdp"), (2, "ddp")):
        train(kitchen, run, ranks, f"train.strategy={strategy}", "--resume", "8")
        assert losses(run) == pytest.approx(wanted, rel=1e-5)
        layout = verify_checkpoint(run / "checkpoints" / "step-00000010").layout()
        assert layout is not None
        assert len(layout.files) == ranks
        train(kitchen, run, 1, "checkpoint.layout=whole", "--resume", "10")
        assert losses(run) == pytest.approx(wanted, rel=1e-5)
        manifest = json.loads(
            (run / "checkpoints/step-00000012/manifest.json").read_text()
        )
        assert manifest["format"] == 1


@pytest.mark.parametrize("verb", ["verify", "evaluate", "generate", "export"])
def test_a_run_in_shards_is_used_as_any_other(whole, tmp_path, verb):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    if verb != "export":  # which is for finished runs
        shutil.rmtree(run / "model")
    more = {
        "generate": ["--prompt", "toast"],
        "export": ["--to", str(tmp_path / "made")],
    }
    ended = toque(verb, run, *more.get(verb, []))
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-6000:]
