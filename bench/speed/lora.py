"""Updates of a LoRA adapter against updates of all weights, on the same model and batch.

    python bench/speed/lora.py [--family llama] [--pairs 3] [--steps 2] [--precision bf16]

The ratio is at most 1.5. A weight costs two operations per token in forward, two for the gradient
of its input, and two for its own gradient. A frozen weight does not need the last two (6 / 4).
"bound_here" is the bound for this model with attention, head and adapter, without the optimizer
step. Each pair is one ratio of wall seconds. On a shared machine `ratio_of_core_seconds` varies
less. Quality: B is zero before the first update, so both first losses must agree within 1e-3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from transformers import PreTrainedModel
from updates import batch_of, update

from toque.config.schema_methods import AdapterConfig
from toque.models.flops import flops_per_token, parameter_counts
from toque.models.loading.from_scratch import build_model
from toque.models.lora.frozen import hold_frozen
from toque.models.lora.layers import attach
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import Runtime

VOCABULARY, ROWS, LENGTH = 2048, 4, 256
ROTARY = {
    "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": ROTARY,
    "neox": ROTARY,
    "gpt2": {"n_embd": 768, "n_layer": 4, "n_head": 12, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "t5": {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 3, "num_heads": 12,
           "dropout_rate": 0.0},
}  # fmt: skip


def model_of(family: str) -> PreTrainedModel:
    """Build the model. Every call gives the same random weights."""
    model: PreTrainedModel = build_model(
        family=family, shape=SHAPES[family], vocab_size=VOCABULARY, pad_id=0, eos_id=1,
        bos_id=None, seed=1,
    )  # fmt: skip
    model.train(mode=True)
    return model


class Side:
    """Model, batch and optimizer of one side."""

    def __init__(self, family: str, runtime: Runtime, *, rank: int | None) -> None:
        self.runtime = runtime
        self.model = model_of(family)
        self.batch = batch_of(
            family, rows=ROWS, source=LENGTH, target=LENGTH, vocabulary=VOCABULARY
        )
        if rank is not None:
            attach(self.model, AdapterConfig(r=rank, dropout=0.0), base="bench", seed=1)
            hold_frozen(self.model, runtime.dtype)
        self.optimizer = build_optimizer(self.model)
        share = 0.5 if family == "t5" else 0.0
        self.flops = flops_per_token(
            self.model,
            context=LENGTH / 2,
            source_share=share,
            source_context=float(LENGTH),
        )

    def update(self) -> float:
        """Compute one update. Return its loss in nats per token."""
        return update(self.model, self.batch, self.runtime, self.optimizer, lr=1e-4)


def measure(a: argparse.Namespace) -> harness.Result:
    """Run updates of the adapter and of all weights in turn."""
    runtime = Runtime.detect(device="cpu", precision=a.precision)
    full = Side(a.family, runtime, rank=None)
    part = Side(a.family, runtime, rank=a.rank)
    losses = {"ours": part.update(), "theirs": full.update()}
    agree = abs(losses["ours"] - losses["theirs"]) <= 1e-3 * losses["theirs"]

    def updates(side: Side) -> None:
        for _ in range(a.steps):
            side.update()

    result = harness.paired(
        lambda _: updates(part),
        lambda _: updates(full),
        pairs=a.pairs,
        quality=lambda *_: {"passes": agree, "first_losses": losses},
    )
    counts = parameter_counts(part.model)
    result.details = {
        "ratio_of_core_seconds": result.ratio_by(harness.by_processor),
        "bound": 1.5,
        "bound_here": round(full.flops / part.flops, 3),
        "shape": SHAPES[a.family],
        "rows": [ROWS, LENGTH],
        "parameters": {"total": counts.total, "trained": counts.trainable},
        "threads": torch.get_num_threads(),
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(SHAPES), default="llama")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--steps", type=int, default=2, help="updates per run")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--precision", choices=["bf16", "float32"], default="bf16")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
