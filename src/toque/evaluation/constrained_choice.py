"""Constrained choice: the likeliest of a few allowed answers, exactly.

Every allowed answer is scored by the log-probability of its tokens and the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.batch import DecoderBatch
from toque.data.loader.collate import Layout
from toque.data.loader.packing import RowShape
from toque.data.tokenizer.codec import Codec
from toque.models.forward.loss import log_probabilities
from toque.models.generation.engine import evaluating
from toque.models.generation.kv_cache import neighbours
from toque.models.lora.frozen import computing
from toque.reporter import Count, uncounted

TOKENS_AT_ONCE: Final = 4096  # most tokens of a batch, about


class _Answered:
    """Every prompt with every allowed answer, as examples for a layout."""

    def __init__(
        self, prompts: Sequence[NDArray[np.int64]], answers: Sequence[NDArray[np.int64]]
    ) -> None:
        self.prompts, self.answers = prompts, answers

    def prompt(self, row: int, /) -> NDArray[np.int64]:
        return self.prompts[row // len(self.answers)]

    def target(self, row: int, /) -> NDArray[np.int64]:
        return self.answers[row % len(self.answers)]


def choose(
    model: PreTrainedModel,
    codec: Codec,
    prompts: Sequence[Sequence[int] | NDArray[np.generic]],
    answers: Sequence[str],
    on_progress: Count = uncounted,
    *,
    autocast: Callable[[], AbstractContextManager[object]] | None = None,
) -> NDArray[np.float64]:
    """[prompts, answers] probabilities of a model's allowed answers; each row sums to 1.

    Draws nothing at random and leaves the model in the mode it was in. `autocast` is that of a
    training; without it the model computes as it is held.
    """
    ids = [[*codec.encode(codec.normalise(answer)), codec.eos_id] for answer in answers]
    examples = _Answered(*([np.array(one, np.int64) for one in some] for some in (prompts, ids)))
    layout = Layout(
        examples,
        # Unpacked rows are as long as they must be.
        shape=RowShape(int(model.config.is_encoder_decoder), 1),
        pad_id=codec.pad_id,
        start_id=getattr(model.config, "decoder_start_token_id", None) or 0,
        packed=False,
    )
    scores, n = np.zeros((len(prompts), len(answers))), len(answers)
    # Prompts of about one length side by side, so that few tokens are padding.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    sizes = [n * (len(prompts[i]) + 8) for i in order]
    on_progress(0, len(prompts))
    with evaluating(model), torch.no_grad():
        for some in neighbours(sizes, max_wasted=TOKENS_AT_ONCE, max_tokens=TOKENS_AT_ONCE):
            chosen = order[some]
            batch = layout.batch([(i * n + a,) for i in chosen for a in range(n)])
            batch = batch.to(model.device)
            with computing(model) if autocast is None else autocast():
                found = log_probabilities(model, batch).float()
            held = batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
            each = torch.where(held > 0, found, 0.0).sum(1).reshape(len(chosen), n)
            scores[chosen] = each.double().cpu().numpy()
            on_progress(some.stop, len(prompts))
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares: NDArray[np.float64] = likely / likely.sum(axis=1, keepdims=True)
    return shares
