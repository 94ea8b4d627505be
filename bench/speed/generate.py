"""Greedy generation against `generate` of transformers, with the same prompts.

    python bench/speed/generate.py --family t5       # random weights of the shared mini shape
    python bench/speed/generate.py --model FOLDER    # a trained model

The baseline is the loop of the shared peers/hf_generate.py: left-padded batches of 16 prompts in
file order, `model.generate` with its KV cache, in the precision `--baseline`. Ours runs in
`--precision`. Both run in turn in one process after a warm-up. The ratio compares tokens per wall
second. The details have the ratio per processor second.

Quality: every answer must have the token ids of transformers in float32. If an answer differs, the
logits of the two tokens must be within TIE of each other, because then the order of a sum decides.
Otherwise the ratio is void. With ours in bf16 the widest gap must not exceed that of transformers
in bf16. `equal_to_our_float32` counts the answers that equal ours in float32.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from toque.hardware.glibc_malloc import keep_freed_memory
from toque.models.generation.engine import generate
from toque.models.generation.options import GenerationOptions, Precision
from toque.models.loading.from_scratch import build_model
from toque.models.loading.pretrained import load_model

TIE = 1e-4
Answers = list[list[int]]


def prompts_of(tokenizer: Tokenizer, n: int, *, eos: int | None) -> Answers:
    """Tokenise the prompts of the shared examples."""
    with tempfile.TemporaryDirectory() as folder:
        lines = (
            peers.write_pairs(Path(folder) / "pairs.jsonl", n).read_text().splitlines()
        )
    tail = [] if eos is None else [eos]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [
        tokenizer.encode(t, add_special_tokens=False).ids[:512] + tail for t in texts
    ]


def stock(
    model: PreTrainedModel, prompts: Answers, *, new: int, rows: int, eos: int
) -> Answers:
    """Generate by the loop of hf_generate.py."""
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
) -> dict[str, Any]:
    """Count equal answers, answers that part at a tie, and the widest gap between logits."""
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
                logits = model(
                    input_ids=torch.tensor([prompt]), decoder_input_ids=begun
                ).logits
            else:
                logits = model(input_ids=torch.tensor([prompt + mine[:at]])).logits
        last = logits[0, -1]
        gap = float((last[a[at]] - last[b[at]]).abs() / last.abs().max())
        widest, ties = max(widest, gap), ties + (gap <= TIE)
    different = len(prompts) - equal - ties
    return {
        "passes": not different,
        "equal": equal,
        "parted_at_a_tie": ties,
        "different": different,
        "widest_gap": widest,
    }


def model_and_prompts(a: argparse.Namespace) -> tuple[PreTrainedModel, Answers, int]:
    """Return the model, its tokenised prompts, and its end token."""
    if a.model is not None:
        model = load_model(str(a.model))
        tokenizer = Tokenizer.from_file(str(a.model / "tokenizer.json"))
        eos = int(model.config.eos_token_id)
    else:
        folder = peers.tokenizer_folder(a.family)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        eos = tokenizer.token_to_id("</s>" if a.family == "t5" else "<|endoftext|>")
        shape = json.loads(peers.mini_shape(a.family).read_text())
        model = build_model(
            family=a.family, shape=shape, vocab_size=tokenizer.get_vocab_size(), pad_id=0,
            eos_id=eos, bos_id=None, seed=17,
        ).eval()  # fmt: skip
    ends = eos if model.config.is_encoder_decoder else None
    return model, prompts_of(tokenizer, a.prompts, eos=ends), eos


def measure(a: argparse.Namespace) -> harness.Result:
    """Run both sides in turn and compare the answers with float32."""
    torch.set_num_threads(a.threads)
    keep_freed_memory()  # as `toque generate` does; applies to both sides
    transformers.logging.set_verbosity_error()
    model, prompts, eos = model_and_prompts(a)
    pad = model.config.pad_token_id
    pad = eos if pad is None else pad
    other = copy.deepcopy(model).to(torch.bfloat16) if a.baseline == "bf16" else model  # type: ignore[arg-type]

    def ours(texts: Answers, new: int, precision: Precision = a.precision) -> Answers:
        return generate(
            model,
            texts,
            GenerationOptions(
                max_new_tokens=new, batch_rows=a.rows, precision=precision
            ),
            eos_id=eos,
            pad_id=pad,
        )

    def theirs(texts: Answers, new: int, of: PreTrainedModel = other) -> Answers:
        return stock(of, texts, new=new, rows=a.stock_rows, eos=eos)

    answers: dict[str, Answers] = {}

    def turn(name: str, work: Callable[[Answers, int], Answers]) -> dict[str, Any]:
        answers[name] = work(prompts, a.new)
        return {"tokens": sum(map(len, answers[name]))}

    def quality(*_: object) -> dict[str, Any]:
        exact = answers["theirs"] if other is model else theirs(prompts, a.new, model)
        comparison = differences(model, prompts, answers["ours"], exact, eos)
        if a.precision == "bf16":
            rounded = differences(model, prompts, answers["theirs"], exact, eos)
            comparison["theirs"] = rounded
            comparison["passes"] = comparison["widest_gap"] <= rounded["widest_gap"]
            pairs = zip(answers["ours"], ours(prompts, a.new, "float32"), strict=True)
            comparison["equal_to_our_float32"] = sum(
                bf16 == float32 for bf16, float32 in pairs
            )
        return comparison

    ours(prompts[:8], 4), theirs(prompts[:8], 4)
    result = harness.paired(
        lambda _: turn("ours", ours),
        lambda _: turn("theirs", theirs),
        pairs=a.pairs,
        score=lambda run: run.value["tokens"] / run.wall,
        quality=quality,
    )
    result.details = {
        "model": a.model.name if a.model else f"{a.family}_mini",
        "prompt_tokens": sum(map(len, prompts)),
        "ratio_of_processor_seconds": result.ratio_by(
            lambda run: run.value["tokens"] / run.processor
        ),
        "tokens_per_second": {
            side: round(
                statistics.median(run["tokens"] / run["wall"] for run in runs), 1
            )
            for side, runs in (("ours", result.ours), ("theirs", result.theirs))
        },
    }
    return result


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--family", choices=list(peers.TOKENIZERS), default="t5")
    p.add_argument("--model", type=Path)
    p.add_argument("--prompts", type=int, default=96)
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--pairs", type=int, default=2)
    p.add_argument("--stock-rows", type=int, default=16)
    p.add_argument("--rows", type=int)
    p.add_argument("--precision", choices=("float32", "bf16"), default="float32")
    p.add_argument("--baseline", choices=("float32", "bf16"), default="float32")
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
