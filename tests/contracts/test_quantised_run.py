"""A run beside a quantised base: continued to the bit, only the adapter kept, exported whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fixtures.kitchens import kitchen_in
from tiny import shape_of
from toque.cli import main

STEPS = ["train.stop_after=4 steps", "train.save_every=1 steps", "train.keep_last=9"]


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and a model on it."""
    folder = tmp_path_factory.mktemp("quantised")
    shape = shape_of("llama", width=64, layers=1, inner=128, positions=512)
    config = kitchen_in(
        folder,
        model={"family": "llama", "tokenizer": "trained:600", "shape": shape},
        optim={"warmup": "0 steps", "peak_lr": 3e-4},
        train={"stop_after": "2 steps", "precision": "bf16"},
    )
    assert main(["train", str(config)]) == 0
    return folder


def train(kitchen: Path, name: str, form: str, *words: str) -> int:
    start = [f"run_dir={kitchen / name}", f"model.start_from={kitchen}/run/model"]
    adapter = f"adapter={{r: 4, dropout: 0.1, quantize_base: {form}}}"
    return main(
        [
            "train",
            str(kitchen / "run.yaml"),
            *start,
            "model.shape={}",
            adapter,
            *STEPS,
            *words,
        ]
    )


def end(run: Path) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / "step-00000004"
    return load_file(folder / "model.safetensors") | load_file(
        folder / "optimizer.safetensors"
    )


@pytest.mark.parametrize("form", ["nf4", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_quantised_run(
    form: str, kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if form == "nf4":
        pytest.importorskip("bitsandbytes")
    assert train(kitchen, f"{form}-whole", form) == 0
    whole, part = kitchen / f"{form}-whole", kitchen / f"{form}-part"
    saved = sorted((whole / "checkpoints").glob("step-*"))
    (part / "checkpoints").mkdir(parents=True)
    shutil.copytree(saved[0], part / "checkpoints" / saved[0].name)
    shutil.copy(whole / "config.yaml", part / "config.yaml")
    assert saved[0].name != "step-00000004"
    assert train(kitchen, part.name, form) == 0
    expected, continued = end(whole), end(part)
    assert expected.keys() == continued.keys()
    assert all(
        torch.equal(tensor, continued[name]) for name, tensor in expected.items()
    )
    assert all("lora_" in n or "trainable_tokens" in n for n in expected)

    # The hash is that of the weights as they lie in the file, whatever they are held in.
    assert train(kitchen, f"{form}-not", "null", "train.stop_after=1 steps") == 0
    bases = [
        json.loads(next((run / "checkpoints").glob("step-*/state.json")).read_text())[
            "base_sha256"
        ]
        for run in (whole, kitchen / f"{form}-not")
    ]
    assert bases[0] == bases[1]

    assert main(["export", str(whole), "--to", str(kitchen / f"{form}-merged")]) == 0
    merged = load_file(kitchen / f"{form}-merged" / "model.safetensors")
    original = load_file(kitchen / "run" / "model" / "model.safetensors")
    same = {
        n for n, t in merged.items() if n in original and torch.equal(t, original[n])
    }
    assert {
        n for n in original if "mlp" in n
    } <= same  # not what quantising makes of them
    assert not {n for n in original if "q_proj" in n} & same
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
    assert main(["generate", str(whole), *asked]) == 0
    assert json.loads(capfd.readouterr().out)["text"] is not None


def test_what_cannot_be_is_refused(
    kitchen: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(kitchen, "no", "int8", "adapter.kind=dora") == 2
    assert (
        "`adapter.quantize_base` is int8 and `adapter.kind` is dora"
        in capfd.readouterr().err
    )
    alone = [f"run_dir={kitchen / 'no'}", "adapter={quantize_base: int8}"]
    assert main(["train", str(kitchen / "run.yaml"), *alone]) == 2
    assert "start_from" in capfd.readouterr().err
    assert train(kitchen, "no", "int8", "train.activation_offload=true") == 2
    assert "train.gradient_checkpointing" in capfd.readouterr().err
    offload = ["train.activation_offload=true", "train.gradient_checkpointing=true"]
    assert train(kitchen, "no", "int8", *offload) == 2
    assert "is on a CPU" in capfd.readouterr().err
