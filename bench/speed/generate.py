"""Greedy generation against transformers' `generate`, the same prompts; prints JSON.

    python bench/generate.py --family t5            # random weights of the shared mini shape
    python bench/generate.py --model FOLDER         # a trained model: its answers end by themselves

The baseline is the loop of the shared peers/hf_generate.py: left-padded batches of 16 prompts in
file order, `model.generate`, key-value cache on; in bfloat16, as it is, and in float32. Ours is in
float32. All run in turn in one process, after a warm-up of a few prompts each. Seconds are of the
wall and of the processor; on a machine that others use too, the second is the steadier one.

Answers must be equal id for id to those of transformers in float32. Where one is not, the two
candidates' logits must lie within TIE of each other in the stock model (then either is a greedy
answer, and which one depends on the order of a sum), or the ratio is void.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from toque.models.generation.engine import generate
from toque.models.loading.pretrained import build_model, load_model

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")
RECIPES = SHARED / "data" / "recipes" / "allrecipes_epicurious_as_is.jsonl.gz"
TOKENIZERS = {"t5": "t5", "gpt2": "gpt2", "neox": "gpt_neox"}
TIE = 1e-4
Answers = list[list[int]]


def prompts_of(tokenizer: Tokenizer, n: int, *, eos: int | None) -> Answers:
    """The prompts of the first recipes that have both parts, as make_pairs.py writes them."""
    with gzip.open(RECIPES, "rt", encoding="utf-8") as lines:
        good = (r for r in map(json.loads, lines) if r.get("ingredients") and r.get("directions"))
        texts = [
            f"Generate recipe for: {r['title']} using ingredients: {', '.join(r['ingredients'])}"
            for r in itertools.islice(good, n)
        ]
    tail = [] if eos is None else [eos]
    return [tokenizer.encode(t, add_special_tokens=False).ids[:512] + tail for t in texts]


def stock(model: PreTrainedModel, prompts: Answers, *, new: int, rows: int, eos: int) -> Answers:
    """The loop of hf_generate.py."""
    pad = model.config.pad_token_id
    pad = eos if pad is None else pad
    answers: Answers = []
    with torch.inference_mode():
        for i in range(0, len(prompts), rows):
            part = prompts[i : i + rows]
            width = max(map(len, part))
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=new,
                do_sample=False,
                pad_token_id=pad,
                eos_token_id=eos,
            )
            begin = 1 if model.config.is_encoder_decoder else width
            for row in out[:, begin:].tolist():
                answers.append(row[: row.index(eos)] if eos in row else row)
    return answers


def differences(
    model: PreTrainedModel, prompts: Answers, ours: Answers, theirs: Answers, eos: int
) -> dict[str, int | float]:
    """How many answers are equal, how many part at a tie, and the widest gap they part at."""
    equal, ties, widest = 0, 0, 0.0
    for prompt, mine, other in zip(prompts, ours, theirs, strict=True):
        if mine == other:
            equal += 1
            continue
        a, b = [*mine, eos], [*other, eos]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            if model.config.is_encoder_decoder:
                start = model.config.decoder_start_token_id
                begun = torch.tensor([[start, *mine[:at]]])
                logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits
            else:
                logits = model(input_ids=torch.tensor([prompt + mine[:at]])).logits
        last = logits[0, -1]
        gap = float((last[a[at]] - last[b[at]]).abs() / last.abs().max())
        widest, ties = max(widest, gap), ties + (gap <= TIE)
    return {
        "equal": equal,
        "parted_at_a_tie": ties,
        "different": len(prompts) - equal - ties,
        "widest_gap": widest,
    }


def timed(work: Callable[[], Answers]) -> tuple[dict[str, float], Answers]:
    """Seconds of the wall and of the processor, and what came out."""
    wall, processor = time.perf_counter(), time.process_time()
    answers = work()
    seconds = {
        "wall": time.perf_counter() - wall,
        "processor": time.process_time() - processor,
    }
    return seconds, answers


def model_and_prompts(
    arguments: argparse.Namespace,
) -> tuple[PreTrainedModel, Answers, int]:
    """The model, the prompts as it reads them, and its end token."""
    if arguments.model is not None:
        model = load_model(str(arguments.model))
        tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
        eos = int(model.config.eos_token_id)
    else:
        folder = SHARED / "tokenizers" / TOKENIZERS[arguments.family]
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = tokenizer.token_to_id("</s>" if arguments.family == "t5" else "<|endoftext|>")
        shape = json.loads((SHARED / "peers" / f"{arguments.family}_mini.json").read_text())
        model = build_model(
            family=arguments.family,
            shape=shape,
            vocab_size=tokenizer.get_vocab_size(),
            pad_id=0,
            eos_id=eos,
            bos_id=None,
            seed=17,
        ).eval()
    ends = eos if model.config.is_encoder_decoder else None
    return model, prompts_of(tokenizer, arguments.prompts, eos=ends), eos


def main() -> None:
    """Run the pairs and print the object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", choices=list(TOKENIZERS), default="t5")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--stock-rows", type=int, default=16)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--skip-bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    model, prompts, eos = model_and_prompts(arguments)
    pad = model.config.pad_token_id
    pad = eos if pad is None else pad

    def ours(given: Answers, new: int = arguments.new) -> Answers:
        return generate(
            model, given, max_new_tokens=new, eos_id=eos, pad_id=pad, batch_rows=arguments.rows
        )

    def theirs(given: Answers, new: int = arguments.new, of: PreTrainedModel = model) -> Answers:
        return stock(of, given, new=new, rows=arguments.stock_rows, eos=eos)

    half = copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[arg-type]
    systems = {
        "toque": ours,
        "transformers_float32": theirs,
        "transformers_bf16": partial(theirs, of=half),
    }
    if arguments.skip_bf16:
        del systems["transformers_bf16"]
    answers: dict[str, Answers] = {}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for work in systems.values():
        work(prompts[:8], 4)
    for _ in range(arguments.pairs):
        for name, work in systems.items():
            seconds, answers[name] = timed(partial(work, prompts))
            seconds["tokens"] = sum(map(len, answers[name]))
            runs[name].append(seconds)
            print(json.dumps({name: seconds}), file=sys.stderr, flush=True)
    check = differences(model, prompts, answers["toque"], answers["transformers_float32"], eos)
    ratios = {name: ratio_to(runs, name) for name in systems if name != "toque"}
    record = {
        "benchmark": "generate",
        "model": arguments.model.name if arguments.model else f"{arguments.family}_mini",
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": sum(map(len, answers["toque"])),
        "tokens_per_second": {
            name: round(statistics.median(r["tokens"] / r["wall"] for r in found), 1)
            for name, found in runs.items()
        },
        "ratio": "void" if check["different"] else ratios,
        "answers_in_float32": check,
        "pairs": arguments.pairs,
        "threads": arguments.threads,
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python", *sys.argv]),
    }
    print(json.dumps(record))


def ratio_to(runs: dict[str, list[dict[str, float]]], name: str) -> dict[str, float]:
    """Median and worst of the pairs' ratios, in tokens per second of either clock."""
    found: dict[str, float] = {}
    for clock in ("wall", "processor"):
        pairs = zip(runs["toque"], runs[name], strict=True)
        ratios = [a["tokens"] / a[clock] / (b["tokens"] / b[clock]) for a, b in pairs]
        found[clock] = round(statistics.median(ratios), 2)
        found[f"{clock}_worst"] = round(min(ratios), 2)
    return found


if __name__ == "__main__":
    main()
