r"""Training updates at several micro-batch sizes: tokens per second, MFU, peak memory.

    python bench/speed/sweep.py --family neox --shape neox-1.2b --rows 1,2,4,8 --target 2048
    python bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --beside trainer
    python bench/speed/sweep.py --family t5 --shape flan-t5-xxl --lora 16 --rows 2 --source 256 \
        --target 512 --limit-gib 24

The weights and the tokens are random, and every row is full. `--shape` is a name from this file or
a JSON file. With `--lora R` the base is frozen and stored in the precision of the run. Each
micro-batch size runs in its own process, so each has its own peak memory. If one does not fit, its
error is recorded and the sweep continues. `mfu` divides by the stated peak of a known GPU, or by
the measured matrix rate (`peak_origin` names the source). Recomputed operations do not count.
`--limit-gib` limits the memory of a GPU to the size of a smaller one.

`--beside trainer` also runs `transformers.Trainer` on the same shape and rows, in the same
precision, with SDPA. This is its best case, because no row has padding. The ratio compares tokens
per second per micro-batch size. Quality: at least one size was computed, every loss is finite, and
both sides have the same number of parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

if (
    TYPE_CHECKING
):  # the parent process must not import torch: minutes on a GPU are short
    from torch import Tensor
    from transformers import PreTrainedModel

    from toque.batch import Batch
    from toque.training.runtime import Runtime

_FLAN = {"d_kv": 64, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
         "dropout_rate": 0.0}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "neox-1.2b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16,
                  "intermediate_size": 8192, "max_position_embeddings": 2048},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024,
                   "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "flan-t5-large": _FLAN | {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16},
    "flan-t5-large-6": _FLAN | {"d_model": 1024, "d_ff": 2816, "num_layers": 6, "num_heads": 16},
    "flan-t5-xxl": _FLAN | {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64},
    "tiny-neox": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "intermediate_size": 256, "max_position_embeddings": 256},
    "tiny-t5": _FLAN | {"d_model": 128, "d_ff": 256, "num_layers": 2, "num_heads": 2},
}  # fmt: skip
VOCABULARY = {"t5": 32128, "neox": 50304, "gpt2": 50257}


def shape_of(name: str) -> dict[str, Any]:
    """Return a shape by name, or read it from a JSON file."""
    shape: dict[str, Any] = SHAPES.get(name) or json.loads(Path(name).read_text())
    return shape


def dropouts(a: argparse.Namespace) -> dict[str, float]:
    """Return the config arguments for `--dropout`, or {} without it."""
    names = {"t5": ["dropout_rate"], "neox": ["attention_dropout", "hidden_dropout"]}
    names |= {"gpt2": ["attn_pdrop", "resid_pdrop", "embd_pdrop"]}
    return {} if a.dropout is None else dict.fromkeys(names[a.family], a.dropout)


def model_on_device(a: argparse.Namespace, runtime: Runtime) -> PreTrainedModel:
    """Build the model on its device, because a host takes minutes to draw the weights."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from toque.models.families import FAMILIES
    from toque.models.loading.from_scratch import give_own_head

    family = FAMILIES[a.family]
    arguments = shape_of(a.shape) | dropouts(a)
    arguments |= {"vocab_size": a.vocabulary or VOCABULARY[a.family], "pad_token_id": 0}
    arguments |= {"eos_token_id": 1, "bos_token_id": None}
    if family.is_encoder_decoder:
        arguments["decoder_start_token_id"] = 0
    config = family.config_class(**arguments)
    auto: Any = (
        AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    )
    torch.manual_seed(1)
    with torch.device(runtime.device):
        model = auto.from_config(
            config, dtype=runtime.dtype if a.lora else torch.float32
        )
        if family.is_encoder_decoder and arguments.get("tie_word_embeddings") is False:
            give_own_head(model)
    on_device: PreTrainedModel = model.to(runtime.device)
    return on_device


def apply_options(
    a: argparse.Namespace, model: PreTrainedModel, runtime: Runtime
) -> None:
    """Attach the adapter, choose the attention, and compile, as the options request."""
    from toque.config.schema_methods import AdapterConfig
    from toque.models.forward.attention import use_attention
    from toque.models.forward.blocks import compile_blocks, recompute_blocks
    from toque.models.loading.from_scratch import fuse_activations
    from toque.models.lora.frozen import hold_frozen
    from toque.models.lora.layers import attach

    fuse_activations(model)
    if a.lora:
        attach(model, AdapterConfig(r=a.lora, dropout=0.0), base="bench", seed=1)
        hold_frozen(model, runtime.dtype)
        model.to(runtime.device)
    model.train()
    use_attention(model, a.attention)
    if a.recompute:
        recompute_blocks(model)
    if a.compile:
        compile_blocks(model)


Timed = tuple[list[float], list[float], dict[str, Any]]
"""Seconds and loss of each update including the warm-up, and facts for the record."""


def toque(
    a: argparse.Namespace, model: PreTrainedModel, batch: Batch, runtime: Runtime
) -> Timed:
    """Train by Toque."""
    from updates import update

    from toque.models.forward.attention import attention_of
    from toque.training.optim.factory import build_optimizer

    apply_options(a, model, runtime)
    optimizer = build_optimizer(model)
    batch = batch.to(runtime.device)
    with runtime.autocast():
        attention = attention_of(model, runtime.device)
    seconds, losses = [], []
    for _ in range(a.warmup + a.steps):
        begun = time.perf_counter()
        losses.append(update(model, batch, runtime, optimizer, lr=1e-5))
        seconds.append(time.perf_counter() - begun)
    facts = {
        "attention": attention.name,
        "blocks": attention.blocks,
        "notes": attention.notes,
    }
    return seconds, losses, facts


def trainer(
    a: argparse.Namespace, model: PreTrainedModel, batch: Batch, runtime: Runtime
) -> Timed:
    """Train by transformers.Trainer, with each example in its own row."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from updates import synchronize

    if a.lora:
        raise SystemExit("--beside trainer trains all weights. Remove --lora.")
    updates = a.warmup + a.steps
    rows = trainer_rows(batch, a.examples)
    seconds: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Append the seconds of each update to `seconds`."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            synchronize(runtime.device)
            seconds.append(time.perf_counter() - self.begun)

    attention = "sdpa"
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:
        attention = "eager"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=updates, per_device_train_batch_size=len(rows),
            learning_rate=1e-5, bf16=runtime.precision == "bf16", fp16=runtime.precision == "fp16",
            report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
            remove_unused_columns=False, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        peer = Trainer(
            model=model,
            args=arguments,
            train_dataset=rows * updates,
            callbacks=[Clock()],
        )
        peer.train()
    losses = [
        float(record["loss"]) for record in peer.state.log_history if "loss" in record
    ]
    return seconds, losses, {"attention": attention, "notes": ["transformers.Trainer"]}


def trainer_rows(batch: Batch, examples: int) -> list[dict[str, Tensor]]:
    """Split a batch into forward arguments of one example. The model shifts the labels."""
    from toque.batch import EncoderDecoderBatch

    if isinstance(batch, EncoderDecoderBatch):
        sides = {"input_ids": batch.source_tokens, "labels": batch.target_tokens}
    else:
        sides = {"input_ids": batch.tokens, "labels": batch.tokens}
    rows = {
        name: side.reshape(len(side) * examples, -1) for name, side in sides.items()
    }
    return [
        dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)
    ]


WAYS: dict[str, Callable[..., Timed]] = {"toque": toque, "trainer": trainer}


def one(a: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Run the updates of `rows` rows in this process."""
    import torch
    from updates import batch_of

    from toque.models.flops import flops_by_shape, flops_per_token, parameter_counts
    from toque.runs.peak import peak_of
    from toque.training.runtime import Runtime

    if a.limit_gib and torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, a.limit_gib * 2**30 / total)
        )
    runtime = Runtime.detect(
        device=a.device, precision=a.precision, deterministic=False
    )
    model = model_on_device(a, runtime)
    batch = batch_of(
        a.family,
        rows=rows,
        source=a.source,
        target=a.target,
        vocabulary=a.vocabulary or VOCABULARY[a.family],
        examples=a.examples,
    )
    seconds, losses, facts = WAYS[a.way](a, model, batch, runtime)
    share = a.source / (a.source + a.target) if a.family == "t5" else 0.0
    flops = flops_per_token(
        model,
        context=a.target / a.examples / 2,
        source_share=share,
        source_context=a.source / a.examples,
    )
    peak_flops = peak_of(
        runtime.device, runtime.dtype, flops_by_shape(model, source_share=share)
    )
    speed = batch.n_tokens / statistics.median(seconds[a.warmup :])
    counts = parameter_counts(model)
    on_gpu = runtime.device.type == "cuda"
    allocated = torch.cuda.max_memory_allocated() if on_gpu else 0
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    peak = reserved or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rows": rows,
        "tokens_per_second": round(speed, 3),
        "mfu": round(speed * flops / peak_flops.flops_per_second, 3),
        "peak_origin": peak_flops.origin,
        "peak_gib": round(peak / 2**30, 2),
        "held_gib": round(allocated / 2**30, 2) if on_gpu else None,
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "parameters": {"total": counts.total, "trained": counts.trainable},
        "precision": runtime.precision,
        **facts,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def swept(rows: int, way: str) -> dict[str, Any]:
    """Run one size in a child process. If it fails, return the last line of its error."""
    command = [
        sys.executable,
        __file__,
        *sys.argv[1:],
        "--alone",
        str(rows),
        "--way",
        way,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        harness.note(f"{way}, {rows} rows, failed: {done.stderr[-3000:]}")
        return {"rows": rows, "failed": last[:300]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    harness.note(f"{way}, {rows} rows: {json.dumps(result)}")
    return result


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Run every micro-batch size on both sides. With --alone, run one size."""
    if a.alone:
        return one(a, a.alone)
    rows = [int(number) for number in a.rows.split(",")]
    result = harness.Result(ours=[swept(number, "toque") for number in rows])
    if a.beside:
        result.theirs = [swept(number, a.beside) for number in rows]
        result.ratio = ratio(result.ours, result.theirs)
    ours = [run for run in result.ours if "failed" not in run]
    theirs = [run for run in result.theirs or [] if "failed" not in run]
    result.details = {"shape": shape_of(a.shape)}
    losses = [loss for run in ours + theirs for loss in run["losses"]]
    if not ours or not all(map(math.isfinite, losses)):
        result.void("no micro-batch was computed, or a loss is not finite")
    if len({run["parameters"]["total"] for run in ours + theirs}) > 1:
        result.void("the two sides have different numbers of parameters")
    return result


def ratio(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """Compare tokens per second of the sizes that both sides computed."""
    ratios = [
        round(a["tokens_per_second"] / b["tokens_per_second"], 3)
        for a, b in zip(ours, theirs, strict=True)
        if "failed" not in a and "failed" not in b
    ]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "worst": min(ratios), "pairs": ratios}


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=sorted(VOCABULARY), default="neox")
    p.add_argument(
        "--shape", default="tiny-neox", help=f"{', '.join(SHAPES)} or a JSON file"
    )
    p.add_argument("--rows", default="1,2,4")
    p.add_argument("--source", type=int, default=256)
    p.add_argument("--target", type=int, default=256)
    p.add_argument("--vocabulary", type=int, default=0)
    p.add_argument("--lora", type=int, default=0, metavar="R")
    p.add_argument(
        "--examples", type=int, default=1, help="examples per row, of equal length"
    )
    p.add_argument(
        "--attention", default="auto", help="value of train.optimisations.attention"
    )
    p.add_argument(
        "--dropout",
        type=float,
        help="dropout of layers and attention; default: of the shape",
    )
    p.add_argument("--recompute", action="store_true", help="gradient checkpointing")
    p.add_argument("--compile", action="store_true")
    p.add_argument("--limit-gib", type=float, default=0.0)
    p.add_argument("--steps", type=int, default=4)
    p.add_argument("--warmup", type=int, default=2)
    p.add_argument("--device", default="auto")
    p.add_argument("--precision", default="auto")
    p.add_argument("--beside", choices=[way for way in WAYS if way != "toque"])
    p.add_argument("--alone", type=int, default=0, help=argparse.SUPPRESS)
    p.add_argument("--way", choices=list(WAYS), default="toque", help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
