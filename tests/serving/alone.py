"""Prompts, and what a model writes for one of them alone: what every served text must be."""

from __future__ import annotations

import random
from dataclasses import replace

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
    served: ServedModel, prompt: list[int], options: GenerationOptions = GREEDY, most: int = 24
) -> list[int]:
    """What `toque generate` writes for one prompt."""
    (ids,) = engine.generate(
        served.model, [prompt], replace(options, max_new_tokens=most), eos_id=served.codec.eos_id,
        pad_id=served.codec.pad_id,
    )  # fmt: skip
    return ids
