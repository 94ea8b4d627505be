"""Sizes of a new model: shape, batch, learning rate and weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

HEAD_WIDTH: Final = 32
POSITIONS: Final = 1024
"""Context length of a new model, in tokens of prompt and target together."""
_MLP_RATIO: Final = 11 / 4
"""Width of the MLP relative to the model's width."""
_MIN_UPDATES: Final = 300
"""Minimum number of updates in a run. The batch is made smaller to reach it."""
MIN_BATCH_TOKENS: Final = 1024
"""Tokens per update below which the batch counts examples."""
_TOTAL_DECAY: Final = (1.5, 0.5)
"""Sum of rate times decay over all updates of a run with a constant rate: the minimum, and the
amount per pass over the texts (lab/notes.md)."""
_MAX_DECAY: Final = 2.0
"""Maximum weight decay. A decay of 3.0 raises the loss of 50 and 150 recipes by 3 and 5 %."""


class Size(NamedTuple):
    """Shape of a Llama model from scratch, with its batch and learning rate."""

    width: int
    layers: int
    batch_tokens: int
    peak_lr: float
    """Muon's peak learning rate, which decays linearly to 0."""

    @property
    def shape(self) -> dict[str, Any]:
        """`model.shape` of this size."""
        heads = self.width // HEAD_WIDTH
        return {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": self.inner,
            "max_position_embeddings": POSITIONS,
            "tie_word_embeddings": True,
        }

    @property
    def inner(self) -> int:
        """Width of the MLP, rounded up to a multiple of the head width."""
        return math.ceil(self.width * _MLP_RATIO / HEAD_WIDTH) * HEAD_WIDTH

    @property
    def parameters(self) -> int:
        """Number of parameters without the embedding."""
        layer = self.width * (4 * self.width + 3 * self.inner + 2)
        return self.layers * layer + self.width

    def decay(self, tokens: float, passes: float) -> float:
        """Return `optim.weight_decay` for a run of `tokens` tokens in `passes` passes.

        The sum of rate times decay is the same for short and long runs (Wang & Aitchison 2024,
        arXiv 2405.13698). It is larger for repeated texts, because the model would memorise them
        (Kim et al. 2025, arXiv 2509.14786).
        """
        minimum, per_pass = _TOTAL_DECAY
        total = max(minimum, per_pass * passes)
        batch = max(MIN_BATCH_TOKENS, tokens_per_update(tokens, self.batch_tokens))
        decay = total / (self.peak_lr * tokens / batch)
        return min(_MAX_DECAY, float(f"{decay:.2g}"))


SIZES: Final[Mapping[str, Size]] = {
    "300k": Size(64, 3, 2048, 1e-2),
    "1m": Size(128, 4, 2048, 5e-3),
    "3m": Size(192, 5, 2048, 2.5e-3),
    "6m": Size(256, 6, 2048, 2e-3),
    "14m": Size(384, 7, 4096, 1.5e-3),
    "30m": Size(512, 8, 8192, 1e-3),
}
"""Sizes by their number of parameters with a vocabulary of 2,048 entries. The rates of the three
largest sizes are extrapolated (lab/dial.md)."""


def tokens_per_update(tokens: float, max_tokens: int) -> float:
    """Return the tokens per update, small enough that `tokens` tokens make enough updates."""
    return min(max_tokens, tokens / _MIN_UPDATES)


def model_settings(size: Size, tokenizer: str) -> dict[str, Any]:
    """Return the section `model` for a new model."""
    return {"family": "llama", "shape": size.shape, "tokenizer": tokenizer}
