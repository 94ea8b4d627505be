"""A plan held to the model it is about: bytes of real tensors, counts, refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import toque
from toque.cli.app import main
from toque.config import load_config
from toque.config.schema import OptimConfig
from toque.errors import ConfigError
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.grouped_attention import causal_mask
from toque.models.forward.keyed_dropout import use_keyed_dropout
from toque.models.forward.loss import loss_sum
from toque.models.forward.outline import OutlinedRows
from toque.models.loading.from_scratch import build_model
from toque.runs.outlined_update import OutlinedUpdate, UpdateOutliner, outlining
from toque.runs.peak import Peak
from toque.training.micro_batch import Probe, WorstBatch
from toque.training.runtime import Runtime
from toque.workflows.configure import configure
from toque.workflows.plan.run_estimate import outline_optimizer, predict_training

SHAPES = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 2},
    "neox": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 128, "max_position_embeddings": 128,
    },
}  # fmt: skip


def made(family: str, precision: str) -> torch.nn.Module:
    model = build_model(
        family=family,
        shape=SHAPES[family],
        vocab_size=300,
        pad_id=0,
        eos_id=1,
        bos_id=None,
        seed=1,
    )
    use_keyed_dropout(model)
    if precision == "bf16":
        use_cpu_layers(model)
    return model


def outlined(
    family: str, rows: OutlinedRows, precision: str, **more: Any
) -> OutlinedUpdate:
    """The outline of a small model's update."""
    with outlining():
        model = made(family, precision)
        optimizer, state = outline_optimizer(
            model, OptimConfig(name=more.pop("name", "adamw"))
        )
        defaults: dict[str, Any] = {"where": "cpu", "accumulates": False}
        outliner = UpdateOutliner(
            precision=more.pop("products", precision),
            optimizer=optimizer,
            state_bytes=state,
            **defaults | more,
        )
        return outliner.outline(model, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("family", sorted(SHAPES))
def test_an_outline_keeps_the_bytes_that_a_real_forward_keeps(
    family: str, precision: str
) -> None:
    rows = OutlinedRows(2, 64 if family == "t5" else 0, 128, 2)
    outline = outlined(family, rows, precision)
    runtime = Runtime(precision=precision)  # type: ignore[arg-type]
    worst = WorstBatch(rows.source, 128, 32, 64, 300)
    real = made(family, precision)
    probe = Probe(real, loss_sum, runtime, worst)
    kept = probe.activation_bytes(2, 1 << 40)
    assert kept is not None
    head = sum(
        p.numel() * 4 for n, p in real.named_parameters() if n.startswith("lm_head")
    )
    head = (
        head or 300 * 64 * 4
    )  # shared with the embedding: its gradient is kept all the same
    hidden = 2 * 128 * 64 * 4
    # What the loss keeps is counted there, and here with what is computed.
    assert outline.kept == pytest.approx(kept - head - hidden, rel=0.12)
    assert outline.weights == sum(p.numel() * 4 for p in real.parameters())
    assert outline.gradients == outline.weights


def test_nothing_without_content_stays_behind() -> None:
    outlined("gpt2", OutlinedRows(1, 0, 64), "bf16", name="muon", accumulates=True)
    assert type(causal_mask(64)) is torch.Tensor


def test_checkpointing_keeps_less_and_computes_more() -> None:
    def outline(*, recompute: bool) -> tuple[int, float]:
        rows = OutlinedRows(4, 0, 128)
        found = outlined(
            "neox", rows, "bf16", where="cuda", accumulates=True, recompute=recompute
        )
        return found.kept, found.flops

    plain, again = outline(recompute=False), outline(recompute=True)
    assert again[0] < plain[0] / 2
    assert again[1] > plain[1]


def test_the_parts_add_up_and_a_card_too_small_gets_levers() -> None:
    plan = toque.plan("neox-1.2b", hardware="rtx-3080")
    memory = plan.record()["memory"]
    assert sum(memory["parts"].values()) == memory["tensors"]
    assert memory["tensors"] + sum(memory["beside"].values()) == memory["total"]
    assert memory["beside"] == {"the allocator's share": round(memory["tensors"] / 9)}
    assert not plan.fits
    assert plan.memory.micro_batch_rows == 1
    assert plan.memory.recompute  # auto, as a row does not fit without
    assert plan.memory.parts["optimizer states"] == pytest.approx(
        8 * 1414.46e6, rel=1e-3
    )
    assert any(lever.total < plan.memory.total for lever in plan.levers)
    assert "DOES NOT FIT" in str(plan)
    assert plan.record()["flops"]["token"] == pytest.approx(8.47e9, rel=0.01)


def settings_of(folder: Path, **train: Any) -> Mapping[str, Any]:
    """A small run in `folder` whose data is not prepared."""
    return {
        "run_dir": str(folder / "run"),
        "model": {
            "family": "gpt2", "tokenizer": "trained:512",
            "shape": {"n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64},
        },
        "data": {
            "sources": [], "store": str(folder / "store"), "max_prompt_tokens": 16,
            "max_target_tokens": 48,
        },
        "train": {"batch": "256 tokens", "stop_after": "3 steps"} | train,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("validation", "steps"), [([], 20.0), ([{"path": "b.jsonl"}], 40.0)]
)
def test_no_share_of_the_examples_is_held_out_beside_files_that_are(
    validation: list[dict[str, str]], steps: float, tmp_path: Path
) -> None:
    settings = dict(settings_of(tmp_path, stop_after="2 epochs"))
    settings["data"] |= {
        "sources": [{"path": "a.jsonl"}], "validation": validation, "max_examples": 80,
        "validation_fraction": 0.5,
    }  # fmt: skip
    assert toque.plan(settings).record()["totals"]["steps"] == steps


def test_a_run_is_timed_by_its_operations_and_after_ten_updates_by_itself(
    tmp_path: Path,
) -> None:
    settings = settings_of(tmp_path, precision="float32")
    before = toque.plan(settings)
    assert before.time.how == "this model's operations, each timed just now"
    assert before.time.run_seconds is not None
    assert before.time.run_seconds >= 3 * before.time.update_seconds > 0.0
    (tmp_path / "run").mkdir()
    start = {
        "event": "start",
        "step": 0,
        "parameters": {"total": before.parameters.total},
    }
    steps = [
        {"event": "step", "step": n, "tokens_per_second": 400.0} for n in range(1, 12)
    ]
    lines = [json.dumps(event) + "\n" for event in (start, *steps)]
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("".join(lines))
    time = toque.plan(settings).time
    assert time.update_seconds == pytest.approx(256 / 400, rel=0.10)
    metrics.write_text("".join(lines[:9]))
    assert "timed just now" in toque.plan(settings).time.how


def test_rows_of_short_examples_attend_less_and_have_room_for_a_long_one(
    tmp_path: Path,
) -> None:
    config = configure(**settings_of(tmp_path))
    long, short = predict_training(config), predict_training(config, example=16.5)
    assert (long.estimator.work.row.examples, short.estimator.work.row.examples) == (
        1,
        4,
    )
    saved = long.estimator.work.flops_per_token - short.estimator.work.flops_per_token
    scores_and_sums, backward_too = (
        4 * 32,
        3,
    )  # products of a token with each that it attends to
    assert saved == 3 * scores_and_sums * backward_too * (64 - 16) / 2
    assert short.memory.parts == long.memory.parts


def test_examples_of_a_row_have_a_token_of_either_side(tmp_path: Path) -> None:
    model = {"family": "t5", "tokenizer": "trained:512", "shape": SHAPES["t5"]}
    settings = {**settings_of(tmp_path), "model": model}
    settings["data"] = settings["data"] | {"max_prompt_tokens": 8}
    outlook = predict_training(configure(**settings), example=5.0)
    assert outlook.estimator.work.row.examples == 8
    assert outlook.tokens_per_second() > 0.0


def test_flops_and_hours_follow_from_the_utilisation(tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path, stop_after="10000 steps", evaluate_every="10000 steps"
    )
    plan = toque.plan(settings, hardware="h100", utilisation=0.5)
    assert plan.time.utilisation == pytest.approx(0.5)
    run = plan.record()
    expected = run["flops"]["update"] * 10_000 / (0.5 * 989.5e12)
    assert run["time"]["run_seconds"] == pytest.approx(
        expected, rel=0.05
    )  # and an evaluation


@pytest.mark.parametrize(
    ("stop_after", "save_every"),
    [
        ("8 hours", "30 minutes"),
        ("8 hours", "{half} steps"),
        ("{whole} steps", "30 minutes"),
    ],
)
def test_saves_by_the_clock_are_counted(
    tmp_path: Path, stop_after: str, save_every: str
) -> None:
    settings = settings_of(tmp_path, stop_after="8 hours")
    update = toque.plan(settings, hardware="t4", utilisation=0.1).time.update_seconds
    half = round(1800 / update)
    train = {
        "stop_after": stop_after.format(whole=16 * half),
        "save_every": save_every.format(half=half),
    }
    plan = toque.plan(settings_of(tmp_path, **train), hardware="t4", utilisation=0.1)
    assert plan.disk.saves == pytest.approx(16, abs=1)  # a half hour is no whole update


def test_a_peak_that_a_run_beats_is_said_to_be_too_low() -> None:
    """A plan for a machine that was busy while its peak was measured ended in a refusal."""
    plan = toque.plan("agi2-small", hardware="h100", utilisation=1.0)
    assert plan.time.utilisation == 1.0
    beaten = replace(
        plan, time=replace(plan.time, peak=Peak(1e9, "measured in float32"))
    )
    assert beaten.time.utilisation is None
    assert "unknown: the updates are faster than the peak speed of this machine" in str(
        beaten
    )
    assert beaten.record()["time"]["utilisation"] is None


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    for share in (1.01, 0.0, -0.2):
        with pytest.raises(ConfigError, match="must be above 0 and at most 100 %"):
            toque.plan("agi2-small", hardware="h100", utilisation=share)
    with pytest.raises(
        ConfigError, match=r"train.precision is bf16, but t4 only supports fp16"
    ):
        toque.plan("neox-1.2b", hardware="t4")
    with pytest.raises(ConfigError, match=r"which has no config.json"):
        toque.plan(
            {"model": {"family": "auto", "start_from": str(tmp_path)}}, hardware="a100"
        )


def test_the_command_prints_json_and_names_the_nearest_card(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "agi2-small", "--hardware", "rtx-4090", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["machine"]["name"] == "rtx-4090"
    assert said["memory"]["micro_batch_rows"] == 8  # the overlay's
    # Logits are those of the rows there are, and not of a whole chunk: a card computes 8 rows.
    assert (
        said["memory"]["parts"]["logits"] == 8 * 8 * 512 * 8192
    )  # both, rows, tokens, vocabulary
    assert main(["plan", "agi2-small", "--hardware", "rtx-409"]) == 2
    assert "Nearest: rtx-4090" in capsys.readouterr().err
    assert (
        main(["plan", "agi2-small", "--hardware", "h100", "--utilisation", "120"]) == 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("card", ["rtx-3090", "rtx-4090", "rtx-5090"])
def test_flan_t5_xxl_fits_a_small_card_with_its_base_in_few_bits(card: str) -> None:
    settings = load_config("recipe-t5-xxl-lora", hardware=card).config
    plan = toque.plan(settings, hardware=card)
    parts = plan.memory.parts
    assert plan.fits
    assert plan.memory.micro_batch_rows >= 2
    assert (plan.work.row.source, plan.work.row.target) == (256, 512)
    # Of 48 blocks the projections of 24 + 48 attentions, and two of three matrices behind them.
    n = (24 + 48) * 4 * 4096 * 4096 + 48 * 2 * 4096 * 10240
    bits = 8 if card == "rtx-5090" else 4
    assert parts["quantised matrices"] == n * bits // 8
    blocks = n // 64
    expected = n // 4096 * 4 if bits == 8 else blocks + blocks // 256 * 4
    assert parts["constants of their blocks"] == pytest.approx(expected, rel=0.01)
    assert plan.memory.host is not None
    assert plan.memory.host < 2 << 30


@pytest.mark.parametrize("family", sorted(SHAPES))
def test_a_gpu_s_kernels_hold_no_mask_of_all_pairs(family: str) -> None:
    rows = OutlinedRows(2, 64 if family == "t5" else 0, 128, 2)

    def kept(*, masked: bool) -> int:
        return outlined(
            family, rows, "float32", products="bf16", where="cuda", masked=masked
        ).kept

    pairs = [(64, 64), (128, 128), (128, 64)] if family == "t5" else [(128, 128)]
    masks = sum(
        2 * queries * keys for queries, keys in pairs
    )  # a byte a pair, of two rows
    # T5's bias has a copy for each row and layer where it is one with the mask.
    assert kept(masked=True) - kept(masked=False) >= masks
