"""A walk through what the product must do: each line of the checklist by its command or call.

    python bench/quality/walk_features.py                 # all, about ten minutes on two cores
    python bench/quality/walk_features.py --only A12 E7   # lines with one of these numbers

Numbers are those of the checklist of five older trainers: A a recipe trainer, B a modular one, C ten
improvements, D a small GPT, E GPT-NeoX pretraining (docs/guides/coming-from-older-trainers.md). A
row runs in one folder, on what the rows above it made, and shows a figure or a word of the answer.
It fails when the command does, or the answer lacks what it must hold. Nothing here is a speed.
"""

# ruff: noqa: E501, S603, S310, RUF100 - rows are a table; commands and addresses are our own
from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
from s3_emulator import BUCKET, s3_emulator

T5 = """
run_dir: runs/t5
model: {family: t5, tokenizer: "trained:1024",
        shape: {d_model: 64, d_kv: 16, d_ff: 128, num_layers: 2, num_decoder_layers: 2, num_heads: 4}}
data:
  sources: [{path: book.jsonl, weight: 2.0}, {path: more.jsonl}]
  store: stores/t5
  tasks: [write, nutrition, difficulty]
  min_quality: 0.3
  validation_fraction: 0.1
  max_prompt_tokens: 256
  max_target_tokens: 256
train: {stop_after: "12 steps", batch: "4096 tokens", evaluate_every: "6 steps", save_every: "4 steps",
        keep_best: 2, early_stopping: {patience: 3}, gradient_checkpointing: true, precision: bf16}
optim: {warmup: "2 steps"}
evaluation: {generate: 2, texts: 1, prompts: [Create a simple pasta dish, Make a healthy breakfast],
             metrics: [auto, "mymetrics:lengths"]}
observe: {log_every: "1 steps", system: "1 seconds", gradients: "3 steps", summary: "6 steps",
          trackers: [tensorboard, trackio], callbacks: ["mywatch:Watcher"],
          profile: {wait: 1, warmup: 1, active: 2, repeat: 1}}
"""
GPT2 = """
run_dir: runs/gpt2
model: {family: gpt2, tokenizer: "trained:1024", shape: {n_embd: 64, n_layer: 2, n_head: 2, n_positions: 512,
        resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}}  # dropout is drawn by rank
data: {sources: [{path: book.jsonl}], store: stores/gpt2}
train: {stop_after: "8 steps", batch: "2048 tokens", evaluate_every: "4 steps", save_every: "2 steps",
        precision: float32}
optim: {warmup: "2 steps"}
evaluation: {generate: 2, texts: 0}
observe: {log_every: "1 steps"}
"""
NEOX = """
run_dir: runs/neox
model: {family: neox, tokenizer: stores/gpt2/tokenizer, shape: {hidden_size: 64, num_hidden_layers: 2,
        num_attention_heads: 4, intermediate_size: 128, max_position_embeddings: 128, rotary_pct: 0.25,
        use_parallel_residual: true}}
data: {sources: [{path: "s3://pantry/tokens/", format: tokens, max_files: 2}], store: stores/neox,
       max_target_tokens: 128, validation_fraction: 0.1, dedup: none}
train: {stop_after: "6 steps", batch: "1024 tokens", save_every: "2 steps", evaluate_every: "6 steps", compile: false}
optim: {warmup: "1 steps"}
checkpoint: {upload: "s3://pantry/runs/neox"}
evaluation: {generate: 0}
observe: {log_every: "1 steps", summary: "3 steps"}
"""
WATCHER = """
class Watcher:
    calls = []
    def on_train_begin(self, state): self.calls.append("train_begin")
    def on_epoch_begin(self, state): self.calls.append("epoch_begin")
    def on_epoch_end(self, state): self.calls.append("epoch_end")
    def on_step_begin(self, state): self.calls.append("step_begin")
    def on_step_end(self, state): self.calls.append("step_end")
    def on_evaluate_begin(self, state): self.calls.append("evaluate_begin")
    def on_evaluate_end(self, state): self.calls.append(f"evaluate_end {state.metrics['loss']:.2f}")
    def on_train_end(self, state):
        open("calls.txt", "w").write(" ".join(self.calls) + " train_end")
"""
METRICS = """
def lengths(predictions, references):
    return {"words": [len(text.split()) for text in predictions]}
"""


class RowFailedError(Exception):
    """A command or call of a row did not give what the row asks for."""


@dataclass
class Kitchen:
    """A folder in which the rows run one after the other."""

    folder: Path

    def toque(self, *words: str, code: int = 0, seconds: float = 300, results: bool = False) -> str:
        """What a command prints, or its results alone; `RowFailedError` where it ends with another code."""
        done = subprocess.run(
            [sys.executable, "-m", "toque", *words],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        text = done.stdout + done.stderr
        if done.returncode != code:
            raise RowFailedError(
                f"toque {' '.join(words)} ended with {done.returncode}: {text[-600:]}"
            )
        return done.stdout if results else text

    def python(self, program: str) -> str:
        """What a program prints."""
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            raise RowFailedError(f"Python ended with {done.returncode}: {done.stderr[-600:]}")
        return done.stdout

    def events(self, run: str, event: str) -> list[dict[str, Any]]:
        """Lines of a run's metrics.jsonl of one kind."""
        lines = (self.folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def apart(self, one: str, other: str) -> float:
        """The largest difference between the losses of two runs, update by update."""
        losses = ([e["loss"] for e in self.events(run, "step")] for run in (one, other))
        return float(max(abs(a - b) for a, b in zip(*losses, strict=True)))

    @contextlib.contextmanager
    def served(self, *words: str) -> Iterator[Callable[[str], str]]:
        """A command that serves pages until the context ends; gives what fetches one by its path."""
        port = harness.free_port()
        with subprocess.Popen(
            [sys.executable, "-m", "toque", *words, "--port", str(port)],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as server:
            try:
                yield partial(_get, server, f"http://127.0.0.1:{port}")
            finally:
                server.terminate()

    def json(self, path: str) -> Any:
        """A file's value."""
        return json.loads((self.folder / path).read_text())

    def has(self, *patterns: str) -> str:
        """The patterns, each with the number of files that fit; `RowFailedError` where none does."""
        counts = {pattern: len(list(self.folder.glob(pattern))) for pattern in patterns}
        missing = [pattern for pattern, n in counts.items() if not n]
        if missing:
            raise RowFailedError(f"no file {', '.join(missing)}")
        return ", ".join(f"{pattern}: {n}" for pattern, n in counts.items())


def found(text: str, *wanted: str) -> str:
    """What the patterns fit in a text; `RowFailedError` where one fits nowhere."""
    fits = []
    for pattern in wanted:
        fit = re.search(pattern, text, re.IGNORECASE | re.MULTILINE)
        if fit is None:
            raise RowFailedError(f"{pattern!r} is nowhere in: {text[-800:]}")
        fits.append(" ".join(fit.group(0).split()))
    return "; ".join(fits)


def keys(values: Any, *wanted: str) -> str:
    """Values by name; `RowFailedError` where a name is absent."""
    missing = [name for name in wanted if name not in values]
    if missing:
        raise RowFailedError(f"{', '.join(missing)} not among {', '.join(sorted(values))}")
    return ", ".join(f"{name} {_short(values[name])}" for name in wanted)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:40]


ROWS: list[tuple[str, str, Callable[[Kitchen], str]]] = []


def row(numbers: str, what: str) -> Callable[[Callable[[Kitchen], str]], Callable[[Kitchen], str]]:
    """Makes a function a row of the walk."""

    def keep(function: Callable[[Kitchen], str]) -> Callable[[Kitchen], str]:
        ROWS.append((numbers, what, function))
        return function

    return keep


@row(
    "A20 A21 A16 A17 A18 A27 A28 B5 B8",
    "prepare: two weighted files into one store, with the quality filter and split",
)
def _(k: Kitchen) -> str:
    k.toque("cookbook", "book.jsonl", "--n", "300")
    k.toque("cookbook", "more.jsonl", "--n", "100", "--seed", "5")
    (k.folder / "mywatch.py").write_text(WATCHER)
    (k.folder / "mymetrics.py").write_text(METRICS)
    (k.folder / "t5.yaml").write_text(T5)
    (k.folder / "gpt2.yaml").write_text(GPT2)
    (k.folder / "neox.yaml").write_text(NEOX)
    first = k.toque("prepare", "t5.yaml")
    again = k.toque("prepare", "t5.yaml")
    return (
        found(first, r"quality[^\n]*", r"held.out[^\n]*|validation[^\n]*")
        + "; again: "
        + found(again, r"reus\w+|is there|unchanged|prepared")
    )


@row(
    "A1 A5 A6 A7 A8 A9 A23 B4 E8 E16",
    "train a T5, bf16, recomputing activations, the micro-batch measured, the banner",
)
def _(k: Kitchen) -> str:
    said = k.toque("train", "t5.yaml")
    start = k.events("t5", "start")[0]
    step = k.events("t5", "step")[-1]
    return (
        found(said, r"12 steps|step 12[^\n]*", r"bf16")
        + "; "
        + keys(step, "loss", "lr", "grad_norm", "data_wait_seconds", "tokens_per_second")
        + "; "
        + found(json.dumps(start), r"trainable_share[^,]*", r"micro_batch_rows[^,]*")
    )


@row(
    "B8 C1 C15 B9", "held-out loss, perplexity, own prompts' texts and their scores while training"
)
def _(k: Kitchen) -> str:
    evaluations = k.events("t5", "evaluation")
    samples = (k.folder / "runs/t5/samples.jsonl").read_text()
    return (
        f"{len(evaluations)} evaluations; "
        + keys(evaluations[-1]["metrics"], "loss", "perplexity", "bits_per_byte")
        + "; "
        + found(samples, "Create a simple pasta dish", "Make a healthy breakfast")
    )


@row("A12 A13 A14 A15 B10 B15 B21 C9 C14", "final scores, with intervals, own metric among them")
def _(k: Kitchen) -> str:
    scores = k.json("runs/t5/evaluation.json")
    flat = json.dumps(scores)
    return found(
        flat,
        r'"bleu[^,]*',
        r'"rouge1[^,]*',
        r'"rouge2',
        r'"rougeL[^,]*',
        r'"ingredient_coverage[^,]*',
        r'"structure[^,]*',
        r'"ingredient_coherence',
        r'"instruction_quality',
        r'"completeness',
        r'"format_correctness',
        r'"words[^,]*',
        "interval|low",
    )


@row("A11", "classes: accuracy beside the most frequent class; one question")
def _(k: Kitchen) -> str:
    flat = json.dumps(k.json("runs/t5/evaluation.json"))
    answer = k.toque(
        "generate", "runs/t5", "--task", "nutrition", "--prompt", "Pancakes: 200 g flour, 2 eggs"
    )
    return (
        found(flat, r'"accuracy[^,]*')
        + "; "
        + found(answer, "Healthy[^\n]*", "Moderate", "Indulgent")
    )


@row("A22 C14 D4", "system figures: each core, memory, disk, network")
def _(k: Kitchen) -> str:
    flat = json.dumps(k.events("t5", "system")[-1])
    return found(
        flat,
        r"cpu[^,]*|processor[^,]*|core[^,]*",
        r"memory[^,]*|ram[^,]*",
        r"disk[^,]*|read[^,]*",
        r"net[^,]*|sent[^,]*",
    )


@row("A23 E20", "gradient flow by groups of layers")
def _(k: Kitchen) -> str:
    return found(json.dumps(k.events("t5", "gradients")[-1]), r'"grad_norm": [^,}]*')


@row("A24 E17", "operations by time, call stacks, a Chrome trace")
def _(k: Kitchen) -> str:
    return k.has("runs/t5/trace/*")


@row("A22 E17 B6", "TensorBoard's files, Trackio's project, training.log")
def _(k: Kitchen) -> str:
    return k.has("runs/t5/tensorboard/*", "runs/t5/training.log", "trackio/*")


@row("B11", "callbacks: eight methods")
def _(k: Kitchen) -> str:
    return found(
        (k.folder / "calls.txt").read_text(),
        "^train_begin epoch_begin step_begin step_end",
        r"evaluate_begin evaluate_end \d+\.\d+",
        "train_end$",
    )


@row("B12 B17 E14", "checkpoints, the best ones, the finished model, the configuration beside it")
def _(k: Kitchen) -> str:
    return k.has(
        "runs/t5/checkpoints/step-*",
        "runs/t5/best/*",
        "runs/t5/model/*.safetensors",
        "runs/t5/model/tokenizer*",
        "runs/t5/config.yaml",
    )


@row(
    "A25 A36 B20",
    "doctor of the run names what limits it; plan names levers for a card that is too small",
)
def _(k: Kitchen) -> str:
    said = k.toque("doctor", "runs/t5")
    small = k.toque("plan", "recipe-t5-xl-lora", "adapter=null", "--hardware", "rtx-3090")
    return (
        found(said, r"What limits this run: [^\n]*")
        + "; "
        + found(small, r"optim.name=adamw8bit +[^\n]*", r"adapter='[^\n]*an adapter is trained")
    )


@row("A31 A30", "generate in the form of training; the raw prompt")
def _(k: Kitchen) -> str:
    text = k.toque(
        "generate",
        "runs/t5",
        "--prompt",
        "lentil soup: lentils, cumin",
        "--json",
        "--max-new-tokens",
        "16",
    )
    return found(text, "Generate recipe for: lentil soup using ingredients: lentils, cumin")


@row(
    "A4 B13 C6 C13 C18",
    "LoRA from a run's model: adapter files, merged export, two adapters beside one base",
)
def _(k: Kitchen) -> str:
    common = (
        "model.family=auto",
        "model.start_from=runs/t5/model",
        "model.shape={}",
        "model.tokenizer=auto",
        "train.precision=float32",
        "train.stop_after=4 steps",
        "observe.callbacks=[]",
        "observe.trackers=[]",
        "observe.profile=null",
        "evaluation.metrics=auto",
        "evaluation.texts=0",
        "evaluation.generate=0",
        "data.max_examples=60",
        "data.min_quality=0",
    )
    for name, more in (("lora", ()), ("lora2", ("seed=3",))):
        k.toque(
            "train",
            "t5.yaml",
            *common,
            f"run_dir=runs/{name}",
            "data.store=stores/lora",
            "adapter={kind: lora, r: 16, alpha: 32, dropout: 0.1, target_modules: [q, v]}",
            *more,
        )
    files = k.has(
        "runs/lora/model/adapter_config.json", "runs/lora/model/adapter_model.safetensors"
    )
    merged = k.toque("export", "runs/lora", "--to", "merged")
    both = k.toque(
        "generate",
        "runs/t5/model",
        "--adapter",
        "runs/lora/model",
        "--adapter",
        "runs/lora2/model",
        "--prompt",
        "soup",
        "--max-new-tokens",
        "4",
        "--json",
    )
    return (
        files
        + "; "
        + found(merged, r"[^\n]*(?:compar|equal|same|differ)[^\n]*")
        + f"; {len(both.strip().splitlines())} texts by two adapters"
    )


@row("A2 A3 A29 A35 A34", "plans of every size of GPT-2 and T5 by its card")
def _(k: Kitchen) -> str:
    lines = []
    for preset, card in (
        ("recipe-gpt2-medium", "rtx-3090"),
        ("recipe-gpt2-large", "rtx-4090"),
        ("recipe-gpt2-xl", "rtx-4090"),
        ("recipe-gpt2-2b", "h100"),
        ("recipe-t5-large", "rtx-4090"),
        ("recipe-t5-xl-lora", "rtx-4090"),
        ("recipe-t5-xxl-lora", "rtx-4090"),
    ):
        plan = json.loads(k.toque("plan", preset, "--hardware", card, "--json", results=True))
        lines.append(f"{preset} {_memory(plan)}")
    return ", ".join(lines)


def _memory(plan: Any) -> str:
    return f"{plan['memory']['total'] / 2**30:.1f} GiB"


@row(
    "A19 C5 C10", "augmentation: formats, paraphrases, substitutes, tips in the texts of one update"
)
def _(k: Kitchen) -> str:
    k.toque("prepare", "gpt2.yaml")
    shown = k.toque(
        "show-batch",
        "gpt2.yaml",
        "augmentation={prompt_formats: true, instructions: 1, paraphrase: 1, substitute: 1, tips: 1}",
        "--most",
        "6",
    )
    return found(
        shown,
        r"tip[^\n]*",
        r"(?:Create a recipe|Generate a detailed recipe|Make a dish with|Recipe for|How to prepare|Cooking instructions)[^\n]{0,40}",
    )


@row("C2 C3 C4 C8", "warm restarts, and a curriculum of stages")
def _(k: Kitchen) -> str:
    k.toque(
        "train",
        "gpt2.yaml",
        "run_dir=runs/restarts",
        "optim.schedule=cosine_restarts",
        "optim.cycles={first: 2 steps, growth: 2}",
        "optim.min_lr=1e-6",
    )
    rates = [event["lr"] for event in k.events("restarts", "step")]
    staged = k.toque(
        "train",
        "gpt2.yaml",
        "run_dir=runs/staged",
        "curriculum={stages: [{from: 0 %, max_ingredients: 6, max_steps: 6, min_quality: 0.5}, {from: 50 %, min_quality: 0.6}]}",
    )
    stages = [event["stage"] for event in k.events("staged", "step")]
    if sorted(set(stages)) != [1, 2]:
        raise RowFailedError(f"stages {stages}")
    return (
        "rates "
        + ", ".join(f"{rate:.1e}" for rate in rates)
        + "; "
        + found(staged, r"[^\n]*stage[^\n]*")
        + f"; stages of updates {stages}"
    )


@row("C7 C11 A10", "label smoothing and gradient noise change losses")
def _(k: Kitchen) -> str:
    k.toque("train", "gpt2.yaml")
    k.toque(
        "train",
        "gpt2.yaml",
        "run_dir=runs/noisy",
        "optim.label_smoothing=0.1",
        "optim.gradient_noise={eta: 0.3, gamma: 0.55}",
    )
    plain, noisy = ([e["loss"] for e in k.events(name, "step")] for name in ("gpt2", "noisy"))
    if plain == noisy:
        raise RowFailedError("equal losses")
    return f"last losses {plain[-1]:.4f} and {noisy[-1]:.4f}"


@row("C16 B3 A32 E12 E13", "presets by card")
def _(k: Kitchen) -> str:
    shown = k.toque("show", "ten-improvements", "--hardware", "rtx-5090")
    test = k.toque("show", "neox-1.2b-test")
    production = k.toque("show", "neox-1.2b")
    best = k.toque("show", "recipe-t5-xl-lora")
    return "; ".join(
        (
            found(shown, r"micro_batch_rows: \d+", r"label_smoothing: 0.1"),
            found(test, r"max_files: 5", r"1000 steps"),
            found(production, r"hidden_size: 2048", r"10000 steps"),
            found(best, "flan-t5-xl"),
        )
    )


@row("D1 D2 D3 D5 D6 D9 D11", "a small GPT from Python without a file; every optimisation off")
def _(k: Kitchen) -> str:
    return k.python("""
import toque
open("corpus.txt", "w").write("Whisk the eggs. Melt the butter. Stir until just set.\\n\\n" * 200)
base = dict(model={"family": "gpt2", "tokenizer": "trained:512", "shape": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}},
            data={"sources": [{"path": "corpus.txt"}], "store": "stores/corpus", "max_target_tokens": 64, "dedup": "none"},
            train={"stop_after": "3 steps", "batch": "8 examples", "precision": "float32"}, optim={"warmup": "1 steps"}, evaluation={"generate": 0})
first = toque.train(toque.configure(run_dir="runs/corpus", **base))
off = {name: False for name in ("dropout", "activations", "layers", "head", "prefetch", "background_saves")} | {"attention": "dense"}
base["train"] |= {"optimisations": off, "compile": False, "pack": False}
second = toque.train(toque.configure(run_dir="runs/corpus-off", **base))
worst = max(abs(a - b) for (_, a), (_, b) in zip(first.losses, second.losses, strict=True))
print(f"losses {[round(x, 4) for _, x in first.losses]}, all off differ by {worst:.1e}")
""").strip()


@row("A30 B2 B3 B14 B15 B16", "the verbs from Python")
def _(k: Kitchen) -> str:
    return (
        k.python("""
import toque
config = toque.configure("gpt2.yaml", run_dir="runs/python")
store = toque.prepare(config)
run = toque.train(config)
scores = toque.score(["Ingredients:\\n- 2 eggs\\n\\nInstructions:\\n1. Whisk."], ["Ingredients:\\n- 3 eggs\\n\\nInstructions:\\n1. Beat."])
text = toque.generate(run, ["lentil soup: lentils"], max_new_tokens=8)[0]
print(f"{store.report.kept} kept, {run.step} updates, BLEU {scores.metrics['bleu']:.1f}, rougeL {scores.metrics['rougeL']:.2f}, {len(text.text)} characters, {len(toque.evaluate(run).metrics)} metrics")
""")
        .strip()
        .splitlines()[-1]
    )


@row("B6", "a webhook hears of the run")
def _(k: Kitchen) -> str:
    heard: list[str] = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["event"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ["MY_WEBHOOK"] = f"http://127.0.0.1:{server.server_port}/"
    k.toque("train", "gpt2.yaml", "run_dir=runs/hook", "observe.webhook=env:MY_WEBHOOK")
    server.shutdown()
    if "start" not in heard or "end" not in heard:
        raise RowFailedError(f"heard {heard}")
    return ", ".join(heard)


@row("C17", "a warning when held-out loss is far above the training loss")
def _(k: Kitchen) -> str:
    said = k.toque(
        "train",
        "gpt2.yaml",
        "run_dir=runs/overfit",
        "data.store=stores/few",
        "data.max_examples=12",
        "train.stop_after=200 steps",
        "optim.peak_lr=5e-3",
        "train.evaluate_every=50 steps",
        "train.save_every=200 steps",
    )
    return found(
        said,
        r"the held-out loss [^\n]*above the training loss[^\n]*",
    )


@row(
    "E1 E5 E6 E7 E11 S8",
    "NeoX from token arrays in a bucket, checkpoints uploaded in the background",
)
def _(k: Kitchen) -> str:
    import s3fs

    bucket = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    rng = np.random.default_rng(0)
    for number in range(3):
        np.savez(k.folder / "part.npz", input_ids=rng.integers(0, 1000, (40, 128), dtype=np.uint16))
        bucket.put(
            str(k.folder / "part.npz"),
            f"{BUCKET.removeprefix('s3://')}/tokens/deep/part-{number}.npz",
        )
    said = k.toque("train", "neox.yaml")
    there = bucket.find("pantry/runs/neox")
    names = sorted({Path(name).parts[3] for name in there})
    if "checkpoints" not in names or "metrics.jsonl" not in names:
        raise RowFailedError(f"in the bucket: {names}")
    return (
        found(said, r"[^\n]*files?[^\n]*")
        + f"; in the bucket {len(there)} files: {', '.join(names[:8])}"
    )


@row(
    "E10 E14", "no upload when told; back to an older checkpoint by name; new run from its weights"
)
def _(k: Kitchen) -> str:
    k.toque("train", "neox.yaml", "train.stop_after=8 steps", "--no-upload")
    back = k.toque("train", "neox.yaml", "train.stop_after=8 steps", "--resume", "step-00000006")
    k.toque("train", "gpt2.yaml", "run_dir=runs/from", "--from", "runs/gpt2")
    return (
        found(back, r"[^\n]*step.?0*6[^\n]*")
        + "; "
        + k.has("runs/neox/set-aside/*", "runs/from/model/*.safetensors")
    )


@row("E2 E4 E19", "two processes share every update; the losses of one")
def _(k: Kitchen) -> str:
    k.toque("train", "gpt2.yaml", "run_dir=runs/two", "--gpus", "2")
    worst = k.apart("gpt2", "two")
    if worst > 1e-3:
        raise RowFailedError(f"losses differ by {worst}")
    return f"losses differ by at most {worst:.1e}; {k.events('two', 'start')[0].get('ranks')} ranks"


@row("E3 E22", "compiled blocks")
def _(k: Kitchen) -> str:
    k.toque("train", "gpt2.yaml", "run_dir=runs/compiled", "train.compile=true", seconds=600)
    return f"losses differ by at most {k.apart('gpt2', 'compiled'):.1e}"


@row("B12 E7", "killed and continued: the same losses and weights")
def _(k: Kitchen) -> str:
    words = [sys.executable, "-m", "toque", "train", "gpt2.yaml", "run_dir=runs/killed"]
    metrics = k.folder / "runs/killed/metrics.jsonl"
    with subprocess.Popen(
        words, cwd=k.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        while not (
            metrics.exists()
            and metrics.read_text().count('"event":"step"')
            + metrics.read_text().count('"event": "step"')
            >= 5
        ):
            if run.poll() is not None:
                raise RowFailedError("it ended before it could be killed")
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    k.toque("train", "gpt2.yaml", "run_dir=runs/killed")
    whole, killed = (
        {e["step"]: e["loss"] for e in k.events(name, "step")} for name in ("gpt2", "killed")
    )
    weights = [
        (k.folder / f"runs/{name}/model/model.safetensors").read_bytes()
        for name in ("gpt2", "killed")
    ]
    if whole != killed or weights[0] != weights[1]:
        raise RowFailedError("other losses or weights")
    return f"{len(whole)} losses and {len(weights[0])} bytes of weights equal"


@row("E16 E20", "a summary every N updates")
def _(k: Kitchen) -> str:
    log = (k.folder / "runs/neox/training.log").read_text()
    return found(
        log,
        r"step 1 [^\n]*tokens/s[^\n]*",
        r"summary at step 3, over 3 updates:[^\n]*",
    )


@row("E18 E9 E23", "doctor: versions, processor, GPUs, processes, disk, memory, credentials")
def _(k: Kitchen) -> str:
    checks = json.loads(k.toque("doctor", "--json", seconds=400, results=True))
    return found(json.dumps(checks), "torch[^,]{0,40}", "memory|RAM", "disk")


@row("C6 A30", "serve: a base and an adapter beside it, one completion, the page")
def _(k: Kitchen) -> str:
    names = ("runs/t5", "base=runs/t5/model", "vegan=runs/lora/model")
    with k.served("serve", *names) as get:
        models = json.loads(get("/v1/models"))["data"]
        asked = {"model": models[0]["id"], "prompt": "lentil soup: lentils", "max_tokens": 8}
        answer = json.loads(get("/v1/completions", json.dumps(asked).encode()))
        page = get("/")
    tokens = answer["usage"]["completion_tokens"]
    return f"{len(models)} models, {tokens} tokens, a page of {len(page)} bytes"


def _get(
    server: subprocess.Popen[bytes], address: str, path: str, body: bytes | None = None
) -> str:
    request = urllib.request.Request(
        address + path, data=body, headers={"Content-Type": "application/json"}
    )
    for _ in range(600):
        try:
            return str(urllib.request.urlopen(request, timeout=60).read().decode())
        except urllib.error.HTTPError as error:
            raise RowFailedError(f"{path}: {error}") from error
        except OSError:
            if server.poll() is not None:
                break
            time.sleep(0.1)
    raise RowFailedError(f"{address}{path} did not answer")


@row(
    "E17 A22",
    "watch: the page of a folder of runs; report: one offline page; compare: tables and a page",
)
def _(k: Kitchen) -> str:
    with k.served("watch", "runs") as get:
        page = get("/")
    k.toque("report", "runs/t5")
    k.toque("report", "stores/t5")
    table = k.toque("compare", "runs/gpt2", "runs/noisy")
    return (
        f"watch {len(page)} bytes; "
        + k.has("runs/t5/report.html", "stores/t5/report.html", "runs/comparison.html")
        + "; "
        + found(table, "label_smoothing[^\n]*")
    )


@row("A30 B13", "export to GGUF and back; verify; check; init")
def _(k: Kitchen) -> str:
    k.toque("export", "runs/gpt2", "--to", "gguf", "--format", "gguf", "--dtype", "q8_0")
    verified = k.toque("verify", "runs/gpt2")
    checked = k.toque("check", "gpt2.yaml", "--examples", "4")
    k.toque("init", "book.jsonl", "--to", "made.yaml")
    return (
        k.has("gguf/*.gguf")
        + "; "
        + found(verified, r"[^\n]+")
        + "; "
        + found(checked, r"packed in 1 rows, all at once[^\n]*same")
        + "; "
        + found(k.toque("show", "made.yaml"), "made")
    )


@row("D7 D10 A33", "ablate: each improvement on and off; drill: killed and damaged copies")
def _(k: Kitchen) -> str:
    ablated = k.toque(
        "ablate",
        "gpt2.yaml",
        "optim.label_smoothing=0.1",
        "--seeds",
        "2",
        "--steps",
        "3",
        seconds=600,
    )
    drilled = k.toque("drill", "runs/gpt2", "--kills", "1", "--steps", "8", seconds=900)
    return found(ablated, r"[^\n]*smoothing[^\n]*") + "; " + found(drilled, r"[^\n]*(?:kill)[^\n]*")


@row("C12 E15 E9", "container, setup script, cluster scripts")
def _(_k: Kitchen) -> str:
    top = Path(__file__).resolve().parents[2]
    there = [name for name in ("Dockerfile", "setup.sh", "examples") if (top / name).exists()]
    if len(there) < 3:
        raise RowFailedError(f"only {there}")
    return ", ".join(there) + " (not built here)"


def measure(a: argparse.Namespace) -> harness.Result:
    """Every row that was asked for, in one folder."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRACKIO_PROJECT": "walk"}
    rows = []
    with tempfile.TemporaryDirectory() as folder, s3_emulator():
        os.environ["TRACKIO_DIR"] = f"{folder}/trackio"
        kitchen = Kitchen(Path(folder))
        for numbers, what, function in ROWS:
            if a.only and not set(a.only) & set(numbers.split()):
                continue
            began = time.perf_counter()
            try:
                shown, works = function(kitchen), True
            except Exception as error:  # noqa: BLE001
                shown, works = str(error) or traceback.format_exc(limit=2), False
            rows.append({"numbers": numbers, "what": what, "works": works, "shown": shown})
            mark = "works" if works else "FAILS"
            harness.note(
                f"| {numbers} | {what} | {mark} | {shown[:400]} | {time.perf_counter() - began:.0f} s |".replace(
                    "\n", " "
                )
            )
    failed = [each["numbers"] for each in rows if not each["works"]]
    quality: dict[str, Any] = {"passes": not failed, "compared": f"{len(rows)} rows"}
    if failed:
        quality["reason"] = f"rows that fail: {'; '.join(failed)}"
    return harness.Result(quality=quality, details={"rows": rows})


def options(p: argparse.ArgumentParser) -> None:
    """What can be asked for."""
    p.add_argument(
        "--only", nargs="+", help="numbers; rows build on each other, so take those above too"
    )


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
