"""Constrained choice: the likeliest of a few allowed answers, exactly.

A model that generates freely may answer "Quite healthy". Here every allowed answer is scored by the
log-probability of its tokens and the end token, and the likeliest wins. Over so few texts that is
the result of constrained decoding, with the probabilities it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.batch import Batch, DecoderBatch
from toque.data.loader.collate import Layout
from toque.data.loader.packing import RowShape
from toque.data.tokenizer.codec import Codec
from toque.models.forward.loss import log_probabilities
from toque.reporter import Count, uncounted

LogProbabilities = Callable[[nn.Module, Batch], Tensor]
"""(model, batch) -> log-probability of every label, 0 where there is none, shaped as the labels."""


class _Answered:
    """Every prompt with every allowed answer, as examples for a layout."""

    def __init__(
        self, prompts: Sequence[NDArray[np.generic]], answers: Sequence[NDArray[np.generic]]
    ) -> None:
        self.prompts, self.answers = prompts, answers

    def prompt(self, row: int, /) -> NDArray[np.generic]:
        return self.prompts[row // len(self.answers)]

    def target(self, row: int, /) -> NDArray[np.generic]:
        return self.answers[row % len(self.answers)]


@dataclass(frozen=True)
class Chooser:
    """Probabilities of allowed answers.

    Args:
        log_probabilities: the model package's.
        autocast: the run's precision.
        device: where the model is.
        encoder: whether the model is an encoder-decoder.
        pad_id: of the tokenizer.
        start_id: the decoder's first input (encoder-decoder only).
        tokens_at_once: most tokens of a batch, about.
    """

    log_probabilities: LogProbabilities
    autocast: Callable[[], AbstractContextManager[object]]
    device: torch.device
    encoder: bool
    pad_id: int
    start_id: int
    tokens_at_once: int = 4096

    def __call__(
        self,
        model: nn.Module,
        prompts: Sequence[NDArray[np.generic]],
        answers: Sequence[NDArray[np.generic]],
        on_progress: Count = uncounted,
    ) -> NDArray[np.float64]:
        """[prompts, answers] probabilities; each row sums to 1.

        Draws nothing at random and leaves the model in the mode it was in.

        Args:
            model: one of the families, on `device`.
            prompts: ids as stored.
            answers: ids of each, with the end token.
            on_progress: called with (prompts done, all prompts).
        """
        examples = _Answered(prompts, answers)
        layout = Layout(
            examples,
            shape=RowShape(int(self.encoder), 1),  # unpacked rows are as long as they must be
            pad_id=self.pad_id,
            start_id=self.start_id,
            packed=False,
        )
        scores = np.zeros((len(prompts), len(answers)))
        # Prompts of about one length side by side, so that few tokens are padding.
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        was_training = model.training
        model.eval()
        on_progress(0, len(prompts))
        try:
            with torch.no_grad():
                for some in self._groups([len(prompts[i]) for i in order], len(answers)):
                    chosen = [order[i] for i in some]
                    rows = [(i * len(answers) + a,) for i in chosen for a in range(len(answers))]
                    batch = layout.batch(rows).to(self.device)
                    with self.autocast():
                        found = self.log_probabilities(model, batch)
                    each = _sums(found.float(), batch).reshape(len(chosen), len(answers))
                    scores[chosen] = each.double().cpu().numpy()
                    on_progress(some.stop, len(prompts))
        finally:
            model.train(was_training)
        likely = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares: NDArray[np.float64] = likely / likely.sum(axis=1, keepdims=True)
        return shares

    def _groups(self, lengths: Sequence[int], n_answers: int) -> list[range]:
        groups, start = [], 0
        for i, length in enumerate(lengths):
            if i > start and (i + 1 - start) * n_answers * (length + 8) > self.tokens_at_once:
                groups.append(range(start, i))
                start = i
        return [*groups, range(start, len(lengths))]


def _sums(log_probabilities: Tensor, batch: Batch) -> Tensor:
    """[rows] of the one example in each."""
    held = batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    return torch.where(held > 0, log_probabilities, 0.0).sum(1)


def answer_ids(codec: Codec, answer: str) -> NDArray[np.generic]:
    """An answer as a store holds it, with the end token."""
    ids = codec.encode(codec.normalise(answer))
    return cast("NDArray[np.generic]", np.array([*ids, codec.eos_id], np.int64))


def choose(
    model: PreTrainedModel,
    codec: Codec,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[str],
    on_progress: Count = uncounted,
) -> NDArray[np.float64]:
    """[prompts, answers] probabilities of a model in use, in its own precision.

    Args:
        model: wherever it is.
        codec: its tokenizer.
        prompts: ids as the model reads them.
        answers: what it may answer, as texts.
        on_progress: called with (prompts done, all prompts).
    """
    chooser = Chooser(
        log_probabilities=log_probabilities,
        autocast=nullcontext,
        device=model.device,
        encoder=bool(model.config.is_encoder_decoder),
        pad_id=codec.pad_id,
        start_id=getattr(model.config, "decoder_start_token_id", None) or 0,
    )
    ids = [np.array(prompt, np.int64) for prompt in prompts]
    return chooser(model, ids, [answer_ids(codec, answer) for answer in answers], on_progress)
