"""Penalties, biases and min-p against transformers, and against the formulas of OpenAI's API."""

from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
)

from tiny import EOS, PAD, VOCAB, model_of
from toque.errors import ConfigError
from toque.models.generation.live_rows import LiveRows, Order
from toque.models.generation.options import GenerationOptions
from toque.models.generation.sampling import sample_tokens, uniform
from written import generate as written

PROMPTS = [[5, 6, 7, 6], [8, 9], [4] * 9]
NEW = 12


def generate(model: Any, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    return written(
        model, prompts, eos_id=EOS, pad_id=PAD, max_new_tokens=NEW, **options
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_the_repetition_penalty_is_that_of_transformers(family, penalty):
    model = model_of(family)
    texts = generate(model, PROMPTS, repetition_penalty=penalty)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False,
            repetition_penalty=penalty, eos_token_id=EOS, pad_token_id=PAD,
        )[0].tolist()  # fmt: skip
        answer = found[len(prompt) :]
        assert text == answer[: len(text)]
        assert answer[len(text) :] in ([], [EOS])


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 0.8},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"logit_bias": {11: 4.0, 12: -100.0}},
    ],
)
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_each_step_has_the_changed_logits(family, options):
    model = model_of(family)
    (text,) = generate(model, PROMPTS[:1], **options)
    text = [*text, EOS][:NEW]
    for length, token in enumerate(text):
        logits = logits_after(model, family, PROMPTS[0], text[:length])
        seen = {*text[:length], *(PROMPTS[0] if family != "t5" else [])}
        for id_, bias in options.get("logit_bias", {}).items():
            logits[id_] += bias
        for id_ in seen:
            penalty = options.get("repetition_penalty", 1.0)
            value = logits[id_]
            logits[id_] = value / penalty if value > 0 else value * penalty
        for id_ in set(text[:length]):
            logits[id_] -= options.get("presence_penalty", 0.0)
            logits[id_] -= options.get("frequency_penalty", 0.0) * text[:length].count(
                id_
            )
        assert float(logits[token]) == pytest.approx(float(logits.max()), abs=1e-4)


def logits_after(model: Any, family: str, prompt: list[int], answer: list[int]) -> Any:
    with torch.no_grad():
        if family == "t5":
            start = torch.tensor([[PAD, *answer]])
            return model(torch.tensor([prompt]), decoder_input_ids=start).logits[0, -1]
        return model(torch.tensor([[*prompt, *answer]])).logits[0, -1].clone()


def test_a_row_does_not_change_because_another_has_penalties():
    model = model_of("llama")
    options = [GenerationOptions(), GenerationOptions(presence_penalty=2.0)]
    alone = [
        generate(model, PROMPTS[:1], presence_penalty=option.presence_penalty)[0]
        for option in options
    ]
    rows = LiveRows(model, rows=2, columns=40, eos_id=EOS, pad_id=PAD)
    orders = [Order(PROMPTS[0], NEW, option, n) for n, option in enumerate(options)]
    rows.admit(orders)
    texts: list[list[int]] = [[], []]
    while rows.orders:
        for new in rows.step():
            if new.end != "stop":
                texts[new.order.number].append(new.token)
    assert texts == alone
    assert texts[0] != texts[1]


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 20}, {"top_p": 0.9}])
def test_min_p_removes_the_tokens_that_transformers_removes(min_p, cut):
    torch.manual_seed(0)
    logits = torch.randn(64, VOCAB) * 3
    draws = [uniform(1, n, 0) for n in range(64)]
    found = sample_tokens(logits, draws, 0.8, min_p=min_p, **cut)
    processors = LogitsProcessorList([MinPLogitsWarper(min_p)])
    kept = processors(None, logits / 0.8)
    assert bool((kept[range(64), found] > -torch.inf).all())
    assert (sample_tokens(kept, draws, 1.0, **cut) == found).all()


def test_a_bias_of_no_token_is_refused():
    with pytest.raises(ConfigError, match="the vocabulary has ids from 0"):
        generate(model_of("llama"), PROMPTS, logit_bias={VOCAB: 1.0})
    assert hash(GenerationOptions(logit_bias={1: 1.0}))


def test_the_formula_of_transformers_is_the_one_in_the_test():
    logits = torch.tensor([[2.0, -1.0, 0.5]])
    found = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1]]), logits)
    assert found.tolist() == [[1.0, -2.0, 0.5]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be above 0"),
        (
            {"presence_penalty": float("inf")},
            "presence_penalty must be a finite number",
        ),
        ({"frequency_penalty": "a"}, "frequency_penalty must be a number"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias must be a whole number"),
        ({"logit_bias": {1: "b"}}, "logit_bias must be a number"),
        ({"logit_bias": {-1: 2.0}}, "Use ids from 0 and finite numbers"),
        ({"logit_bias": {1: float("nan")}}, "Use ids from 0 and finite numbers"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        GenerationOptions(**options)
