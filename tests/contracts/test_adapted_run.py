"""A run with an adapter and every method on: continued to the bit, generated from, exported."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixtures.damage import flip
from fixtures.kitchens import kitchen_in
from tiny import shape_of
from toque.cli import main
from toque.runs.history import read_metrics

EVERYTHING = [
    "adapter={r: 4, dropout: 0.1}", "optim.gradient_noise={eta: 0.01}",
    "optim.schedule=cosine_restarts",
    "optim.cycles={first: 3 steps}", "optim.warmup=2 steps", "optim.label_smoothing=0.1",
    "train.stop_after=9 steps", "train.save_every=1 steps", "train.evaluate_every=4 steps",
    "train.keep_last=20",
]  # fmt: skip

OBSERVED = [
    "observe.system=0.1 seconds",
    "observe.gradients=2 steps",
    "observe.profile={wait: 0, warmup: 1, active: 2, repeat: 2}",
    "observe.trackers=[tensorboard]",
    "observe.log_every=1 steps",
]
UNOBSERVED = [
    "observe.system=null",
    "observe.gradients=null",
    "observe.log_every=1 steps",
]


@pytest.fixture(params=[pytest.param("t5", marks=pytest.mark.slow), "llama"])
def kitchen(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with a store and a finished run on it."""
    shape = shape_of(request.param, positions=512)
    config = kitchen_in(
        tmp_path,
        model={"family": request.param, "tokenizer": "trained:600", "shape": shape},
        optim={"warmup": "0 steps", "peak_lr": 3e-4},
        train={"stop_after": "2 steps", "batch": "2048 tokens", "precision": "bf16"},
    )
    assert main(["train", str(config)]) == 0
    return tmp_path


def train(kitchen: Path, name: str, *words: str) -> Path:
    start = [
        f"run_dir={kitchen / name}",
        f"model.start_from={kitchen}/run/model",
        "model.shape={}",
    ]
    assert main(["train", str(kitchen / "run.yaml"), *start, *EVERYTHING, *words]) == 0
    return kitchen / name


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step:08d}"
    found: dict[str, torch.Tensor] = {}
    for stem in ("model", "optimizer"):
        tensors = load_file(folder / f"{stem}.safetensors")
        found |= {f"{stem}: {name}": tensor for name, tensor in tensors.items()}
    return found


def test_a_run_with_everything_on(
    kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = train(kitchen, "whole")
    # Saves go on beside training, and one that is due while another is written is left out.
    saved_steps = [int(f.name[5:]) for f in (whole / "checkpoints").glob("step-*")]
    at = min(saved_steps, key=lambda step: abs(step - 5))
    assert at < 9
    part = kitchen / "part"
    (part / "checkpoints").mkdir(parents=True)
    shutil.copytree(
        whole / "checkpoints" / f"step-{at:08d}",
        part / "checkpoints" / f"step-{at:08d}",
    )
    settings = (whole / "config.yaml").read_text()
    (part / "config.yaml").write_text(settings)
    train(kitchen, "part")

    expected, continued = weights(whole, 9), weights(part, 9)
    assert expected.keys() == continued.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, continued[name]), name
    saved = [n for n in expected if n.startswith("model")]
    assert all(
        "lora_" in n or "trainable_tokens" in n for n in saved
    )  # and nothing else

    # What the run says of its model is what the adapter gives when it is opened again.
    scores = json.loads((whole / "evaluation.json").read_text())["heldout"]
    assert main(["evaluate", str(whole)]) == 0
    again = json.loads((whole / "evaluation.json").read_text())["heldout"]
    assert again["loss"] == pytest.approx(
        scores["loss"], rel=2e-3
    )  # bf16, merged or beside

    assert main(["export", str(whole), "--to", str(kitchen / "merged")]) == 0
    capfd.readouterr()
    asked = [
        "--prompt",
        "leek soup",
        "--temperature",
        "0",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    texts = []
    for words in ([str(kitchen / "merged")], [str(whole)], [str(whole / "model")]):
        assert main(["generate", *words, *asked]) == 0
        texts.append(json.loads(capfd.readouterr().out)["text"])
    adapter = ["--adapter", str(whole / "model")]
    assert main(["generate", str(kitchen / "run" / "model"), *adapter, *asked]) == 0
    texts.append(json.loads(capfd.readouterr().out)["text"])
    assert len(set(texts)) == 1

    # Another base under the same name is refused, at the next start and beside the adapter.
    (part / "checkpoints" / "step-00000009").rename(part / "later")
    flip(kitchen / "run" / "model" / "model.safetensors", at=-2)
    words = [
        f"run_dir={part}",
        f"model.start_from={kitchen}/run/model",
        "model.shape={}",
    ]
    assert main(["train", str(kitchen / "run.yaml"), *words, *EVERYTHING]) == 4
    assert "frozen weights with hash" in capfd.readouterr().err
    assert main(["generate", str(whole), *asked]) == 4
    assert "trained on other weights than this base" in capfd.readouterr().err


def test_observing_an_adapted_run_and_its_continuation_changes_no_bit(
    kitchen: Path,
) -> None:
    plain = train(kitchen, "plain", *UNOBSERVED)
    watched = train(kitchen, "watched", *OBSERVED, "train.stop_after=9 steps")
    newest = max((watched / "checkpoints").glob("step-*")).name
    kept = [f for f in (watched / "checkpoints").glob("step-*") if f.name != newest]
    # As after a kill: only an earlier checkpoint is there, and the log has what came after it.
    shutil.rmtree(watched / "checkpoints" / newest)
    at = int(max(kept).name[5:])
    train(kitchen, "watched", *OBSERVED)

    expected, found = weights(plain, 9), weights(watched, 9)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    events, before = (
        read_metrics(watched / "metrics.jsonl"),
        read_metrics(plain / "metrics.jsonl"),
    )
    assert losses(events) == losses(before)
    gradients = [e for e in events if e["event"] == "gradients"]
    assert [e["step"] for e in gradients] == [2, 4, 6, 8]  # those done again count once
    assert all(name.startswith("adapter ") for e in gradients for name in e["groups"])
    whole = {e["step"]: e["grad_norm"] for e in events if e["event"] == "step"}
    for event in gradients:
        norms = [group["grad_norm"] for group in event["groups"].values()]
        assert math.hypot(*norms) == pytest.approx(whole[event["step"]], rel=1e-4)
    again = max(i for i, e in enumerate(events) if e["event"] == "start")
    assert events[again]["step"] == at
    assert any(
        e["event"] == "system" for e in events[again:]
    )  # even where it has one update
    start = next(e for e in events if e["event"] == "start")
    assert 0 < start["parameters"]["trainable_share"] < 0.5
    assert list((watched / "trace").glob("*-operations.txt"))


def losses(events: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    return [
        (e["step"], e["loss"], e["grad_norm"]) for e in events if e["event"] == "step"
    ]
