"""Models of few layers, which a CPU's updates are measured by, held to the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import toque
from toque.config import RunConfig
from toque.models.flops import parameter_counts
from toque.models.loading.from_scratch import build_model
from toque.training.planning.outlined_update import outlining
from toque.training.runtime import Runtime
from toque.workflows.configure import configure
from toque.workflows.plan.measured_layers import depths_of, shallow_model
from toque.workflows.plan.outlined_model import Vocabulary, base_outline, outlined_model

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 2, "n_positions": 64},
    "t5": {
        "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 4, "num_decoder_layers": 3,
        "num_heads": 2, "tie_word_embeddings": False,
    },
    "neox": {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
        "intermediate_size": 64, "max_position_embeddings": 64,
    },
}  # fmt: skip
KNOWN = Vocabulary(300)


def extrapolated(config: RunConfig, whole: Any) -> tuple[int, int]:
    """Parameters, and those trained, as the models of one and two layers have them."""
    runtime, depths = Runtime(), depths_of(whole.config)

    def counts(more: str | None) -> tuple[int, int]:
        layers = {name: 2 if name == more else 1 for name in depths}
        found = parameter_counts(shallow_model(config, KNOWN, whole.config, layers, runtime))
        return found.total, found.trainable

    one = counts(None)
    deeper = [(depth - 1, counts(name)) for name, depth in depths.items()]
    total, trained = (one[i] + sum(n * (two[i] - one[i]) for n, two in deeper) for i in (0, 1))
    return total, trained


@pytest.mark.parametrize("family", sorted(SHAPES))
def test_one_layer_and_two_make_the_whole_model(family: str) -> None:
    config = configure({"model": {"family": family, "shape": SHAPES[family]}})
    whole = build_model(
        family=family, shape=SHAPES[family], vocab_size=300, pad_id=0, eos_id=1, bos_id=None, seed=1
    )
    counts = parameter_counts(whole)
    assert extrapolated(config, whole) == (counts.total, counts.trainable)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_an_adapter_is_in_every_layer(family: str, tmp_path: Path) -> None:
    base = build_model(
        family=family, shape=SHAPES[family], vocab_size=290, pad_id=0, eos_id=1, bos_id=None, seed=1
    )
    base.save_pretrained(tmp_path)
    model = {"family": "auto", "start_from": str(tmp_path)}
    config = configure({"model": model, "adapter": {"kind": "lora", "r": 4}})
    whole = parameter_counts(outlined_model(config, KNOWN, where="cpu", precision="float32"))
    with outlining():
        found = base_outline(config, KNOWN)
    assert extrapolated(config, found) == (whole.total, whole.trainable)


def test_a_run_that_has_not_begun_is_measured_here(tmp_path: Path) -> None:
    shape = {"n_embd": 32, "n_layer": 30, "n_head": 2, "n_positions": 64}
    plan = toque.plan(
        {
            "run_dir": str(tmp_path / "run"),
            "model": {"family": "gpt2", "shape": shape, "tokenizer": "trained:512"},
            "data": {
                "sources": [], "store": str(tmp_path / "store"),
                "max_prompt_tokens": 16, "max_target_tokens": 48,
            },
            "train": {"batch": "256 tokens", "stop_after": "3 steps"},
        }
    )  # fmt: skip
    assert plan.time.how == "updates of this model with one layer and with two, measured just now"
    assert plan.time.run_seconds is not None
    assert plan.time.run_seconds >= 3 * plan.time.update_seconds > 0.0
