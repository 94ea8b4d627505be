"""A plan for several GPUs: memory of one, the exchange, the batch that they share, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import toque
from toque.cli.app import main
from toque.errors import ConfigError

WIDTH, LAYERS, WORDS = 512, 4, 512
IN_LAYERS = LAYERS * (12 * WIDTH**2 + 13 * WIDTH)
BESIDE = (
    WORDS + 64
) * WIDTH + 2 * WIDTH  # tables of words and positions, the last norm


def settings_of(folder: Path, rows: int = 64, **train: Any) -> dict[str, Any]:
    return {
        "run_dir": str(folder / "run"),
        "model": {
            "family": "gpt2", "tokenizer": f"trained:{WORDS}",
            "shape": {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8, "n_positions": 64},
        },
        "data": {
            "sources": [], "store": str(folder / "store"), "max_prompt_tokens": 16,
            "max_target_tokens": 48,
        },
        "train": {"batch": f"{64 * rows} tokens", "stop_after": "30 steps", "precision": "bf16"}
        | train,
    }  # fmt: skip


def test_ranks_by_ddp_share_rows_and_sum_gradients(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, micro_batch_rows=4)
    one, four = (toque.plan(settings, hardware="rtx-4090", gpus=n) for n in (1, 4))
    assert one.shared is None
    assert four.shared is not None
    exchange = four.shared.exchange
    assert (exchange.strategy, four.shared.rows, exchange.micro_batches) == (
        "ddp",
        16,
        4,
    )
    tensors = 12 * LAYERS + 4
    assert exchange.reduced == 4 * (IN_LAYERS + BESIDE) + 4 * (tensors + 3)
    assert exchange.sent == 2 * 3 / 4 * exchange.reduced
    # PCIe 4.0, of which 80 % are assumed; the sums hide behind the last of four backwards.
    seconds = exchange.sent / (0.8 * 32e9)
    assert four.shared.seconds == pytest.approx(seconds)
    computing = one.time.update_seconds / 4
    shown = max(0.0, seconds - 2 / 3 / 4 * computing)
    assert four.time.update_seconds == pytest.approx(computing + shown)
    assert four.memory.parts["weights"] == one.memory.parts["weights"]
    assert four.time.flops_per_update == one.time.flops_per_update
    assert four.work.update_rows == one.work.update_rows


def test_ranks_by_fsdp_hold_parts_and_gather_the_rest(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, micro_batch_rows=4, strategy="fsdp")
    plan = toque.plan(settings, hardware="h100", gpus=8)
    assert plan.shared is not None
    exchange = plan.shared.exchange
    assert exchange.gathered == exchange.micro_batches * (4 * IN_LAYERS + 4 * BESIDE)
    assert exchange.scattered == exchange.micro_batches * 4 * (IN_LAYERS + BESIDE)
    assert plan.disk.checkpoint == pytest.approx(12 * (IN_LAYERS + BESIDE), rel=1e-4)
    parts = plan.memory.parts
    assert parts["its part of the weights"] == (IN_LAYERS + BESIDE) // 2
    assert parts["its part of the optimizer states"] == IN_LAYERS + BESIDE
    assert parts["weights gathered at once"] == 4 * BESIDE + 2 * IN_LAYERS // LAYERS


def test_gpus_with_more_rows_are_waited_for(tmp_path: Path) -> None:
    """Of 9 rows one of 8 GPUs has two."""
    settings = settings_of(tmp_path, rows=9, micro_batch_rows=1)
    one, eight = (toque.plan(settings, hardware="h100", gpus=n) for n in (1, 8))
    assert eight.shared is not None
    assert eight.shared.rows == 2
    computing = eight.time.update_seconds - eight.shared.shown
    assert computing == pytest.approx(one.time.update_seconds * 2 / 9)


def test_what_does_not_fit_by_ddp_has_fsdp_as_its_lever(tmp_path: Path) -> None:
    """805 M weights take 12.9 GB on a card of 10, and a quarter of that by fsdp."""
    wide = settings_of(tmp_path, micro_batch_rows=1, strategy="ddp")
    wide["model"]["shape"] |= {"n_embd": 4096, "n_head": 64}
    plan = toque.plan(wide, hardware="rtx-3080", gpus=4)
    assert not plan.fits
    assert plan.shared is not None
    assert plan.shared.exchange.strategy == "ddp"
    lever = next(x for x in plan.levers if x.settings == "train.strategy=fsdp")
    assert lever.fits
    wide["train"]["strategy"] = "auto"
    chosen = toque.plan(wide, hardware="rtx-3080", gpus=4)
    assert chosen.fits
    assert "Shared by 4 GPUs, train.strategy=fsdp" in str(chosen)
    assert json.loads(json.dumps(chosen.record()))["shared"]["exchange"]["ranks"] == 4


def test_the_command_plans_for_several(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "demo", "--hardware", "h100", "--gpus", "16"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "a network with unknown rate" in said
    assert "use sqrt(k) times optim.peak_lr" in said


@pytest.mark.parametrize(
    ("asked", "train", "words"),
    [
        ({"gpus": 0, "hardware": "h100"}, {}, "gpus must be at least 1"),
        ({"gpus": 2}, {}, "this machine does not have a GPU"),
        ({"gpus": 2, "hardware": "h100"}, {"strategy": "single"}, "train.strategy is single"),
        (
            {"gpus": 2, "hardware": "t4"}, {"strategy": "fsdp", "precision": "fp16"},
            "one loss scale",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(
    tmp_path: Path, asked: dict[str, Any], train: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        toque.plan(settings_of(tmp_path, **train), **asked)
