"""The engine's `generate` with its options as keywords."""

from typing import Any

from toque.models.generation import engine
from toque.models.generation.options import GenerationOptions

OURS = ("constraints", "on_progress", "on_token", "on_logprob", "on_notice")


def generate(
    model: Any, prompts: Any, *, eos_id: Any, pad_id: int, **more: Any
) -> list[list[int]]:
    """What `engine.generate` writes."""
    handed = {name: more.pop(name) for name in OURS if name in more}
    return engine.generate(
        model,
        prompts,
        GenerationOptions(**more),
        eos_id=eos_id,
        pad_id=pad_id,
        **handed,
    )
