"""Greedy generation against CTranslate2, float32 both, each side in processes of its own.

    python bench/speed/ctranslate.py --family t5 [--prompts 96] [--new 200] [--pairs 2]

The model has random weights of the shared mini shape; its folder is written once and read by both
sides (`pip install ctranslate2`; its converter reads the same weights). A side's process loads the
model, writes a few tokens to warm up, then all texts, and reports its seconds; ours and theirs run
in turn. CTranslate2 runs with one worker of all threads and with a worker a thread, and the better
of the two counts. In one process, where both libraries' threads spin beside each other, neither
side's figure means anything.

Quality: at least 95 % of the answers must be equal id for id, or the ratio is void.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

MODEL, PROMPTS, CONVERTED = "model", "prompts.json", "ctranslate2"


def ours(folder: Path, new: int) -> dict[str, Any]:
    """Our side's process: seconds and answers."""
    from toque.models.generation.engine import generate
    from toque.models.generation.options import GenerationOptions
    from toque.models.glibc_malloc import keep_freed_memory
    from toque.models.loading.pretrained import load_model

    keep_freed_memory()  # as `toque generate` does
    model = load_model(str(folder / MODEL)).eval()
    given = json.loads((folder / PROMPTS).read_text())

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        options = GenerationOptions(max_new_tokens=count, precision="float32")
        return generate(model, prompts, options, eos_id=given["eos"], pad_id=given["pad"])

    write(given["prompts"][:8], 4)
    began = time.perf_counter()
    answers = write(given["prompts"], new)
    return {"seconds": time.perf_counter() - began, "answers": answers}


def theirs(folder: Path, new: int, *, workers: int, threads: int) -> dict[str, Any]:
    """CTranslate2's process: seconds and answers."""
    import ctranslate2

    given = json.loads((folder / PROMPTS).read_text())
    shares = {"inter_threads": workers, "intra_threads": max(1, threads // workers)}
    path = str(folder / CONVERTED)
    greedy: dict[str, Any] = {"beam_size": 1, "end_token": [given["eos"]]}
    if given["encoder_decoder"]:
        translator = ctranslate2.Translator(path, compute_type="float32", **shares)
        words = json.loads((folder / CONVERTED / "shared_vocabulary.json").read_text())

        def write(prompts: list[list[int]], count: int) -> list[list[int]]:
            texts = [[words[i] for i in prompt] for prompt in prompts]
            rows = max(1, len(prompts) // workers)
            found = translator.translate_batch(
                texts, max_batch_size=rows, max_decoding_length=count, **greedy
            )
            ids = {word: i for i, word in enumerate(words)}
            return [[ids[word] for word in result.hypotheses[0]] for result in found]
    else:
        generator = ctranslate2.Generator(path, compute_type="float32", **shares)
        words = json.loads((folder / CONVERTED / "vocabulary.json").read_text())

        def write(prompts: list[list[int]], count: int) -> list[list[int]]:
            texts = [[words[i] for i in prompt] for prompt in prompts]
            rows = max(1, len(prompts) // workers)
            found = generator.generate_batch(
                texts,
                max_batch_size=rows,
                max_length=count,
                include_prompt_in_result=False,
                **greedy,
            )
            return [result.sequences_ids[0] for result in found]

    write(given["prompts"][:8], 4)
    began = time.perf_counter()
    answers = write(given["prompts"], new)
    return {"seconds": time.perf_counter() - began, "answers": answers}


def write_folders(a: argparse.Namespace, folder: Path) -> None:
    """The model, its prompts and CTranslate2's form of it."""
    from ctranslate2.converters import TransformersConverter
    from generate import model_and_prompts

    model, prompts, eos = model_and_prompts(a)
    model.config.tie_word_embeddings = bool(model.config.tie_word_embeddings)
    model.save_pretrained(folder / MODEL)
    for file in peers.tokenizer_folder(a.family).iterdir():
        shutil.copy(file, folder / MODEL)
    pad = model.config.pad_token_id
    given = {
        "prompts": prompts,
        "eos": eos,
        "pad": eos if pad is None else pad,
        "encoder_decoder": model.config.is_encoder_decoder,
    }
    (folder / PROMPTS).write_text(json.dumps(given))
    TransformersConverter(str(folder / MODEL)).convert(str(folder / CONVERTED))


def side(a: argparse.Namespace, folder: Path, name: str, workers: int = 1) -> dict[str, Any]:
    """One process of a side."""
    words = [sys.executable, __file__, "--side", name, "--folder", folder, "--new", a.new]
    words += ["--workers", workers, "--threads", a.threads]
    environment = os.environ | {"OMP_NUM_THREADS": str(a.threads), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(  # noqa: S603 - this file
        [str(word) for word in words], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return peers.last_json(done.stdout)


def measure(a: argparse.Namespace) -> harness.Result:
    """Both systems in turn."""
    if importlib.util.find_spec("ctranslate2") is None:
        raise harness.Skipped("ctranslate2 is not installed: pip install ctranslate2")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folders(a, folder)
        rows: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
        for _ in range(a.pairs):
            rows["ours"].append(side(a, folder, "ours"))
            tries = [side(a, folder, "theirs", workers) for workers in sorted({1, a.threads})]
            rows["theirs"].append(min(tries, key=lambda one: one["seconds"]))
    rates = {
        name: [sum(map(len, one["answers"])) / one["seconds"] for one in found]
        for name, found in rows.items()
    }
    ratios = sorted(x / y for x, y in zip(rates["ours"], rates["theirs"], strict=True))
    first = list(zip(rows["ours"][0]["answers"], rows["theirs"][0]["answers"], strict=True))
    equal = sum(mine == other for mine, other in first)
    result = harness.Result(
        ours=[round(rate, 1) for rate in rates["ours"]],
        theirs=[round(rate, 1) for rate in rates["theirs"]],
        ratio={
            "median": round(ratios[len(ratios) // 2], 3),
            "worst": round(ratios[0], 3),
            "pairs": len(ratios),
        },
        quality={"passes": equal >= 0.95 * len(first), "equal": equal, "answers": len(first)},
        details={"model": f"{a.family}_mini", "new": a.new},
    )
    if not result.quality["passes"]:
        result.void(f"only {equal} of {len(first)} answers are equal")
    return result


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--family", choices=("t5", "gpt2"), default="t5")
    p.add_argument("--prompts", type=int, default=96)
    p.add_argument("--new", type=int, default=200)
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    p.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    p.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)


def _one_side() -> None:
    parser = argparse.ArgumentParser()
    options(parser)
    a = parser.parse_args()
    if a.side == "ours":
        found = ours(a.folder, a.new)
    else:
        found = theirs(a.folder, a.new, workers=a.workers, threads=a.threads)
    print(json.dumps(found))


if __name__ == "__main__":
    if "--side" in sys.argv:
        _one_side()
    else:
        harness.main(__file__, __doc__, options, measure)
