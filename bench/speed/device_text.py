"""Generation and evaluation speed on this device, at several batch sizes.

    python bench/speed/device_text.py --shape neox-1.2b

The weights and the prompts are random, so every text has the maximum length. `--shape` is a name
from bench/speed/sweep.py. The default is a tiny shape on a CPU and 1.2 billion parameters on a GPU.
The other side is `generate` of transformers, greedy, in the same precision, with its cache and the
same prompts. All prompts have the same length, so neither side pads. The ratio compares tokens per
second per batch size. Quality: every text is complete on both sides, and the loss is finite and
differs by less than 1 % between batch sizes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import torch
from sweep import SHAPES, VOCABULARY, model_on_device
from transformers import PreTrainedModel
from updates import batch_of, synchronize

from toque.models.forward.loss import loss_sum
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions
from toque.models.loading.from_scratch import fuse_activations
from toque.training.runtime import Runtime


def seconds_of(runtime: Runtime, begun: float) -> float:
    """Wait for the device. Return the seconds since `begun`."""
    synchronize(runtime.device)
    return time.perf_counter() - begun


def random_prompts(a: argparse.Namespace, rows: int) -> torch.Tensor:
    """Draw the prompts of one batch size."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(2, 1000, (rows, a.prompt), generator=generator)


def by_toque(
    a: argparse.Namespace, model: PreTrainedModel, runtime: Runtime, rows: int
) -> Any:
    """Generate texts of `--new` tokens by Toque, `rows` at a time."""
    prompts = random_prompts(a, rows).tolist()
    bf16 = runtime.precision == "bf16"
    options = GenerationOptions(
        max_new_tokens=a.new, batch_rows=rows, precision="bf16" if bf16 else "float32"
    )
    generate(
        model, prompts[:1], replace(options, max_new_tokens=2), eos_id=-1, pad_id=0
    )
    begun = time.perf_counter()
    texts = generate(model, prompts, options, eos_id=-1, pad_id=0)
    seconds = seconds_of(runtime, begun)
    tokens = sum(map(len, texts))
    return {
        "rows": rows,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
    }


def by_transformers(
    a: argparse.Namespace, model: PreTrainedModel, rows: int
) -> dict[str, Any]:
    """Generate the same texts by transformers."""
    prompts = random_prompts(a, rows).to(model.device)
    settings: dict[str, Any] = {
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    settings["attention_mask"] = torch.ones_like(prompts)

    def texts(new: int) -> torch.Tensor:
        output: Any = model.generate(
            prompts, max_new_tokens=new, min_new_tokens=new, **settings
        )  # type: ignore[operator]
        return output[:, 1 if model.config.is_encoder_decoder else a.prompt :]

    with torch.inference_mode():
        texts(2)
        begun = time.perf_counter()
        tokens = texts(a.new).cpu().numel()
        seconds = time.perf_counter() - begun
    return {
        "rows": rows,
        "tokens": tokens,
        "tokens_per_second": round(tokens / seconds, 1),
    }


def held_out(
    a: argparse.Namespace, model: PreTrainedModel, runtime: Runtime, rows: int
) -> Any:
    """Compute the held-out loss, `rows` rows at a time."""
    vocabulary = int(model.config.vocab_size)
    batch = batch_of(
        a.family, rows=a.held_out, source=a.target, target=a.target, vocabulary=vocabulary,
        examples=4,
    )  # fmt: skip
    with torch.no_grad(), runtime.autocast():
        loss_sum(model, batch.split(rows)[0].to(runtime.device))
        begun = time.perf_counter()
        total = sum(
            float(loss_sum(model, m.to(runtime.device))) for m in batch.split(rows)
        )
        seconds = seconds_of(runtime, begun)
    speed = round(batch.n_tokens / seconds, 1)
    return {"rows": rows, "tokens_per_second": speed, "loss": total / batch.n_targets}


def measure(a: argparse.Namespace) -> harness.Result:
    """Measure generation and evaluation at every batch size."""
    runtime = Runtime.detect(device=a.device, deterministic=False)
    on_gpu = runtime.device.type == "cuda"
    name = a.shape or ("neox-1.2b" if on_gpu else "tiny-neox")
    if not on_gpu:
        a.target, a.new, a.prompt = (
            min(a.target, 256),
            min(a.new, 32),
            min(a.prompt, 32),
        )
    shape = argparse.Namespace(
        family=a.family, shape=name, vocabulary=0, dropout=None, lora=0
    )
    model = model_on_device(shape, runtime).eval()
    fuse_activations(model)
    batches = [int(rows) for rows in a.rows.split(",")]
    texts = [by_toque(a, model, runtime, rows) for rows in batches]
    losses = [
        held_out(a, model, runtime, rows) for rows in batches if rows <= a.held_out
    ]
    if runtime.precision == "bf16":
        model.to(torch.bfloat16)  # type: ignore[arg-type]
    theirs = [by_transformers(a, model, rows) for rows in batches]
    result = harness.Result(
        ours={"texts": texts, "held_out": losses}, theirs={"texts": theirs}
    )
    pairs = zip(texts, theirs, strict=True)
    ratios = [
        round(x["tokens_per_second"] / y["tokens_per_second"], 3) for x, y in pairs
    ]
    result.ratio = {
        "median": statistics.median(ratios),
        "worst": min(ratios),
        "pairs": ratios,
    }
    result.details = {
        "shape": name,
        "precision": runtime.precision,
        "device": str(runtime.device),
    }
    short = [run for run in texts + theirs if run["tokens"] != run["rows"] * a.new]
    different = [
        run for run in losses if not abs(run["loss"] / losses[0]["loss"] - 1) < 0.01
    ]
    if short or different:
        result.void("a text ended early, or the loss depends on the batch size")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(VOCABULARY), default="neox")
    p.add_argument("--shape", help=", ".join(SHAPES))
    p.add_argument("--rows", default="1,8,32")
    p.add_argument("--prompt", type=int, default=128)
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--target", type=int, default=2048)
    p.add_argument("--held-out", type=int, default=32)
    p.add_argument("--device", default="auto")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
