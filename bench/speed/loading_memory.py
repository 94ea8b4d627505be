"""Memory of reading a base for LoRA: matrix by matrix, against whole in float32 first.

    python bench/speed/loading_memory.py [--layers 12] [--form bf16|int8|nf4] [--stored bf16]

A T5 v1.1 with random weights, 540 M with the defaults, is written to a temporary folder; each way
reads it in a process of its own and attaches LoRA. "peak" is that process's largest resident size,
as the system counts it, "libraries" that of one that only imports what both need. The quality
check: both ways hold the same bits and give the same hash. On a GPU the matrices leave the
machine's memory one by one besides; here they stay in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

_MAKE = """
import sys, torch
from pathlib import Path
from toque.models.loading.model_export import save_model
from toque.models.loading.from_scratch import build_model
folder, layers, stored = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
shape = dict(d_model=1536, d_ff=4096, d_kv=64, num_heads=24, num_layers=layers,
             feed_forward_proj="gated-gelu", tie_word_embeddings=False)
model = build_model(family="t5", shape=shape, vocab_size=16000, pad_id=0, eos_id=1, bos_id=None,
                    seed=1)
if stored == "bf16":
    model.bfloat16()
save_model(model, folder, folder / "model", card="")
"""
_CHILD = """
import hashlib, json, resource, sys, torch
from toque.models.loading.pretrained import load_frame, matrix_of
from toque.models.loading.pretrained import check_folder, load_model
from toque.models.lora.frozen import base_sha256, hold_frozen, read_frozen
from toque.config.schema_methods import AdapterConfig
from toque.models.lora.layers import attach
from toque.models.lora.quantised import form_named
import peft
way, path, name = sys.argv[1:]
form = None if name == "bf16" else form_named(name)
told = {}
def adapt(model):
    attach(model, AdapterConfig(r=16, dropout=0.0), base="bench", seed=1)
if way == "whole":
    model = load_model(path)
    adapt(model)
    told["base"] = base_sha256(model)
    hold_frozen(model, torch.bfloat16, form)
elif way == "parts":
    found = check_folder(path)
    model = load_frame(found)
    adapt(model)
    told["base"] = read_frozen(model, lambda n: matrix_of(found, model, n), dtype=torch.bfloat16,
                               form=form, device=torch.device("cpu"))
told["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if way != "libraries":
    digest = hashlib.sha256()
    held = sorted(dict(model.named_parameters()).items()) + sorted(model.named_buffers())
    for key, tensor in held:
        digest.update(key.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().data)
    told["bits"] = digest.hexdigest()
    told["weights"] = sum(tensor.nbytes for _, tensor in held)
print(json.dumps(told))
"""


def told_by(source: str, *words: str) -> dict[str, Any]:
    """What a child process says last, as JSON."""
    command = [sys.executable, "-c", source, *words]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
    return dict(json.loads(said.splitlines()[-1])) if said else {}


def measure(arguments: argparse.Namespace) -> harness.Result:
    """Both ways, and the libraries alone."""
    result = harness.Result()
    with tempfile.TemporaryDirectory() as name:
        told_by(_MAKE, name, str(arguments.layers), arguments.stored)
        ways = ("libraries", "parts", "whole")
        found = {w: told_by(_CHILD, w, f"{name}/model", arguments.form) for w in ways}
    result.ours, result.theirs = found["parts"], found["whole"]
    result.details["libraries"] = found["libraries"]
    result.ratio = {"median": found["whole"]["peak"] / found["parts"]["peak"], "pairs": 1}
    if any(found["parts"][key] != found["whole"][key] for key in ("base", "bits")):
        result.void("the two ways do not hold the same bits")
    return result


def options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--layers", type=int, default=12, help="of encoder and of decoder")
    parser.add_argument("--form", choices=("bf16", "int8", "nf4"), default="bf16")
    parser.add_argument("--stored", choices=("float32", "bf16"), default="float32")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
