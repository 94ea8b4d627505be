"""`toque serve` with 32 concurrent requests, against `transformers serve`.

    python bench/speed/serve.py                     # a model of 33 M random weights
    python bench/speed/serve.py --model FOLDER

The `openai` client streams the same greedy requests from both servers, each in its own process.
transformers uses continuous batching, its fastest mode (`pip install transformers[serving]`). The
details have Toque with one request at a time and transformers with its default mode. The ratio
compares tokens per wall second. The model continues documents. The text sent to transformers
contains the beginning token, so both servers read the same tokens.

Quality: every text must equal the text of `toque generate`, and at least 95 % of the texts of
transformers must equal it. Otherwise the ratio is void. With `--precision bf16` both servers
compute in bf16, and ours must match float32 at least as often as transformers.
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
class Reply:
    """One answer, as the client received it."""

    text: str
    tokens: int
    first_seconds: float
    """Seconds from the request to the first token."""


def written_model(folder: Path) -> Path:
    """Write a random Llama with the vocabulary of GPT-2. Wide weights give varied texts."""
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
    """Run `toque serve` in a child process and yield its address."""
    command = [
        sys.executable,
        "-m",
        "toque",
        "serve",
        f"model={model}",
        "--port",
        "0",
        *flags,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with subprocess.Popen(  # noqa: S603 - our own command
        command, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            match = re.search(r"http://\S+", process.stdout.readline())
            if match is None:
                raise RuntimeError("toque serve did not start. Its error is above.")
            yield match[0]
        finally:
            process.terminate()


@contextmanager
def served_by_transformers(model: Path, threads: int, *flags: str) -> Iterator[str]:
    """Run `transformers serve` in a child process and yield its address."""
    port = harness.free_port()
    program = [
        str(Path(sys.executable).with_name("transformers")),
        "serve",
        str(model),
        *flags,
    ]
    command = [*program, "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(  # noqa: S603 - the peer's own command
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(600):
                if process.poll() is not None:
                    raise harness.Skipped("transformers serve did not start")
                with (
                    suppress(OSError),
                    socket.create_connection(("127.0.0.1", port), 1),
                ):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


async def streamed(
    address: str, prompts: Sequence[str], *, at_once: int, new: int, name: str = "model"
) -> list[Reply]:
    """Stream the answers to all prompts with `at_once` concurrent requests."""
    import openai

    limit = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(
        base_url=f"{address}/v1", api_key="none", timeout=600
    ) as client:

        async def one(prompt: str) -> Reply:
            async with limit:
                began, first, parts, tokens = time.perf_counter(), 0.0, [], 0
                events = await client.completions.create(
                    model=name, prompt=prompt, temperature=0, max_tokens=new, stream=True,
                    stream_options={"include_usage": True},
                )  # fmt: skip
                async for event in events:
                    first = first or time.perf_counter() - began
                    parts += [choice.text for choice in event.choices]
                    tokens = event.usage.completion_tokens if event.usage else tokens
                return Reply("".join(parts), tokens, first)

        return await asyncio.gather(*map(one, prompts))


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value at a quantile."""
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))], 4)


@dataclass
class Side:
    """Requests to one server that is started for them."""

    model: Path
    a: argparse.Namespace
    prompts: Sequence[str]
    replies: list[list[Reply]] = field(default_factory=list)

    def ours(self, at_once: int, n: int | None = None) -> dict[str, float]:
        """Send the requests to `toque serve`."""
        with served(
            self.model, self.a.threads, "--precision", self.a.precision
        ) as address:
            return self._send(address, self.prompts[:n], at_once, "model")

    def theirs(self, *flags: str, n: int | None = None) -> dict[str, float]:
        """Send the requests to `transformers serve`."""
        prompts = [f"<|endoftext|>{prompt}" for prompt in self.prompts[:n]]
        flags += ("--dtype", "bfloat16") if self.a.precision == "bf16" else ()
        with served_by_transformers(self.model, self.a.threads, *flags) as address:
            return self._send(address, prompts, self.a.at_once, str(self.model))

    def _send(
        self, address: str, prompts: Sequence[str], at_once: int, name: str
    ) -> dict[str, float]:
        asyncio.run(
            streamed(address, prompts[:4], at_once=4, new=8, name=name)
        )  # warm-up
        began = time.perf_counter()
        replies = asyncio.run(
            streamed(address, prompts, at_once=at_once, new=self.a.new, name=name)
        )
        seconds = time.perf_counter() - began
        self.replies.append(replies)
        first_seconds = [reply.first_seconds for reply in replies]
        return {
            "tokens_per_second": round(
                sum(reply.tokens for reply in replies) / seconds, 1
            ),
            "first_token_p50": quantile(first_seconds, 0.5),
            "first_token_p99": quantile(first_seconds, 0.99),
        }


def measure(a: argparse.Namespace) -> harness.Result:
    """Run the pairs and the slower modes. Compare the texts with `toque generate`."""
    with tempfile.TemporaryDirectory() as folder:
        model = a.model or written_model(Path(folder) / "model")
        lines = (
            peers.write_pairs(Path(folder) / "pairs.jsonl", a.requests)
            .read_text()
            .splitlines()
        )
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
    equal = min(sum(map(is_text, replies, expected)) for replies in ours.replies)
    peers_equal = min(
        sum(map(is_text, replies, expected)) for replies in theirs.replies
    )
    passes = equal == len(prompts) and peers_equal >= 0.95 * len(prompts)
    if a.precision == "bf16":
        passes = equal >= peers_equal
    result.quality = {
        "passes": passes, "equal": equal, "transformers_equal": peers_equal,
        "requests": len(prompts),
    }  # fmt: skip
    if not passes:
        result.void("the texts differ from toque generate")
    fastest = statistics.median(
        run.value["tokens_per_second"] for run in result.runs[0]
    )
    result.details = {
        "times_one_at_a_time": round(fastest / one["tokens_per_second"], 2),
        "times_transformers_by_default": round(
            fastest / default["tokens_per_second"], 2
        ),
        "one_at_a_time": one,
        "transformers_by_default": default,
    }
    return result


def is_text(reply: Reply, text: str) -> bool:
    """Return whether the reply has this text."""
    return reply.text == text


def toque_generate(model: Path, prompts: Sequence[str], *, new: int) -> list[str]:
    """Generate the texts by `toque.generate`."""
    from toque import generate

    texts = generate(model, prompts, temperature=0, max_new_tokens=new, raw=True)
    return [one.text for one in texts]


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument("--model", type=Path)
    p.add_argument("--requests", type=int, default=200)
    p.add_argument("--at-once", type=int, default=32)
    p.add_argument(
        "--alone", type=int, default=32, help="requests for the slower modes"
    )
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--pairs", type=int, default=5)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--precision", choices=("float32", "bf16"), default="float32")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
