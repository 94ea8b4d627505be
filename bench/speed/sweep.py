r"""Updates of one shape at several micro-batches: tokens a second, utilisation, peak memory.

    python bench/speed/sweep.py --family neox --shape neox-1.2b --rows 1,2,4,8 --target 2048
    python bench/speed/sweep.py --family neox --shape neox-1.2b --rows 8 --beside trainer
    python bench/speed/sweep.py --family t5 --shape flan-t5-xxl --lora 16 --rows 2 --source 256 \
        --target 512 --limit-gib 24

Random weights and made-up tokens, every row full: the figure is the machine's and the program's,
not the data's. `--shape` is a name from this file or a JSON file. With `--lora R` the base is
frozen and held in the runtime's precision. Each micro-batch is a process of its own, so that its
peak memory is; one that does not fit says so and the sweep goes on. `mfu` divides by the stated
peak of a known GPU, elsewhere by the matrix rate measured in the run's precision (`peak_origin`
says which); recomputed operations do not count. `--limit-gib` refuses memory beyond it (CUDA only)
and so shows what fits a smaller GPU.

`--beside trainer` computes the same shape and rows by `transformers.Trainer`, in the same precision
and with PyTorch's attention: its best case, for a row has no padding on either side. The ratio is
of tokens a second, micro-batch by micro-batch. Quality: one micro-batch at least was computed,
every loss is finite, and both sides have as many parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

if TYPE_CHECKING:  # loaded in the process that computes alone: a GPU's minutes are short
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
    """A shape by name, or from a JSON file."""
    found: dict[str, Any] = SHAPES.get(name) or json.loads(Path(name).read_text())
    return found


def dropouts(a: argparse.Namespace) -> dict[str, float]:
    """The shape's dropout, where one is asked for."""
    names = {"t5": ["dropout_rate"], "neox": ["attention_dropout", "hidden_dropout"]}
    names |= {"gpt2": ["attn_pdrop", "resid_pdrop", "embd_pdrop"]}
    return {} if a.dropout is None else dict.fromkeys(names[a.family], a.dropout)


def made(a: argparse.Namespace, runtime: Runtime) -> PreTrainedModel:
    """The model on its device, with stock layers; drawn there, for a host takes minutes."""
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
    auto: Any = AutoModelForSeq2SeqLM if family.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(1)
    with torch.device(runtime.device):
        model = auto.from_config(config, dtype=runtime.dtype if a.lora else torch.float32)
        if family.is_encoder_decoder and arguments.get("tie_word_embeddings") is False:
            give_own_head(model)
    found: PreTrainedModel = model.to(runtime.device)
    return found


def fitted(a: argparse.Namespace, model: PreTrainedModel, runtime: Runtime) -> None:
    """Adapt it, exchange layers and compile it as asked."""
    from toque.config.schema_methods import AdapterConfig
    from toque.models.forward.blocks import compile_blocks, recompute_blocks
    from toque.models.forward.flex_attention import use_attention
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
"""Seconds and loss of each update, warm-up included, and facts of the way."""


def toque(a: argparse.Namespace, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> Timed:
    """Our updates."""
    from updates import update

    from toque.models.forward.flex_attention import attention_of
    from toque.training.optim.factory import build_optimizer

    fitted(a, model, runtime)
    optimizer = build_optimizer(model)
    batch = batch.to(runtime.device)
    with runtime.autocast():
        attention = attention_of(model, runtime.device)
    seconds, losses = [], []
    for _ in range(a.warmup + a.steps):
        begun = time.perf_counter()
        losses.append(update(model, batch, runtime, optimizer, lr=1e-5))
        seconds.append(time.perf_counter() - begun)
    facts = {"attention": attention.name, "blocks": attention.blocks, "notes": attention.notes}
    return seconds, losses, facts


def trainer(a: argparse.Namespace, model: PreTrainedModel, batch: Batch, runtime: Runtime) -> Timed:
    """The same rows by transformers.Trainer."""
    from other_trainers import by_transformers

    if a.lora:
        raise SystemExit("--beside trainer trains all weights: leave --lora out")
    return by_transformers(
        model, batch, examples=a.examples, updates=a.warmup + a.steps, precision=runtime.precision
    )


WAYS: dict[str, Callable[..., Timed]] = {"toque": toque, "trainer": trainer}


def one(a: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Updates of `rows` rows in this process."""
    import torch
    from updates import batch_of

    from toque.models.flops import flops_per_token, parameter_counts, products_of
    from toque.runs.outlined_update import peak_of
    from toque.training.runtime import Runtime

    if a.limit_gib and torch.cuda.is_available():
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, a.limit_gib * 2**30 / whole))
    runtime = Runtime.detect(device=a.device, precision=a.precision, deterministic=False)
    model = made(a, runtime)
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
    alone = a.target / a.examples, a.source / a.examples
    flops = flops_per_token(
        model, context=alone[0] / 2, source_share=share, source_context=alone[1]
    )
    peak_flops = peak_of(runtime.device, runtime.dtype, products_of(model, source_share=share))
    speed = batch.n_tokens / statistics.median(seconds[a.warmup :])
    counts = parameter_counts(model)
    on_gpu = runtime.device.type == "cuda"
    taken = torch.cuda.max_memory_reserved() if on_gpu else 0
    held = torch.cuda.max_memory_allocated() if on_gpu else 0
    taken = taken or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "rows": rows,
        "tokens_per_second": round(speed, 3),
        "mfu": round(speed * flops / peak_flops.flops_per_second, 3),
        "peak_origin": peak_flops.origin,
        "peak_gib": round(taken / 2**30, 2),
        "held_gib": round(held / 2**30, 2) if on_gpu else None,
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "parameters": {"total": counts.total, "trained": counts.trainable},
        "precision": runtime.precision,
        **facts,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def swept(rows: int, way: str) -> dict[str, Any]:
    """The same in a process of its own; the last line of its error where it failed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--alone", str(rows), "--way", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        harness.note(f"{way}, {rows} rows, failed: {done.stderr[-3000:]}")
        return {"rows": rows, "failed": last[:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    harness.note(f"{way}, {rows} rows: {json.dumps(found)}")
    return found


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Every micro-batch on both sides; with --alone, one of them."""
    if a.alone:
        return one(a, a.alone)
    rows = [int(number) for number in a.rows.split(",")]
    result = harness.Result(ours=[swept(number, "toque") for number in rows])
    if a.beside:
        result.theirs = [swept(number, a.beside) for number in rows]
        result.ratio = ratio(result.ours, result.theirs)
    computed = [found for found in result.ours if "failed" not in found]
    others = [found for found in result.theirs or [] if "failed" not in found]
    result.details = {"shape": shape_of(a.shape)}
    losses = [loss for found in computed + others for loss in found["losses"]]
    if not computed or not all(map(math.isfinite, losses)):
        result.void("no micro-batch was computed, or a loss is not finite")
    if len({found["parameters"]["total"] for found in computed + others}) > 1:
        result.void("the two sides have other numbers of parameters")
    return result


def ratio(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Tokens a second of both, over the micro-batches that both computed; None without one."""
    ratios = [
        round(a["tokens_per_second"] / b["tokens_per_second"], 3)
        for a, b in zip(ours, theirs, strict=True)
        if "failed" not in a and "failed" not in b
    ]
    if not ratios:
        return None
    return {"median": statistics.median(ratios), "worst": min(ratios), "pairs": ratios}


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--family", choices=sorted(VOCABULARY), default="neox")
    p.add_argument("--shape", default="tiny-neox", help=f"{', '.join(SHAPES)} or a JSON file")
    p.add_argument("--rows", default="1,2,4")
    p.add_argument("--source", type=int, default=256)
    p.add_argument("--target", type=int, default=256)
    p.add_argument("--vocabulary", type=int, default=0)
    p.add_argument("--lora", type=int, default=0, metavar="R")
    p.add_argument("--examples", type=int, default=1, help="in a row, of equal length")
    p.add_argument("--attention", default="auto", help="as train.optimisations.attention")
    p.add_argument("--dropout", type=float, help="of layers and attention; the shape's by default")
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
