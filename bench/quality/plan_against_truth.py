"""`toque plan` against the truth: planned against measured peak memory and seconds of an update.

    python bench/quality/plan_against_truth.py [--only NAME ...] [--updates 12] [--examples 2000]
    python bench/quality/plan_against_truth.py --fake-card [PRESET ...]

Six configurations, each planned and then trained for some updates on the embedded cookbook, in
processes of their own: T5, GPT-2, NeoX, LoRA beside the T5 and the GPT-2 just trained, and the
demo's shape (20 times as many updates). "memory" is the largest resident size of the training
process, as the system counts it; "seconds" the median of its updates, the first third left out.
Floors: memory within 15 %, time within 25 %; the quality check passes when each configuration is
within both. The machine's other programs disturb times and not memory. Plan once more in the run's
folder and the rate that was measured there is used; that time is `again`.

With `--fake-card` nothing is trained: the memory planned for every preset on four cards, whole,
with LoRA and with nf4, recomputing and not, is held against the bytes that the run's own code takes
on the fake card of `tests/fake_cuda`, within 3 %; the table goes to stderr, the worst into the
record.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import harness
import peers

from fake_cuda import hooks, plan_cases

MEMORY_FLOOR, TIME_FLOOR = 0.15, 0.25
_SHORT: Final = 20
"""Times as many updates of the demo's shape, which take some hundredths of a second."""
_DATA = "max_prompt_tokens: 96, max_target_tokens: 320, validation_fraction: 0.05"
_SHAPES = {
    "t5": "family: t5, tokenizer: 'trained:8192', shape: {d_model: 384, d_kv: 64, d_ff: 1024, "
    "num_layers: 6, num_heads: 6, feed_forward_proj: gated-gelu}",
    "gpt2": "family: gpt2, tokenizer: 'trained:8192', "
    "shape: {n_embd: 512, n_layer: 8, n_head: 8, n_positions: 512}",
    "neox": "family: neox, tokenizer: 'trained:8192', shape: {hidden_size: 512, "
    "num_hidden_layers: 8, num_attention_heads: 8, intermediate_size: 2048, "
    "max_position_embeddings: 512}",
    "demo": "family: llama, tokenizer: 'trained:2048', shape: {hidden_size: 128, "
    "num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 4, "
    "intermediate_size: 352, max_position_embeddings: 448, tie_word_embeddings: true}",
}
CASES = ("t5", "gpt2", "neox", "t5-lora", "gpt2-lora", "demo")
_CHILD = """
import json, resource, sys
import toque
toque.train(sys.argv[1])
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
"""


def configuration(folder: Path, name: str, updates: int) -> Path:
    """The YAML file of a case."""
    base = name.removesuffix("-lora")
    model, adapter = _SHAPES[base], ""
    if name != base:
        model = f"family: auto, start_from: '{folder}/{base}/model'"
        adapter = "adapter: {kind: lora, r: 16}\n"
    optim = 'optim: {name: adamw, peak_lr: 1e-3}\ntrain: {batch: "8192 tokens", '
    if base == "demo":
        optim = 'optim: {name: muon, peak_lr: 1e-2}\ntrain: {batch: "1024 tokens", '
    text = (
        f"run_dir: {folder}/{name}\nmodel: {{{model}}}\n{adapter}"
        f"data: {{sources: [{{path: {folder}/cookbook.jsonl}}], store: {folder}/store-{name}, "
        f"{_DATA}}}\n{optim}stop_after: '{updates} steps', compile: false}}\n"
        "evaluation: {max_examples: 64, generate: 4}\nobserve: {log_every: '1 step'}\n"
    )
    path = folder / f"{name}.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def planned(path: Path) -> dict[str, Any]:
    """What `toque plan` says, in a process of its own."""
    record: dict[str, Any] = json.loads(peers.toque("plan", path, "--json").stdout)
    return record


def trained(path: Path, run: Path) -> tuple[int, float, dict[str, Any]]:
    """Largest resident bytes, seconds of an update, and the start event."""
    said = peers.run(["-c", _CHILD, path]).stdout
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    seconds = [event["seconds"] for event in events if event["event"] == "step"]
    late = seconds[len(seconds) // 3 :]
    started = next(event for event in events if event["event"] == "start")
    return json.loads(said.splitlines()[-1]), statistics.median(late), started


def compared(folder: Path, name: str, updates: int) -> dict[str, Any]:
    """One case: planned, trained, planned again."""
    path = configuration(folder, name, updates * (_SHORT if name == "demo" else 1))
    peers.toque("prepare", path)
    before = planned(path)
    peak, seconds, started = trained(path, folder / name)
    again = planned(path)
    return {
        "planned_bytes": before["memory"]["total"],
        "measured_bytes": peak,
        "memory_error": before["memory"]["total"] / peak - 1,
        "planned_seconds": before["time"]["update_seconds"],
        "measured_seconds": seconds,
        "time_error": before["time"]["update_seconds"] / seconds - 1,
        "again_seconds": again["time"]["update_seconds"],
        "micro_batch_rows": [before["memory"]["micro_batch_rows"], started["micro_batch_rows"]],
        "parameters": before["parameters"]["total"],
        "parts": before["memory"]["parts"],
    }


def _compared(case: plan_cases.Case) -> plan_cases.Compared:
    """One case on the fake card; in a process that has its hooks, which come before torch."""
    from fake_cuda import cases_memory

    return cases_memory.compared(case)


def on_fake_card(presets: list[str]) -> harness.Result:
    """The matrix of `plan_cases`, as a table, and the case whose plan is farthest off."""
    print(plan_cases.HEAD, file=sys.stderr)
    found = []
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=hooks.install
    ) as pool:
        for preset in presets or plan_cases.PRESETS:
            for way in plan_cases.ways_of(preset):
                for each in pool.map(_compared, plan_cases.cases(preset, way)):
                    print(each, file=sys.stderr, flush=True)
                    found.append(each)
    worst = max(found, key=lambda each: abs(each.error))
    result = harness.Result(
        ours={"planned": worst.planned}, theirs={"run": worst.peak},
        details={"cases": len(found), "worst": str(worst), "error": worst.error},
    )  # fmt: skip
    if abs(worst.error) > plan_cases.LIMIT:
        result.void(f"a plan is {worst.error:+.1%} off: {worst}")
    return result


def measure(arguments: argparse.Namespace) -> harness.Result:
    """Every case, one after the other."""
    if arguments.fake_card is not None:
        return on_fake_card(arguments.fake_card)
    result = harness.Result()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peers.toque("cookbook", folder / "cookbook.jsonl", "--n", arguments.examples)
        chosen = arguments.only or CASES
        needed = [case for case in CASES if case in chosen or f"{case}-lora" in chosen]
        found = {}
        for case in needed:
            found[case] = compared(folder, case, arguments.updates)
            figures = {k: v for k, v in found[case].items() if k != "parts"}
            print(case, json.dumps(figures), file=sys.stderr, flush=True)
    result.ours = {
        "planned": {n: [c["planned_bytes"], c["planned_seconds"]] for n, c in found.items()}
    }
    result.theirs = {
        "measured": {n: [c["measured_bytes"], c["measured_seconds"]] for n, c in found.items()}
    }
    result.details["cases"] = found
    far = [
        f"{name}: {what} {case[key]:+.0%}"
        for name, case in found.items()
        for what, key, floor in (
            ("memory", "memory_error", MEMORY_FLOOR),
            ("time", "time_error", TIME_FLOOR),
        )
        if abs(case[key]) > floor
    ]
    if far:
        result.void(f"outside the floors: {'; '.join(far)}")
    return result


def options(parser: argparse.ArgumentParser) -> None:
    """Command line."""
    parser.add_argument("--only", nargs="*", choices=CASES, help="cases; all by default")
    parser.add_argument(
        "--fake-card", nargs="*", choices=plan_cases.PRESETS, help="presets; all by default"
    )
    parser.add_argument("--updates", type=int, default=12, help="of each training")
    parser.add_argument("--examples", type=int, default=2000, help="recipes in the cookbook")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
