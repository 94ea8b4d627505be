"""Requests by hand; prompts, and what a model writes for one alone: what is served must be that."""

import http.client
import random
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest

from toque.models.generation import engine
from toque.models.generation.options import GenerationOptions
from toque.serving.batcher import ServedModel

GREEDY = GenerationOptions()


def prompts(served: ServedModel, n: int) -> list[list[int]]:
    drawn = random.Random(n)
    words = ["lentil", "soup", "rice", "cake", "with", "butter", "and", "salt"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(1, 9))) for _ in range(n)]
    return [served.prompt_ids(text) for text in texts]


def alone(
    served: ServedModel,
    prompt: list[int],
    options: GenerationOptions = GREEDY,
    most: int = 24,
) -> list[int]:
    """What `toque generate` writes for one prompt."""
    (ids,) = engine.generate(
        served.model, [prompt], replace(options, max_new_tokens=most), eos_id=served.codec.eos_id,
        pad_id=served.codec.pad_id,
    )  # fmt: skip
    return ids


def client_of(address: str):
    """OpenAI's own client of a server."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


def open_to(address: str) -> http.client.HTTPConnection:
    there = urlsplit(address)
    return http.client.HTTPConnection(there.hostname or "", there.port, timeout=60)


def sent(address, method, path, body=None, headers=None) -> Answer:
    """The answer to one request by hand."""
    with closing(open_to(address)) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())


def metric(address: str, name: str) -> float:
    """Sum of the metrics whose names begin so."""
    page = sent(address, "GET", "/metrics").body.decode().splitlines()
    lines = [line.rsplit(" ", 1) for line in page]
    return sum(float(number) for key, number in lines if key.startswith(name))
