"""Every preset built without memory, its parameters held to the published numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import toque
from toque.config import load_config, presets
from toque.config.resolve import PRESETS
from toque.models.flops import parameter_counts
from toque.runs.outlined_update import outlining
from toque.workflows.plan.outlined_model import find_vocabulary, outline_model

# millions: all, without embeddings, trained (the checklist's section 1b, S1, S4 and S5)
PARAMETERS = {
    "agi2-small": (6.97, 4.74, 6.97),
    "demo": (1.07, 0.80, 1.07),
    "fast-iteration": (249.35, 200.00, 1.77),
    "neox-1.2b": (1414.46, 1208.60, 1414.46),
    "neox-1.2b-test": (1414.46, 1208.60, 1414.46),
    "recipe-gpt2-2b": (2019.52, 1888.23, 2019.52),
    "recipe-gpt2-large": (774.03, 708.39, 774.03),
    "recipe-gpt2-medium": (354.82, 302.31, 354.82),
    "recipe-gpt2-small": (98.43, 85.06, 98.43),
    "recipe-gpt2-xl": (1557.61, 1475.56, 1557.61),
    "recipe-t5-large": (783.15, 717.35, 783.15),
    "recipe-t5-small": (52.45, 44.06, 52.45),
    "recipe-t5-xl-lora": (2854.48, 2722.88, 4.72),
    "recipe-t5-xxl-lora": (11154.21, 10891.01, 18.87),
    "ten-improvements": (787.87, 722.07, 4.72),
}
CARDS = ["rtx-3090", "rtx-4090", "rtx-5090", "a100", "h100", "h200"]


def overlays(name: str) -> list[str]:
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load(text).get("hardware") or {})


def test_every_preset_is_counted_but_the_one_without_a_model_of_its_own() -> None:
    assert set(PARAMETERS) == set(presets()) - {"finetune-folder"}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_preset_builds_and_has_its_parameters(name: str) -> None:
    config = load_config(name).config
    vocabulary = find_vocabulary(config, None)
    with outlining():
        model = outline_model(config, vocabulary, where="cuda", precision="bf16")
        counts = parameter_counts(model)
    found = (counts.total, counts.non_embedding, counts.trainable)
    assert tuple(round(n / 1e6, 2) for n in found) == pytest.approx(
        PARAMETERS[name], abs=0.011
    )


@pytest.mark.parametrize("name", sorted(set(PARAMETERS) - {"demo"}))
def test_an_overlay_keeps_the_update_and_resolves(name: str) -> None:
    plain = load_config(name).config
    for card in overlays(name):
        changed = load_config(name, hardware=card).config
        assert changed.train.batch == plain.train.batch, card
        assert changed.train.precision == "bf16", card
        assert changed.train.micro_batch_rows == "auto", card
    if name not in {"recipe-t5-small", "recipe-gpt2-small"}:
        assert overlays(name) == CARDS


@pytest.mark.slow
def test_an_overlay_fills_the_card() -> None:
    plan = toque.plan("recipe-t5-xl-lora", hardware="rtx-4090")
    assert plan.memory.fits
    assert plan.machine.memory_bytes is not None
    assert plan.memory.total > 0.75 * plan.machine.memory_bytes


def test_a_plan_from_python_applies_the_overlay(tmp_path: Path) -> None:
    settings = tmp_path / "my.yaml"
    settings.write_text(
        "model: {family: gpt2, shape: {n_embd: 16, n_layer: 1, n_head: 2}}\n"
        "train: {micro_batch_rows: 1}\n"
        "hardware: {rtx-4090: {train: {micro_batch_rows: 2}}}\n"
    )
    assert toque.plan(settings, hardware="RTX 4090").memory.micro_batch_rows == 2
    assert toque.plan(settings, hardware="h100").memory.micro_batch_rows == 1
