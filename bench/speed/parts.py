"""Ablation of the training step in time: what each part is worth, switched on and off.

    python bench/speed/parts.py [--family t5] [--pairs 3] [--parts packing,head] [--device auto]

One model and the same examples for all: cookbook recipes, a tokenizer learnt from them, a small
shape (or `--shape FILE`, arguments of the family's Hugging Face config). A part's two ways run in
turn in this process, on first, each for one whole update; the ratio of a pair is off / on. "on" is
what is shipped, one switch of `train.optimisations` turned off at a time; "packing", "bf16" and
"compile" have settings of their own. "packing" is computed through masks both ways.
"compile" is measured when it is named: on two CPU cores it takes longer than all others together.

Quality: the first update's loss both ways, from the same weights, must agree to 1e-5 (bf16: 1e-2),
or that part's ratio is void. The record's own ratio is null: `details.parts` has one for each part.
`gemm` is the matrix rate in the precision of the run, stated or timed here (`origin`); `mfu`
divides by it and counts useful tokens only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from two_ways import SHAPES, UPDATES, Bench, Found, attending, in_turn

from toque.batch import IGNORE
from toque.data.loader.batch_stream import BatchStream, Prefetch
from toque.models.forward import grouped_attention as grouped
from toque.models.forward import loss as objective
from toque.models.forward import varlen_attention as segmented
from toque.models.forward.blocks import compile_blocks, stop_compiling
from toque.models.forward.flex_attention import attention_of
from toque.models.forward.keyed_dropout import Dropout, use_keyed_dropout
from toque.models.loading.from_scratch import fuse_activations, stock_activations
from toque.runs.outlined_update import peak_of
from toque.training.checkpoint.saver import Slot, lower_priority
from toque.training.placement import prefetching
from toque.units import Cursor


def whole_logits(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None, **_: Any
) -> Tensor:
    """What the chunked head replaces: all logits at once, then F.cross_entropy in float32."""
    logits = F.linear(hidden, weight.to(hidden.dtype), bias).float()
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def packing(a: argparse.Namespace, b: Bench) -> Found:
    """One example a row against packed rows, both through masks."""
    with attending(b, "dense"):
        found = in_turn(a, lambda: b.update(b.alone), lambda: b.update(b.packed))
    padding = {"off": b.alone.n_computed - b.useful, "on": b.packed.n_computed - b.useful}
    return found | {"padding_tokens": padding}


def attention(a: argparse.Namespace, b: Bench) -> Found:
    """Masks over packed rows against the attention that `auto` takes."""
    with b.runtime.autocast():
        chosen = attention_of(b.model, b.runtime.device)

    def off() -> tuple[float, float]:
        with attending(b, "dense"):
            return b.update(b.packed)

    found = in_turn(a, off, lambda: b.update(b.packed))
    return found | {"attention": chosen.name, "notes": chosen.notes}


def head(a: argparse.Namespace, b: Bench) -> Found:
    """All logits at once against the chunked head."""

    def off() -> tuple[float, float]:
        with patch.object(objective, "cross_entropy_sum", whole_logits):
            return b.update(b.packed)

    return in_turn(a, off, lambda: b.update(b.packed))


def activations(a: argparse.Namespace, b: Bench) -> Found:
    """Transformers' GELU in eight steps against one kernel."""

    def off() -> tuple[float, float]:
        stock_activations(b.model)
        try:
            return b.update(b.packed)
        finally:
            fuse_activations(b.model)

    before = list(map(type, b.model.modules()))
    stock_activations(b.model)
    same = before == list(map(type, b.model.modules()))
    fuse_activations(b.model)
    if same:
        return {"skipped": "this family's activation is one kernel as it comes"}
    return in_turn(a, off, lambda: b.update(b.packed))


def layers(a: argparse.Namespace, b: Bench) -> Found:
    """Stock layers against those that this processor computes fastest in the run's precision."""
    if not b.exchanged:
        return {"skipped": "no layer is exchanged on this device in this precision"}

    def off() -> tuple[float, float]:
        with b.stock_layers():
            return b.update(b.packed)

    return in_turn(a, off, lambda: b.update(b.packed), max(a.close, 1e-4))


def prefetch(a: argparse.Namespace, b: Bench) -> Found:
    """Batches made when they are asked for against made, and on a GPU sent, ahead."""

    def loop(make: Callable[[BatchStream, Cursor], Prefetch]) -> tuple[float, float]:
        with make(b.stream, Cursor()) as ahead:
            b.wait()
            begun = time.perf_counter()
            losses = [b.update(ahead.next()[1].to(b.runtime.device))[1] for _ in range(UPDATES)]
            b.wait()
            return (time.perf_counter() - begun) / UPDATES, losses[-1]

    shipped = prefetching(b.config.train.optimisations, b.runtime)
    return in_turn(a, lambda: loop(partial(Prefetch, depth=0)), lambda: loop(shipped))


def saves(a: argparse.Namespace, b: Bench) -> Found:
    """Weights written before the next updates against beside them: the time of both together."""

    def write(tensors: Any) -> None:
        path = Path(b.folder) / "saved.safetensors"
        save_file(tensors["model"], path)
        with path.open("rb") as file:
            os.fsync(file.fileno())

    slot = Slot()  # its memory is kept from save to save

    def loop(*, background: bool) -> tuple[float, float]:
        writer = ThreadPoolExecutor(1, "toque-save", lower_priority)
        tensors = {"model": {n: p.detach() for n, p in b.model.state_dict().items()}}
        tensors["model"] = {n: t.clone() for n, t in tensors["model"].items()}
        b.wait()
        begun = time.perf_counter()
        if background:
            writer.submit(write, slot.copied(tensors))
        else:
            write({"model": {n: t.cpu() for n, t in tensors["model"].items()}})
        losses = [b.update(b.packed)[1] for _ in range(UPDATES)]
        seconds = time.perf_counter() - begun
        writer.shutdown()
        return seconds, losses[-1]

    return in_turn(a, lambda: loop(background=False), lambda: loop(background=True))


def bf16(a: argparse.Namespace, b: Bench) -> Found:
    """float32 against bf16, both in stock layers."""
    with b.stock_layers():
        return in_turn(
            a,
            lambda: b.update(b.packed, precision="float32"),
            lambda: b.update(b.packed, precision="bf16"),
            1e-2,
        )


def compiled(a: argparse.Namespace, b: Bench) -> Found:
    """Eager (the shipped way of this device) against compiled blocks; compiling is not timed."""
    begun = time.perf_counter()

    def on() -> tuple[float, float]:
        compile_blocks(b.model)
        try:
            return b.update(b.packed)
        finally:
            stop_compiling(b.model)

    on()
    seconds = time.perf_counter() - begun
    found = in_turn(a, lambda: b.update(b.packed), on, max(a.close, 1e-4))
    return found | {"compile_seconds": round(seconds, 1)}


def dropout(a: argparse.Namespace, b: Bench) -> Found:
    """PyTorch's dropout of 0.1 against ours, in the layers and in the attention; draws differ."""
    if b.runtime.device.type != "cpu":
        return {"skipped": "timed on a CPU alone"}
    use_keyed_dropout(b.model)
    places = [(m, "p") for m in b.model.modules() if isinstance(m, torch.nn.Dropout)]
    places += [
        (m, "dropout") for m in b.model.modules() if isinstance(getattr(m, "dropout", None), float)
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


def optimizer(a: argparse.Namespace, b: Bench) -> Found:
    """The AdamW of torch as it comes against the fused one that is shipped: the step alone."""
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
    found = in_turn(a, lambda: step(plain), lambda: step(b.optimizer))
    b.optimizer.zero_grad(set_to_none=True)
    return found


def causal(a: argparse.Namespace, b: Bench) -> Found:
    """A cached [L, L] mask against none, in PyTorch's attention: L 1,024, 8 heads of 64 (D1)."""
    device, dtype = b.runtime.device, b.runtime.dtype
    made = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, 8, 1024, 64, generator=made).to(device, dtype).requires_grad_()
        for _ in range(3)
    )
    mask = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril()

    def attend(**how: Any) -> tuple[float, float]:
        b.wait()
        begun = time.perf_counter()
        out = F.scaled_dot_product_attention(q, k, v, **how)
        out.sum().backward()
        b.wait()
        return time.perf_counter() - begun, float(out.detach().float().abs().mean())

    tolerance = 1e-2 if dtype != torch.float32 else 1e-5
    return in_turn(a, lambda: attend(attn_mask=mask), lambda: attend(is_causal=True), tolerance)


def copies(a: argparse.Namespace, b: Bench) -> Found:
    """Copies to the GPU from pageable memory against page-locked and non-blocking ones (D3)."""
    if b.runtime.device.type != "cuda":
        return {"skipped": "there is nothing to copy to: the model is on the CPU"}
    pageable = b.packed.to("cpu")
    pinned = pageable.pin()

    def off() -> tuple[float, float]:
        moved = {n: t.to(b.runtime.device) for n, t in pageable._tensors().items()}  # noqa: SLF001
        seconds, loss = b.update(type(pageable)(example_ids=pageable.example_ids, **moved))
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
    """Every part that is asked for."""
    torch.set_num_threads(a.threads)
    parts: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="parts-") as name:
        b = Bench(a, Path(name))
        a.close = 1e-5 if b.runtime.precision == "float32" else 1e-2
        shipped = statistics.median(b.update(b.packed)[0] for _ in range(a.pairs + 1))
        for part in a.parts.split(","):
            harness.note(part)
            parts[part] = {"what": PARTS[part].__doc__} | PARTS[part](a, b)
    gemm, speed = (
        peak_of(b.runtime.device, b.runtime.dtype, b.arithmetic.products),
        b.useful / shipped,
    )
    result = harness.Result(
        details={
            "parts": parts,
            "useful_tokens": b.useful,
            "padding_tokens_packed": b.packed.n_computed - b.useful,
            "useful_tokens_per_second": round(speed, 1),
            "gemm": {"gflops": round(gemm.flops_per_second / 1e9, 1), "origin": gemm.origin},
            "mfu": round(speed * b.arithmetic.flops_per_token / gemm.flops_per_second, 3),
            "precision": b.runtime.precision,
            "device": str(b.runtime.device),
        }
    )
    void = [name for name, part in parts.items() if not part.get("quality", {}).get("passes", True)]
    if void:
        result.void(f"the losses of both ways differ: {', '.join(void)}")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--family", choices=sorted(SHAPES), default="t5")
    p.add_argument("--pairs", type=int, default=3)
    usual = ",".join(name for name in PARTS if name != "compile")
    p.add_argument("--parts", default=usual, help=f"of {', '.join(PARTS)}")
    p.add_argument("--shape", help="a JSON file of the family's config arguments")
    p.add_argument("--vocabulary", type=int, default=8000)
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="auto")
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
