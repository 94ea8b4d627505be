"""One update of a small model on cookbook recipes, computed in two ways in turn."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from updates import update

from toque.batch import Batch
from toque.config.resolve import resolve_values
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.prepare.pipeline import prepare
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.flex_attention import use_attention
from toque.training.optim.factory import build_optimizer
from toque.training.placement import arithmetic_of
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.prepared_store import open_store, prepare_settings, sources_of

LARGE = {"hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
         "intermediate_size": 2048}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 4, "num_heads": 8,
           "dropout_rate": 0.0},
    "gpt2": {"n_embd": 512, "n_layer": 6, "n_head": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
             "attn_pdrop": 0.0},
    "neox": LARGE,
    "llama": LARGE,
}  # fmt: skip
Found = dict[str, Any]
RECIPES, EXAMPLES, MICRO_BATCH, UPDATES = 600, 16, 4096, 4
"""Recipes in the store, examples of an update, tokens computed at once, updates of a loop."""


class Bench:
    """A model, an optimizer and the same update laid out packed and not."""

    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        shape = json.loads(Path(a.shape).read_text()) if a.shape else SHAPES[a.family]
        write_cookbook(folder / "cookbook.jsonl", RECIPES, seed=1)
        values = {
            "run_dir": str(folder / "run"),
            "model": {"family": a.family, "shape": shape, "tokenizer": f"trained:{a.vocabulary}"},
            "data": {
                "sources": [{"path": str(folder / "cookbook.jsonl")}],
                "store": str(folder / "store"),
            },
            "train": {"batch": f"{EXAMPLES} examples"},
        }
        self.folder = folder
        config = self.config = resolve_values(values).config
        prepare(
            sources_of(config),
            store=folder / "store",
            settings=prepare_settings(config),
            workers=1,
        )
        store = open_store(config)
        self.runtime = Runtime.detect(device=a.device, precision=a.precision, deterministic=False)
        self.model = build_language_model(config, store).to(self.runtime.device)
        self.stock = {module: type(module) for module in self.model.modules()}
        self.exchanged = use_cpu_layers(self.model)
        self.model.train()
        stream = self.stream = build_stream(config, store, self.model)
        self.arithmetic = arithmetic_of(self.model, stream)
        step = stream.at(Cursor())
        self.useful = step.n_tokens
        self.packed = step.batch.to(self.runtime.device)
        alone = replace(stream.layout, packed=False)
        self.alone = alone.batch(step.batch.example_ids).to(self.runtime.device)
        self.optimizer = build_optimizer(self.model)

    def update(self, batch: Batch, *, precision: str | None = None) -> tuple[float, float]:
        """Seconds of one update, and its mean loss; the learning rate is 0, the work is not."""
        tokens = batch.n_computed // batch.n_rows
        kept = self.runtime.precision
        self.runtime.precision = precision or kept  # type: ignore[assignment]
        self.wait()
        begun = time.perf_counter()
        rows = max(1, MICRO_BATCH // tokens)
        loss = update(self.model, batch, self.runtime, self.optimizer, lr=0.0, rows=rows)
        seconds = time.perf_counter() - begun
        self.runtime.precision = kept
        return seconds, loss

    @contextmanager
    def stock_layers(self) -> Iterator[None]:
        """With the layers as transformers has them."""
        shipped = {module: type(module) for module in self.stock}
        try:
            for module, kind in self.stock.items():
                module.__class__ = kind
            yield
        finally:
            for module, kind in shipped.items():
                module.__class__ = kind

    def wait(self) -> None:
        """Until the device has done what it was told."""
        if self.runtime.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def attending(b: Bench, name: Any) -> Iterator[None]:
    """Packed forwards by one attention."""
    use_attention(b.model, name)
    try:
        yield
    finally:
        use_attention(b.model, "auto")


Way = Callable[[], tuple[float, float]]
"""Seconds and loss of one update."""


def in_turn(a: argparse.Namespace, off: Way, on: Way, tolerance: float | None = None) -> Found:
    """Both ways `--pairs` times after one update each to warm up.

    The ratio is void when the two losses differ by more than `tolerance`, relatively.
    """
    losses = [off()[1], on()[1]]
    apart = abs(losses[0] / losses[1] - 1) if losses[1] else 0.0
    same = apart <= (a.close if tolerance is None else tolerance)
    result = harness.paired(
        lambda _: {"seconds": on()[0]},
        lambda _: {"seconds": off()[0]},
        pairs=a.pairs,
        score=lambda run: 1 / run.value["seconds"],
        quality=lambda *_: {"passes": same, "losses": losses, "loss_difference": apart},
    )
    result.details = {
        name: round(statistics.median(run["seconds"] for run in side), 4)
        for name, side in (("off_seconds", result.theirs), ("on_seconds", result.ours))
    }
    return result.as_part()
