"""Allowed answers are scored as the stock model scores them, one by one."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tiny import PAD, model_of
from toque.evaluation.constrained_choice import Chooser
from toque.models.forward.loss import log_probabilities

PROMPTS = [np.array(ids) for ids in ([7, 8, 9, 1], [5, 1], [11, 12, 13, 14, 15, 16, 1])]
ANSWERS = [np.array(ids) for ids in ([20, 1], [21, 22, 23, 1], [20, 24, 1])]


def alone(model: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray) -> float:
    """Log-probability of an answer, by transformers' own forward."""
    ids = torch.tensor(answer)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = torch.tensor([[0, *answer[:-1].tolist()]])
            logits = model(input_ids=torch.tensor(prompt)[None], decoder_input_ids=start).logits[0]
        else:
            whole = torch.tensor([*prompt.tolist(), *answer.tolist()])
            logits = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, ids[:, None]).sum())


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("tokens_at_once", [1, 4096])
def test_shares_are_those_of_the_whole_answers(kind: str, tokens_at_once: int) -> None:
    model = model_of(kind).train()
    choose = Chooser(
        log_probabilities=log_probabilities,
        autocast=nullcontext,
        device=torch.device("cpu"),
        encoder=kind == "t5",
        pad_id=PAD,
        start_id=PAD,
        tokens_at_once=tokens_at_once,
    )
    found = choose(model, PROMPTS, ANSWERS)
    assert model.training
    model.eval()
    scores = np.array([[alone(model, p, a) for a in ANSWERS] for p in PROMPTS])
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
