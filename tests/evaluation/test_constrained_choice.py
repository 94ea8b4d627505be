"""Allowed answers are scored as the stock model scores them, one by one."""

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tiny import model_of
from toque.data.tokenizer.codec import load_codec
from toque.evaluation import constrained_choice

ANSWERS = ["salt", "pepper and butter", "milk"]


def alone(model: PreTrainedModel, prompt: np.ndarray, answer: np.ndarray) -> float:
    """Log-probability of an answer, by transformers' own forward."""
    ids = torch.tensor(answer)
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            start = torch.tensor([[0, *answer[:-1].tolist()]])
            logits = model(
                input_ids=torch.tensor(prompt)[None], decoder_input_ids=start
            ).logits[0]
        else:
            whole = torch.tensor([*prompt.tolist(), *answer.tolist()])
            logits = model(input_ids=whole[None]).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, ids[:, None]).sum())


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
@pytest.mark.parametrize("tokens_at_once", [1, 4096])
def test_shares_are_those_of_the_whole_answers(
    kind, tokens_at_once, tokenizers_at, monkeypatch
):
    codec = load_codec(tokenizers_at["encoder-decoder" if kind == "t5" else "decoder"])
    model = model_of(kind, vocab=codec.vocab_size).train()
    prompts = [
        np.array(codec.encode(text))
        for text in ("lentil soup", "rice", "cake with milk")
    ]
    monkeypatch.setattr(constrained_choice, "TOKENS_PER_BATCH", tokens_at_once)
    found = constrained_choice.choose(model, codec, prompts, ANSWERS)
    assert model.training
    model.eval()
    answers = [
        np.array([*codec.encode(codec.normalise(a)), codec.eos_id]) for a in ANSWERS
    ]
    scores = np.array([[alone(model, p, a) for a in answers] for p in prompts])
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    assert (found.argmax(axis=1) == expected.argmax(axis=1)).all()
