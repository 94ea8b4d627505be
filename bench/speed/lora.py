"""Updates of an adapter against updates of all weights, same model and batch; prints JSON.

    python bench/lora.py [--family llama] [--pairs 3] [--steps 2] [--precision bf16]

The bound of the ratio is 1.5: a weight costs 2 operations a token forward, 2 for the gradient of
its input and 2 for its own; frozen ones are spared the last (6 / 4). "bound_here" is the same for
this model, attention, head and adapter counted, the optimizer's step not. Full and adapter in
turn, each pair one ratio; the median is given. Quality: before the first update B is zero, so both
losses must agree (bf16: 1e-3 of the loss, the frozen matrices being held in the format autocast
rounds them to), or the ratio is void. On a machine shared with others the ratio of core seconds,
with one thread, is the steadier one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from typing import Any

import torch
from about import versions
from transformers import PreTrainedModel

from toque.batch import Batch, DecoderBatch, EncoderDecoderBatch
from toque.models.forward.loss import loss_sum
from toque.models.loading.pretrained import build_model, flops_per_token, parameter_counts
from toque.models.lora.layers import adapter_parameters, attach, hold_frozen, resolve
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
    """The same random weights every time."""
    model: PreTrainedModel = build_model(
        family=family,
        shape=SHAPES[family],
        vocab_size=VOCABULARY,
        pad_id=0,
        eos_id=1,
        bos_id=None,
        seed=1,
    )
    model.train(mode=True)
    return model


def batch_of(
    family: str,
    *,
    rows: int = ROWS,
    source: int = LENGTH,
    target: int = LENGTH,
    vocabulary: int = VOCABULARY,
) -> Batch:
    """One example a row, every target position with a label; `source` counts for T5 alone."""
    made = torch.Generator().manual_seed(2)
    tokens = torch.randint(2, vocabulary, (rows, target), generator=made)
    ids = tuple((i,) for i in range(rows))
    labels, segments = tokens.roll(-1, 1), torch.ones_like(tokens, dtype=torch.int32)
    if family == "t5":
        prompt = torch.randint(2, vocabulary, (rows, source), generator=made)
        return EncoderDecoderBatch(
            labels=labels, example_ids=ids, source_tokens=prompt,
            source_segments=torch.ones_like(prompt, dtype=torch.int32),
            target_tokens=tokens, target_segments=segments,
        )  # fmt: skip
    positions = torch.arange(target).expand_as(tokens).contiguous()
    return DecoderBatch(labels, ids, tokens, segments, positions)


class Side:
    """One way to train, ready to be timed."""

    def __init__(self, family: str, runtime: Runtime, *, rank: int | None) -> None:
        self.model, self.runtime, self.batch = model_of(family), runtime, batch_of(family)
        if rank is not None:
            shape = resolve(self.model, kind="lora", r=rank, dropout=0.0)
            self.predicted = adapter_parameters(self.model, shape)
            attach(self.model, shape, base="bench", seed=1)
            hold_frozen(self.model, runtime.dtype)
        self.optimizer = build_optimizer(self.model)
        share = 0.5 if family == "t5" else 0.0
        self.flops = flops_per_token(
            self.model, context=LENGTH / 2, source_share=share, source_context=float(LENGTH)
        )

    def update(self) -> float:
        """One update; its loss in nats a token."""
        with self.runtime.autocast():
            loss = loss_sum(self.model, self.batch) / self.batch.n_targets
        self.runtime.backward(loss)
        self.runtime.update(self.optimizer, lr=1e-4, max_grad_norm=1.0, loss=loss.detach())
        return loss.item()

    def seconds(self, steps: int) -> tuple[float, float]:
        """Median seconds of an update: on the clock, and of this process on its cores."""
        clock, cores = [], []
        for _ in range(steps):
            started = time.perf_counter(), time.process_time()
            self.update()
            clock.append(time.perf_counter() - started[0])
            cores.append(time.process_time() - started[1])
        return statistics.median(clock), statistics.median(cores)


def main() -> None:
    """Measure and print."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--family", choices=sorted(SHAPES), default="llama")
    arguments.add_argument("--pairs", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=2)
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--precision", choices=["bf16", "float32"], default="bf16")
    given = arguments.parse_args()
    runtime = Runtime.detect(device="cpu", precision=given.precision)
    full = Side(given.family, runtime, rank=None)
    part = Side(given.family, runtime, rank=given.rank)
    losses = full.update(), part.update()
    agree = abs(losses[0] - losses[1]) <= 1e-3 * losses[0]
    pairs = [(full.seconds(given.steps), part.seconds(given.steps)) for _ in range(given.pairs)]
    ratio, of_cores = (statistics.median(f[i] / p[i] for f, p in pairs) for i in (0, 1))
    counts = parameter_counts(part.model)
    report = {
        "what": "an update of a LoRA adapter against one of all weights",
        "ratio": round(ratio, 3) if agree else "void",
        "ratio_of_core_seconds": round(of_cores, 3) if agree else "void",
        "bound": 1.5,
        "bound_here": round(full.flops / part.flops, 3),
        "seconds_full_and_adapter": [
            [[round(s, 3) for s in side] for side in pair] for pair in pairs
        ],
        "first_losses": losses,
        "agree": agree,
        "family": given.family,
        "shape": SHAPES[given.family],
        "rows": [ROWS, LENGTH],
        "precision": given.precision,
        "parameters": {"total": counts.total, "trained": counts.trainable},
        "adapter_predicted": part.predicted,
        "versions": versions("torch", "transformers"),
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "command": " ".join(sys.argv),
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
