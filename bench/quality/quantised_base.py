"""LoRA beside a base in float32, bf16, int8 and nf4: held-out loss after the same updates.

    python bench/quality/quantised_base.py [--updates 50] [--examples 1500] [--model FOLDER]

The same small pretrained model, the same recipes in the same order, the same adapter; only the
format of the frozen matrices differs. "first_update" is the loss of the first update,
"after" that of the trained run, "merged" that of the adapter merged into the original weights, as
`toque export` writes it. The quality check: no format is more than 2 % above float32. Needs the
shared data; nf4 needs bitsandbytes.
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
import peers

BASES = ("float32", "bf16", "int8", "nf4")
MOST_ABOVE = 1.02
_RECIPES = "data/recipes/allrecipes_epicurious_as_is.jsonl.gz"


def configuration(folder: Path, name: str, arguments: argparse.Namespace, shared: Path) -> Path:
    """The YAML file of a run beside this base."""
    quantised = name if name in ("int8", "nf4") else "null"
    precision = "float32" if name == "float32" else "bf16"
    model = arguments.model or shared / "models" / "stories15m"
    text = f"""
run_dir: {folder}/{name}
model: {{family: auto, start_from: "{model}"}}
adapter: {{r: 16, target_modules: all, quantize_base: {quantised}}}
data: {{sources: [{{path: "{shared / _RECIPES}"}}], store: {folder}/store,
  max_examples: {arguments.examples}, max_prompt_tokens: 64, max_target_tokens: 192}}
optim: {{peak_lr: 1e-3, warmup: "5 steps", schedule: constant}}
train: {{stop_after: "{arguments.updates} steps", batch: "4096 tokens", precision: {precision},
  micro_batch_rows: 8, compile: false, evaluate_every: "{arguments.updates} steps",
  save_every: "{arguments.updates} steps"}}
evaluation: {{max_examples: 128, generate: 0}}
observe: {{log_every: "1 step"}}
"""
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def toque(*words: str) -> None:
    """Run a command of Toque's to its end."""
    subprocess.run([sys.executable, "-m", "toque", *words], check=True, capture_output=True)  # noqa: S603


def losses(run: Path) -> dict[str, Any]:
    """Of a finished run: first update, held-out at its end, and once merged."""
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    first = next(event for event in events if event["event"] == "step")
    after = json.loads((run / "evaluation.json").read_text("utf-8"))["heldout"]["loss"]
    toque("evaluate", str(run))
    merged = json.loads((run / "evaluation.json").read_text("utf-8"))["heldout"]["loss"]
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    return {
        "first_update": first["loss"],
        "after": after,
        "merged": merged,
        "seconds": sorted(seconds)[len(seconds) // 2],
    }


def measure(arguments: argparse.Namespace) -> harness.Result:
    """Every base, one after the other."""
    peers.shared(_RECIPES)
    result = harness.Result()
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), {}
        for base in arguments.only or BASES:
            path = configuration(folder, base, arguments, peers.SHARED)
            if not found:
                toque("prepare", str(path))
            toque("train", str(path))
            found[base] = losses(folder / base)
            print(base, json.dumps(found[base]), file=sys.stderr, flush=True)
    result.ours = found
    reference = found.get("float32", {}).get("after")
    far = [n for n, f in found.items() if reference and f["after"] > MOST_ABOVE * reference]
    if far:
        result.void(f"more than 2 % above float32: {', '.join(far)}")
    return result


def options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--only", nargs="*", choices=BASES, help="bases; all by default")
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--examples", type=int, default=1500, help="recipes")
    parser.add_argument("--model", help="a Hugging Face folder; the shared stories15m by default")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
