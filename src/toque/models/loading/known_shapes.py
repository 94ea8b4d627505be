"""Known shapes: the configs of well-known checkpoints, so that a plan need not download them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from transformers import PreTrainedModel

from toque.models.loading.from_scratch import build_model


@dataclass(frozen=True)
class KnownShape:
    """Family, shape and vocabulary of a checkpoint."""

    family: str
    shape: Mapping[str, Any]
    vocab_size: int


def _t5(width: int, inner: int, layers: int, heads: int) -> KnownShape:
    """T5 v1.1 (Shazeer 2020), which FLAN-T5 goes on from."""
    shape = {
        "d_model": width,
        "d_kv": 64,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    }
    return KnownShape("t5", shape, 32128)


def _gpt2(width: int, layers: int, heads: int) -> KnownShape:
    """Radford et al. 2019."""
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 1024}
    return KnownShape("gpt2", shape, 50257)


KNOWN: Final[Mapping[str, KnownShape]] = {
    "google/flan-t5-small": _t5(512, 1024, 8, 6),
    "google/flan-t5-base": _t5(768, 2048, 12, 12),
    "google/flan-t5-large": _t5(1024, 2816, 24, 16),
    "google/flan-t5-xl": _t5(2048, 5120, 24, 32),
    "google/flan-t5-xxl": _t5(4096, 10240, 24, 64),
    "openai-community/gpt2": _gpt2(768, 12, 12),
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-large": _gpt2(1280, 36, 20),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
}
"""By hub name; parameters 77 M, 248 M, 783 M, 2.85 B, 11.1 B and 124 M, 355 M, 774 M, 1.56 B."""


def known_model(name: str) -> PreTrainedModel | None:
    """A model of that checkpoint's shape with fresh weights; None where it is not known.

    Under `FakeTensorMode`, which it is for, these take no memory.
    """
    found = KNOWN.get(name)
    if found is None:
        return None
    return build_model(
        family=found.family,
        shape=found.shape,
        vocab_size=found.vocab_size,
        pad_id=0,
        eos_id=1,
        bos_id=None,
        seed=0,
    )
