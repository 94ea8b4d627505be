"""`toque serve` under 32 requests at a time: against one at a time, and `transformers serve`.

    python bench/speed/serve.py                     # a model of 33 M weights, drawn at random
    python bench/speed/serve.py --model FOLDER

The `openai` client streams the same greedy requests from a server in a process of its own: ours,
then transformers' with continuous batching, its fastest way (`pip install transformers[serving]`).
Beside the pairs, ours answers one request at a time, and transformers' as it is started by default.
Rates are of tokens of the wall clock. The model continues documents, so that both read the same
tokens: its beginning token, which transformers leaves out, stands in the text it is sent.

Quality: every text must be the one of `toque generate`, none may be lost, and at least 95 % of
transformers' are the same; else the ratio is void. With `--precision bf16` both multiply in it, and
at least as many of ours as of transformers' must be those that `toque generate` writes in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

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
    from toque.models.loading.from_scratch import build_model
    from toque.models.loading.model_export import save_model
    from toque.models.loading.provenance import Provenance

    codec = load_codec(peers.tokenizer_folder("gpt2"))
    model = build_model(
        family="llama", shape=SHAPE, vocab_size=codec.vocab_size, pad_id=codec.pad_id,
        eos_id=codec.eos_id, bos_id=codec.bos_id, seed=17,
    )  # fmt: skip
    record = Provenance(form="documents", max_new_tokens=64)
    save_model(model, None, folder, card="", files=codec.files() | record.files())
    return folder


@contextmanager
def served(model: Path, threads: int, *flags: str) -> Iterator[str]:
    """A server in a process of its own; gives its address."""
    command = [sys.executable, "-m", "toque", "serve", f"model={model}", "--port", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(  # noqa: S603 - our own command
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start; see above")
            yield found[0]
        finally:
            process.terminate()


@contextmanager
def served_by_transformers(model: Path, threads: int, *flags: str) -> Iterator[str]:
    """Transformers' server in a process of its own; gives its address."""
    port = harness.free_port()
    program = [str(Path(sys.executable).with_name("transformers")), "serve", str(model), *flags]
    command = [*program, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(  # noqa: S603 - the peer's own command
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise harness.Skipped("transformers serve does not start here")
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def streamed(
    address: str, prompts: Sequence[str], *, at_once: int, new: int, name: str = "model"
) -> list[Told]:
    """Every prompt's answer, so many requests at a time."""
    import openai

    places = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=600) as client:

        async def one(prompt: str) -> Told:
            async with places:
                began, first, parts, tokens = time.perf_counter(), 0.0, [], 0
                events = await client.completions.create(
                    model=name, prompt=prompt, temperature=0, max_tokens=new, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                async for event in events:
                    first = first or time.perf_counter() - began
                    parts += [choice.text for choice in event.choices]
                    tokens = event.usage.completion_tokens if event.usage else tokens
                return Told("".join(parts), tokens, first)

        return await asyncio.gather(*map(one, prompts))


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


@dataclass
class Side:
    """Requests to one server, started for them alone."""

    model: Path
    a: argparse.Namespace
    prompts: Sequence[str]
    told: list[list[Told]] = field(default_factory=list)

    def ours(self, at_once: int, n: int | None = None) -> dict[str, float]:
        """Ask Toque's server."""
        with served(self.model, self.a.threads, "--precision", self.a.precision) as address:
            return self._asked(address, self.prompts[:n], at_once, "model")

    def theirs(self, *flags: str, n: int | None = None) -> dict[str, float]:
        """Ask transformers' server."""
        prompts = [f"<|endoftext|>{prompt}" for prompt in self.prompts[:n]]
        flags += ("--dtype", "bfloat16") if self.a.precision == "bf16" else ()
        with served_by_transformers(self.model, self.a.threads, *flags) as address:
            return self._asked(address, prompts, self.a.at_once, str(self.model))

    def _asked(
        self, address: str, prompts: Sequence[str], at_once: int, name: str
    ) -> dict[str, float]:
        asyncio.run(streamed(address, prompts[:4], at_once=4, new=8, name=name))  # warm
        began = time.perf_counter()
        told = asyncio.run(streamed(address, prompts, at_once=at_once, new=self.a.new, name=name))
        seconds = time.perf_counter() - began
        self.told.append(told)
        firsts = [one.first_seconds for one in told]
        return {
            "tokens_per_second": round(sum(one.tokens for one in told) / seconds, 1),
            "first_token_p50": quantile(firsts, 0.5),
            "first_token_p99": quantile(firsts, 0.99),
        }


def measure(a: argparse.Namespace) -> harness.Result:
    """The pairs, both servers' slower ways, and the texts compared with `toque generate`'s."""
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or written_model(Path(folder) / "model")
        lines = peers.write_pairs(Path(folder) / "pairs.jsonl", a.requests).read_text().splitlines()
        prompts = [json.loads(line)["prompt"] for line in lines]
        ours, theirs, slow = (Side(model, a, prompts) for _ in range(3))
        result = harness.paired(
            lambda _: ours.ours(a.at_once),
            lambda _: theirs.theirs("--continuous-batching"),
            pairs=a.pairs,
            score=harness.by("tokens_per_second"),
        )
        one = slow.ours(1, a.alone)
        default = slow.theirs(n=a.alone)
        expected = toque_generate(model, prompts, new=a.new)
    equal = min(sum(map(is_text, told, expected)) for told in ours.told)
    peers_equal = min(sum(map(is_text, told, expected)) for told in theirs.told)
    passes = equal == len(prompts) and peers_equal >= 0.95 * len(prompts)
    if a.precision == "bf16":
        passes = equal >= peers_equal
    result.quality = {
        "passes": passes, "equal": equal, "transformers_equal": peers_equal,
        "requests": len(prompts),
    }  # fmt: skip
    if not passes:
        result.void("texts are not those of toque generate")
    fastest = statistics.median(run.value["tokens_per_second"] for run in result.runs[0])
    result.details = {
        "times_one_at_a_time": round(fastest / one["tokens_per_second"], 2),
        "times_transformers_by_default": round(fastest / default["tokens_per_second"], 2),
        "one_at_a_time": one,
        "transformers_by_default": default,
    }
    return result


def is_text(told: Told, text: str) -> bool:
    """Whether a client was told this text."""
    return told.text == text


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
    p.add_argument("--alone", type=int, default=32, help="requests of the slower ways")
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", choices=("float32", "bf16"), default="float32")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
