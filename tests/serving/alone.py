"""Prompts, and what a model writes for one of them alone: what every served text must be."""

from __future__ import annotations

import random

from toque.models.generation.sampling import TokenChooser
from toque.serving.served_models import ServedModel
from written import generate

GREEDY = TokenChooser()


def prompts(served: ServedModel, n: int) -> list[list[int]]:
    drawn = random.Random(n)
    words = ["lentil", "soup", "rice", "cake", "with", "butter", "and", "salt"]
    texts = [" ".join(drawn.choices(words, k=drawn.randint(1, 9))) for _ in range(n)]
    return [served.prompt_ids(text) for text in texts]


def alone(
    served: ServedModel, prompt: list[int], chooser: TokenChooser = GREEDY, most: int = 24
) -> list[int]:
    """What `toque generate` writes for one prompt."""
    settings = vars(chooser)
    (ids,) = generate(
        served.model, [prompt], max_new_tokens=most, eos_id=served.codec.eos_id,
        pad_id=served.codec.pad_id, **settings,
    )  # fmt: skip
    return ids
