"""Constrained choice: exact probabilities of a few allowed answers.

An answer's score is the log-probability of its tokens and the end token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from toque.batch import Batch, DecoderBatch
from toque.data.loader.collate import Layout
from toque.data.loader.packing import RowShape
from toque.data.tokenizer.codec import Codec
from toque.models.forward.example_losses import log_probabilities
from toque.models.generation.engine import evaluating
from toque.models.generation.kv_cache import group_by_length
from toque.models.lora.frozen import computing
from toque.reporter import Count, uncounted

TOKENS_PER_BATCH: Final = 4096
"""Approximate maximum number of tokens per batch."""
Prompts = Sequence[Sequence[int] | NDArray[np.generic]]
"""Token ids of each prompt."""
_USUAL_ANSWER: Final = 8
"""Assumed length of an answer in tokens, to estimate the size of a batch."""


class _PromptsWithAnswers:
    """Examples for a layout: each prompt with each allowed answer, the answers in turn."""

    def __init__(
        self, prompts: Sequence[NDArray[np.int64]], answers: Sequence[NDArray[np.int64]]
    ) -> None:
        self.prompts = prompts
        self.answers = answers

    def prompt(self, row: int, /) -> NDArray[np.int64]:
        return self.prompts[row // len(self.answers)]

    def target(self, row: int, /) -> NDArray[np.int64]:
        return self.answers[row % len(self.answers)]


def choose(
    model: PreTrainedModel,
    codec: Codec,
    prompts: Prompts,
    answers: Sequence[str],
    on_progress: Count = uncounted,
    *,
    autocast: Callable[[], AbstractContextManager[object]] | None = None,
) -> NDArray[np.float64]:
    """Compute the probabilities of the allowed answers, [prompts, answers]. Each row sums to 1.

    No random numbers are used, and the model's training mode is restored. Without the `autocast` of
    a training run, the model computes in the precision of its weights.
    """
    layout = _make_layout(model, codec, prompts, answers)
    n = len(answers)
    scores = np.zeros((len(prompts), n))
    # Prompts of similar length share a batch, so that few tokens are padding.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
    sizes = [n * (len(prompts[i]) + _USUAL_ANSWER) for i in order]
    on_progress(0, len(prompts))

    with evaluating(model), torch.no_grad():
        for part in group_by_length(
            sizes, max_wasted=TOKENS_PER_BATCH, max_tokens=TOKENS_PER_BATCH
        ):
            chosen = order[part]
            batch = layout.batch([(i * n + a,) for i in chosen for a in range(n)])
            with computing(model) if autocast is None else autocast():
                sums = _sum_logprobs(model, batch.to(model.device))
            scores[chosen] = sums.reshape(len(chosen), n).double().cpu().numpy()
            on_progress(part.stop, len(prompts))

    # The softmax of the scores.
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities: NDArray[np.float64] = likely / likely.sum(axis=1, keepdims=True)
    return probabilities


def _make_layout(
    model: PreTrainedModel,
    codec: Codec,
    prompts: Prompts,
    answers: Sequence[str],
) -> Layout:
    """Return the layout of unpacked rows with one example each."""
    ids = [codec.encode(codec.normalise(answer)) for answer in answers]
    examples = _PromptsWithAnswers(
        [np.array(prompt, np.int64) for prompt in prompts],
        [np.array([*answer, codec.eos_id], np.int64) for answer in ids],
    )
    return Layout(
        examples,
        # Unpacked rows are as long as their example, so the shape has only the sides.
        shape=RowShape(int(model.config.is_encoder_decoder), 1),
        pad_id=codec.pad_id,
        start_id=getattr(model.config, "decoder_start_token_id", None) or 0,
        packed=False,
    )


def _sum_logprobs(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Sum the log-probabilities of each row's target, [rows]."""
    logprobs = log_probabilities(model, batch).float()
    segments = (
        batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    )
    return torch.where(segments > 0, logprobs, 0.0).sum(1)
