"""`toque serve` under 32 requests at a time: against one at a time, and against transformers.

    python bench/speed/serve.py                     # a model of 33 M weights, drawn at random
    python bench/speed/serve.py --model FOLDER

The `openai` client streams the same greedy requests from a server in a process of its own. The
baseline is what transformers' text-generation pipeline does with them, `model.generate` on
left-padded batches of 32, without a server in between. Rates are of tokens of the wall clock.

Quality: every text must be the one of `toque generate`, and none may be lost; else the ratio is
void.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

SHAPE = {
    "hidden_size": 384, "num_hidden_layers": 8, "num_attention_heads": 6,
    "intermediate_size": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    "initializer_range": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Told:
    """One request as its client saw it."""

    text: str
    tokens: int
    first_seconds: float
    """From the request to its first token."""


def written_model(folder: Path) -> Path:
    """A Llama-shaped model over GPT-2's vocabulary, drawn wide enough to write various texts."""
    from toque.data.tokenizer.codec import load_codec
    from toque.models.loading.export import save_model
    from toque.models.loading.from_scratch import build_model

    codec = load_codec(peers.tokenizer_folder("gpt2"))
    model = build_model(
        family="llama", shape=SHAPE, vocab_size=codec.vocab_size, pad_id=codec.pad_id,
        eos_id=codec.eos_id, bos_id=codec.bos_id, seed=17,
    )  # fmt: skip
    save_model(model, None, folder, card="", files=codec.files())
    return folder


@contextmanager
def served(model: Path, threads: int) -> Iterator[str]:
    """A server in a process of its own; gives its address."""
    command = [sys.executable, "-m", "toque", "serve", f"model={model}", "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start; see above")
            yield found[0]
        finally:
            process.terminate()


async def streamed(address: str, prompts: Sequence[str], *, at_once: int, new: int) -> list[Told]:
    """Every prompt's answer, so many requests at a time."""
    import openai

    places = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:

        async def one(prompt: str) -> Told:
            async with places:
                began, first, parts, tokens = time.perf_counter(), 0.0, [], 0
                events = await client.completions.create(
                    model="model", prompt=prompt, temperature=0, max_tokens=new, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                async for event in events:
                    first = first or time.perf_counter() - began
                    parts += [choice.text for choice in event.choices]
                    tokens = event.usage.completion_tokens if event.usage else tokens
                return Told("".join(parts), tokens, first)

        return await asyncio.gather(*map(one, prompts))


def stock(model: Path, prompts: Sequence[str], *, new: int, rows: int) -> int:
    """Tokens that transformers writes for the same prompts, as its pipeline batches them."""
    import torch
    from transformers import AutoModelForCausalLM

    from toque.workflows.open_model import open_model

    opened = open_model(model)
    ids = [opened.prompt_ids(prompt) for prompt in prompts]
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    eos, written = opened.codec.eos_id, 0
    with torch.inference_mode():
        for i in range(0, len(ids), rows):
            part = ids[i : i + rows]
            width = max(map(len, part))
            out = plain.generate(
                input_ids=torch.tensor([[eos] * (width - len(p)) + p for p in part]),
                attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part]),
                max_new_tokens=new, do_sample=False, pad_token_id=eos, eos_token_id=eos,
            )  # fmt: skip
            for row in out[:, width:].tolist():
                written += row.index(eos) if eos in row else len(row)
    return written


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


def measure(a: argparse.Namespace) -> harness.Result:
    """Three rates, and the texts compared with those of `toque generate`."""
    import torch

    torch.set_num_threads(a.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or written_model(Path(folder) / "model")
        lines = peers.write_pairs(Path(folder) / "pairs.jsonl", a.requests).read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        with served(model, a.threads) as address:
            asyncio.run(streamed(address, prompts[:4], at_once=4, new=8))
            rates: dict[str, list[float]] = {"together": [], "one": [], "transformers": []}
            told: list[Told] = []

            def ask(name: str, some: Sequence[str], at_once: int) -> dict[str, Any]:
                began = time.perf_counter()
                found = asyncio.run(streamed(address, some, at_once=at_once, new=a.new))
                rates[name].append(sum(t.tokens for t in found) / (time.perf_counter() - began))
                if name == "together":
                    told[:] = found
                return {"tokens_per_second": round(rates[name][-1], 1)}

            result = harness.paired(
                lambda _: ask("together", prompts, a.at_once),
                lambda _: ask("one", prompts[: a.alone], 1),
                pairs=a.pairs,
                score=harness.by("tokens_per_second"),
            )
        run = harness.timed(lambda: stock(model, prompts, new=a.new, rows=a.at_once))
        rates["transformers"].append(run.value / run.wall)
        expected = toque_generate(model, prompts, new=a.new)
    equal = sum(t.text == text for t, text in zip(told, expected, strict=True))
    firsts = [t.first_seconds for t in told]
    medians = {name: round(statistics.median(found), 1) for name, found in rates.items()}
    result.quality = {"passes": equal == len(prompts), "equal": equal, "requests": len(prompts)}
    if equal < len(prompts):
        result.void(f"{len(prompts) - equal} texts are not those of toque generate")
    result.details = {
        "tokens_per_second": medians,
        "times_transformers": round(medians["together"] / medians["transformers"], 2),
        "first_token_seconds": {"p50": quantile(firsts, 0.5), "p99": quantile(firsts, 0.99)},
        "tokens": sum(t.tokens for t in told),
    }
    return result


def toque_generate(model: Path, prompts: Sequence[str], *, new: int) -> list[str]:
    """What the command writes for the prompts as they are."""
    from toque import generate

    texts = generate(model, prompts, temperature=0, max_new_tokens=new, raw=True)
    return [one.text for one in texts]


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--model", type=Path)
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--at-once", type=int, default=32)
    p.add_argument("--alone", type=int, default=16, help="requests of the one-at-a-time side")
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--pairs", type=int, default=1)
    p.add_argument("--threads", type=int, default=2)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
