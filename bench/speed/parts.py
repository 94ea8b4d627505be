"""Ablation of the training step: the time of each optimisation, on and off.

    python bench/speed/parts.py [--family t5] [--pairs 3] [--parts packing,head] [--device auto]

All parts use one small model and the same cookbook recipes. `--shape FILE` gives another shape: a
JSON file with arguments of the Hugging Face config. Each pair computes one update with the part on
and one with the part off. Its ratio is off / on. "on" is the default of Toque. Most parts are a
switch of `train.optimisations`; "packing", "bf16" and "compile" are separate settings. "compile"
runs only if `--parts` names it, because compiling takes minutes on two cores.

Quality: both first losses must agree within 1e-5 (bf16: 1e-2). Otherwise the ratio of that part is
void. `details.parts` has one ratio per part, and the ratio of the record is null. `gemm` is the
matrix rate in the precision of the run. `mfu` divides by it and counts useful tokens only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from updates import synchronize, update

from toque.batch import IGNORE, Batch
from toque.config.resolve import resolve_values
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.loader.batch_stream import BatchStream, Prefetch
from toque.data.prepare.pipeline import prepare
from toque.models.forward import grouped_attention as grouped
from toque.models.forward import loss as objective
from toque.models.forward import varlen_attention as segmented
from toque.models.forward.attention import attention_of, use_attention
from toque.models.forward.blocks import compile_blocks, stop_compiling
from toque.models.forward.cpu_layers import use_cpu_layers
from toque.models.forward.keyed_dropout import Dropout, use_keyed_dropout
from toque.models.loading.from_scratch import fuse_activations, stock_activations
from toque.runs.peak import peak_of
from toque.training.arithmetic import count_flops
from toque.training.checkpoint.saver import SnapshotBuffers, lower_priority
from toque.training.optim.factory import build_optimizer
from toque.training.optimisations import choose_prefetch
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.prepared_store import open_sources, open_store, prepare_settings

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
PartResult = dict[str, Any]
RECIPES = 600
EXAMPLES = 16
"""Examples per update."""
MICRO_BATCH = 4096
"""Tokens per micro-batch."""
UPDATES = 4
"""Updates per measured loop."""


class Bench:
    """A model, its optimizer, and one update in packed and unpacked rows."""

    def __init__(self, a: argparse.Namespace, folder: Path) -> None:
        shape = json.loads(Path(a.shape).read_text()) if a.shape else SHAPES[a.family]
        write_cookbook(folder / "cookbook.jsonl", RECIPES, seed=1)
        values = {
            "run_dir": str(folder / "run"),
            "model": {
                "family": a.family,
                "shape": shape,
                "tokenizer": f"trained:{a.vocabulary}",
            },
            "data": {
                "sources": [{"path": str(folder / "cookbook.jsonl")}],
                "store": str(folder / "store"),
            },
            "train": {"batch": f"{EXAMPLES} examples"},
        }
        self.folder = folder
        config = self.config = resolve_values(values).config
        settings = prepare_settings(config)
        prepare(
            open_sources(config), store=folder / "store", settings=settings, workers=1
        )
        store = open_store(config)
        self.runtime = Runtime.detect(
            device=a.device, precision=a.precision, deterministic=False
        )
        self.model = build_language_model(config, store).to(self.runtime.device)
        self.stock_classes = {module: type(module) for module in self.model.modules()}
        self.has_cpu_layers = use_cpu_layers(self.model)
        self.model.train()
        stream = self.stream = build_stream(config, store, self.model)
        self.arithmetic = count_flops(self.model, stream)
        step = stream.at(Cursor())
        self.useful = step.n_tokens
        self.packed = step.batch.to(self.runtime.device)
        alone = replace(stream.layout, packed=False)
        self.alone = alone.batch(step.batch.example_ids).to(self.runtime.device)
        self.optimizer = build_optimizer(self.model)

    def update(
        self, batch: Batch, *, precision: str | None = None
    ) -> tuple[float, float]:
        """Compute one update at a learning rate of 0. Return its seconds and its mean loss."""
        tokens = batch.n_computed // batch.n_rows
        default_precision = self.runtime.precision
        self.runtime.precision = precision or default_precision  # type: ignore[assignment]
        self.wait()
        begun = time.perf_counter()
        rows = max(1, MICRO_BATCH // tokens)
        loss = update(
            self.model, batch, self.runtime, self.optimizer, lr=0.0, rows=rows
        )
        seconds = time.perf_counter() - begun
        self.runtime.precision = default_precision
        return seconds, loss

    @contextmanager
    def stock_layers(self) -> Iterator[None]:
        """Use the layers of transformers inside this context."""
        shipped = {module: type(module) for module in self.stock_classes}
        try:
            for module, kind in self.stock_classes.items():
                module.__class__ = kind
            yield
        finally:
            for module, kind in shipped.items():
                module.__class__ = kind

    def wait(self) -> None:
        """Wait until the device has finished."""
        synchronize(self.runtime.device)


@contextmanager
def attending(b: Bench, name: Any) -> Iterator[None]:
    """Use one attention for packed rows inside this context."""
    use_attention(b.model, name)
    try:
        yield
    finally:
        use_attention(b.model, "auto")


Way = Callable[[], tuple[float, float]]
"""A function that computes one update and returns its seconds and its loss."""


def in_turn(
    a: argparse.Namespace, off: Way, on: Way, tolerance: float | None = None
) -> PartResult:
    """Measure both ways `--pairs` times, after one warm-up update each.

    The ratio is void if the relative difference of the two losses exceeds `tolerance`.
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


def whole_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, **_: Any
) -> Tensor:
    """Compute all logits at once, then F.cross_entropy in float32."""
    logits = F.linear(hidden, weight.to(hidden.dtype), bias).float()
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def packing(a: argparse.Namespace, b: Bench) -> PartResult:
    """One example per row against packed rows, both with dense masks."""
    with attending(b, "dense"):
        result = in_turn(a, lambda: b.update(b.alone), lambda: b.update(b.packed))
    padding = {
        "off": b.alone.n_computed - b.useful,
        "on": b.packed.n_computed - b.useful,
    }
    return result | {"padding_tokens": padding}


def attention(a: argparse.Namespace, b: Bench) -> PartResult:
    """Dense masks over packed rows against the attention that `auto` chooses."""
    with b.runtime.autocast():
        chosen = attention_of(b.model, b.runtime.device)

    def off() -> tuple[float, float]:
        with attending(b, "dense"):
            return b.update(b.packed)

    result = in_turn(a, off, lambda: b.update(b.packed))
    return result | {"attention": chosen.name, "notes": chosen.notes}


def head(a: argparse.Namespace, b: Bench) -> PartResult:
    """All logits at once against the chunked head."""

    def off() -> tuple[float, float]:
        with patch.object(objective, "cross_entropy_sum", whole_logits):
            return b.update(b.packed)

    return in_turn(a, off, lambda: b.update(b.packed))


def activations(a: argparse.Namespace, b: Bench) -> PartResult:
    """GELU of transformers in eight operators against one kernel."""

    def off() -> tuple[float, float]:
        stock_activations(b.model)
        try:
            return b.update(b.packed)
        finally:
            fuse_activations(b.model)

    fused_classes = list(map(type, b.model.modules()))
    stock_activations(b.model)
    unchanged = fused_classes == list(map(type, b.model.modules()))
    fuse_activations(b.model)
    if unchanged:
        return {
            "skipped": "the activation of this family is one kernel in transformers"
        }
    return in_turn(a, off, lambda: b.update(b.packed))


def layers(a: argparse.Namespace, b: Bench) -> PartResult:
    """Layers of transformers against the CPU layers of Toque."""
    if not b.has_cpu_layers:
        return {
            "skipped": "Toque uses the layers of transformers on this device in this precision"
        }

    def off() -> tuple[float, float]:
        with b.stock_layers():
            return b.update(b.packed)

    return in_turn(a, off, lambda: b.update(b.packed), max(a.close, 1e-4))


def prefetch(a: argparse.Namespace, b: Bench) -> PartResult:
    """Batches made on demand against batches prefetched, and on a GPU copied, ahead."""

    def loop(make: Callable[[BatchStream, Cursor], Prefetch]) -> tuple[float, float]:
        with make(b.stream, Cursor()) as ahead:
            b.wait()
            begun = time.perf_counter()
            losses = [
                b.update(ahead.next()[1].to(b.runtime.device))[1]
                for _ in range(UPDATES)
            ]
            b.wait()
            return (time.perf_counter() - begun) / UPDATES, losses[-1]

    shipped = choose_prefetch(b.config.train.optimisations, b.runtime)
    return in_turn(a, lambda: loop(partial(Prefetch, depth=0)), lambda: loop(shipped))


def saves(a: argparse.Namespace, b: Bench) -> PartResult:
    """Weights written before the next updates against written in the background."""

    def write(tensors: Any) -> None:
        path = Path(b.folder) / "saved.safetensors"
        save_file(tensors["model"], path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    slot = SnapshotBuffers()  # reuses its memory for each save

    def loop(*, background: bool) -> tuple[float, float]:
        writer = ThreadPoolExecutor(1, "toque-save", lower_priority)
        tensors = {"model": {n: p.detach() for n, p in b.model.state_dict().items()}}
        tensors["model"] = {n: t.clone() for n, t in tensors["model"].items()}
        b.wait()
        begun = time.perf_counter()
        if background:
            writer.submit(write, slot.copy(tensors))
        else:
            write({"model": {n: t.cpu() for n, t in tensors["model"].items()}})
        losses = [b.update(b.packed)[1] for _ in range(UPDATES)]
        seconds = time.perf_counter() - begun
        writer.shutdown()
        return seconds, losses[-1]

    return in_turn(a, lambda: loop(background=False), lambda: loop(background=True))


def bf16(a: argparse.Namespace, b: Bench) -> PartResult:
    """float32 against bf16, both in layers of transformers."""
    with b.stock_layers():
        return in_turn(
            a,
            lambda: b.update(b.packed, precision="float32"),
            lambda: b.update(b.packed, precision="bf16"),
            1e-2,
        )


def compiled(a: argparse.Namespace, b: Bench) -> PartResult:
    """Eager blocks (the default) against compiled blocks, without the time to compile."""
    begun = time.perf_counter()

    def on() -> tuple[float, float]:
        compile_blocks(b.model)
        try:
            return b.update(b.packed)
        finally:
            stop_compiling(b.model)

    on()
    seconds = time.perf_counter() - begun
    result = in_turn(a, lambda: b.update(b.packed), on, max(a.close, 1e-4))
    return result | {"compile_seconds": round(seconds, 1)}


def dropout(a: argparse.Namespace, b: Bench) -> PartResult:
    """Dropout of PyTorch against ours at 0.1, in layers and attention, with different draws."""
    if b.runtime.device.type != "cpu":
        return {"skipped": "measured on a CPU only"}
    use_keyed_dropout(b.model)
    places = [(m, "p") for m in b.model.modules() if isinstance(m, torch.nn.Dropout)]
    places += [
        (m, "dropout")
        for m in b.model.modules()
        if isinstance(getattr(m, "dropout", None), float)
    ]

    def update() -> tuple[float, float]:
        for module, name in places:
            setattr(module, name, 0.1)
        try:
            return b.update(b.packed)
        finally:
            for module, name in places:
                setattr(module, name, 0.0)

    def stock_mask(like: Tensor, p: float, _: Tensor | None = None) -> Tensor:
        return F.dropout(torch.ones_like(like), p)

    def off() -> tuple[float, float]:
        with (
            patch.object(Dropout, "forward", torch.nn.Dropout.forward),
            patch.object(segmented, "keep_mask", stock_mask),
            patch.object(grouped, "keep_mask", stock_mask),
        ):
            return update()

    return in_turn(a, off, update, 2e-2)


def optimizer(a: argparse.Namespace, b: Bench) -> PartResult:
    """Default AdamW of PyTorch against fused AdamW, optimizer step only."""
    plain = torch.optim.AdamW(b.model.parameters(), lr=0.0)
    for p in b.model.parameters():
        p.grad = torch.full_like(p, 1e-3)

    def step(chosen: torch.optim.Optimizer) -> tuple[float, float]:
        b.wait()
        begun = time.perf_counter()
        chosen.step()
        b.wait()
        return time.perf_counter() - begun, 0.0

    for group in b.optimizer.param_groups:
        group["lr"] = 0.0
    result = in_turn(a, lambda: step(plain), lambda: step(b.optimizer))
    b.optimizer.zero_grad(set_to_none=True)
    return result


def causal(a: argparse.Namespace, b: Bench) -> PartResult:
    """A cached [1024, 1024] mask against `is_causal`, in attention of PyTorch, 8 heads of 64."""
    device, dtype = b.runtime.device, b.runtime.dtype
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 8, 1024, 64, generator=generator)
        .to(device, dtype)
        .requires_grad_()
        for _ in range(3)
    )
    mask = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril()

    def attend(**options: Any) -> tuple[float, float]:
        b.wait()
        begun = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, **options)
        out.sum().backward()
        b.wait()
        return time.perf_counter() - begun, float(out.detach().float().abs().mean())

    tolerance = 1e-2 if dtype != torch.float32 else 1e-5
    return in_turn(
        a, lambda: attend(attn_mask=mask), lambda: attend(is_causal=True), tolerance
    )


def copies(a: argparse.Namespace, b: Bench) -> PartResult:
    """Copies to the GPU from pageable memory against pinned, non-blocking copies."""
    if b.runtime.device.type != "cuda":
        return {"skipped": "the model is on the CPU, so there is nothing to copy"}
    pageable = b.packed.to("cpu")
    pinned = pageable.pin()

    def off() -> tuple[float, float]:
        moved = {n: t.to(b.runtime.device) for n, t in pageable._tensors().items()}  # noqa: SLF001
        seconds, loss = b.update(
            type(pageable)(example_ids=pageable.example_ids, **moved)
        )
        return seconds, loss

    return in_turn(a, off, lambda: b.update(pinned.to(b.runtime.device)))


PARTS = {
    "attention": attention,
    "dropout": dropout,
    "activations": activations,
    "layers": layers,
    "head": head,
    "prefetch": prefetch,
    "saves": saves,
    "packing": packing,
    "bf16": bf16,
    "compile": compiled,
    "optimizer": optimizer,
    "causal": causal,
    "copies": copies,
}


def measure(a: argparse.Namespace) -> harness.Result:
    """Measure the requested parts."""
    torch.set_num_threads(a.threads)
    parts: dict[str, PartResult] = {}
    with tempfile.TemporaryDirectory(prefix="parts-") as name:
        b = Bench(a, Path(name))
        a.close = 1e-5 if b.runtime.precision == "float32" else 1e-2
        default_seconds = statistics.median(
            b.update(b.packed)[0] for _ in range(a.pairs + 1)
        )
        for part in a.parts.split(","):
            harness.note(part)
            parts[part] = {"what": PARTS[part].__doc__} | PARTS[part](a, b)
    gemm = peak_of(b.runtime.device, b.runtime.dtype, b.arithmetic.products)
    speed = b.useful / default_seconds
    result = harness.Result(
        details={
            "parts": parts,
            "useful_tokens": b.useful,
            "padding_tokens_packed": b.packed.n_computed - b.useful,
            "useful_tokens_per_second": round(speed, 1),
            "gemm": {
                "gflops": round(gemm.flops_per_second / 1e9, 1),
                "origin": gemm.origin,
            },
            "mfu": round(
                speed * b.arithmetic.flops_per_token / gemm.flops_per_second, 3
            ),
            "precision": b.runtime.precision,
            "device": str(b.runtime.device),
        }
    )
    void = [
        name
        for name, part in parts.items()
        if not part.get("quality", {}).get("passes", True)
    ]
    if void:
        result.void(f"the losses with the part on and off differ: {', '.join(void)}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(SHAPES), default="t5")
    p.add_argument("--pairs", type=int, default=3)
    usual = ",".join(name for name in PARTS if name != "compile")
    p.add_argument(
        "--parts", default=usual, help=f"comma-separated, from {', '.join(PARTS)}"
    )
    p.add_argument("--shape", help="JSON file with config arguments of the family")
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="auto")
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
