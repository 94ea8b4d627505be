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
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

Write = Callable[[list[list[int]], int], list[list[int]]]
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

    return _timed(write, given["prompts"], new)


def theirs(folder: Path, new: int, *, workers: int, threads: int) -> dict[str, Any]:
    """CTranslate2's process: seconds and answers."""
    import ctranslate2

    given = json.loads((folder / PROMPTS).read_text())
    shares = {"inter_threads": workers, "intra_threads": max(1, threads // workers)}
    path = str(folder / CONVERTED)
    if given["encoder_decoder"]:
        batch = ctranslate2.Translator(path, compute_type="float32", **shares).translate_batch
        vocabulary, texts_of, limit = "shared_vocabulary.json", "hypotheses", "max_decoding_length"
        more: dict[str, Any] = {}
    else:
        batch = ctranslate2.Generator(path, compute_type="float32", **shares).generate_batch
        vocabulary, texts_of, limit = "vocabulary.json", "sequences", "max_length"
        more = {"include_prompt_in_result": False}
    words = json.loads((folder / CONVERTED / vocabulary).read_text())
    ids = {word: i for i, word in enumerate(words)}
    greedy = more | {"beam_size": 1, "end_token": [given["eos"]]}

    def write(prompts: list[list[int]], count: int) -> list[list[int]]:
        texts = [[words[i] for i in prompt] for prompt in prompts]
        rows = max(1, len(prompts) // workers)
        found = batch(texts, max_batch_size=rows, **{limit: count}, **greedy)
        return [[ids[word] for word in getattr(result, texts_of)[0]] for result in found]

    return _timed(write, given["prompts"], new)


def _timed(write: Write, prompts: list[list[int]], new: int) -> dict[str, Any]:
    write(prompts[:8], 4)
    began = time.perf_counter()
    answers = write(prompts, new)
    return {"seconds": time.perf_counter() - began, "answers": answers}


def write_folders(a: argparse.Namespace, folder: Path) -> None:
    """The model, its prompts and CTranslate2's form of it."""
    from ctranslate2.converters import TransformersConverter
    from generate import model_and_prompts

    model, prompts, eos = model_and_prompts(a)
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
    words = [__file__, "--side", name, "--folder", folder, "--new", a.new]
    words += ["--workers", workers, "--threads", a.threads]
    return peers.last_json(peers.run(words, threads=a.threads).stdout)


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """Both systems in turn, or one side's process."""
    if a.side == "ours":
        return ours(a.folder, a.new)
    if a.side == "theirs":
        return theirs(a.folder, a.new, workers=a.workers, threads=a.threads)
    if importlib.util.find_spec("ctranslate2") is None:
        raise harness.Skipped("ctranslate2 is not installed: pip install ctranslate2")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folders(a, folder)
        answers: dict[str, list[list[int]]] = {}

        def turn(name: str, *workers: int) -> dict[str, Any]:
            fastest = min((side(a, folder, name, n) for n in workers), key=itemgetter("seconds"))
            answers[name] = fastest.pop("answers")
            return fastest | {"tokens": sum(map(len, answers[name]))}

        def quality(*_: object) -> dict[str, Any]:
            pairs = list(zip(answers["ours"], answers["theirs"], strict=True))
            equal = sum(mine == other for mine, other in pairs)
            return {"passes": equal >= 0.95 * len(pairs), "equal": equal, "answers": len(pairs)}

        result = harness.paired(
            lambda _: turn("ours", 1),
            lambda _: turn("theirs", *sorted({1, a.threads})),
            pairs=a.pairs,
            score=lambda run: run.value["tokens"] / run.value["seconds"],
            quality=quality,
        )
    result.details = {"model": f"{a.family}_mini", "new": a.new}
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


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
