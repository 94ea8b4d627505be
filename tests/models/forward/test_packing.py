"""Packed examples give the loss and gradients of each example alone through stock transformers."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from toque.batch import IGNORE, EncoderDecoderBatch
from toque.models.forward.attention import attention_of, use_attention
from toque.models.forward.loss import loss_sum
from toque.models.forward.packed import hidden_states

ROWS = [(0, 1, 2), (3,), (4, 5), (6, 7, 8, 9), (10,), (11, 12), (13, 14, 15), (16, 17)]


@pytest.fixture(params=["segments", "dense", "flex"], autouse=True)
def path(request):
    """Every way to keep examples apart; a CPU takes the first, a GPU the others."""
    return request.param


@pytest.fixture
def tiny(tiny, request):
    """Tiny models that attend in that way."""

    def make(kind):
        model, asked = tiny(kind), request.getfixturevalue("path")
        use_attention(model, asked)
        assert attention_of(model, torch.device("cpu")).name == asked
        return model

    return make


def rows_of(examples, plan=ROWS):
    return [[examples[i] for i in row] for row in plan]


def stock_sum(model, example, smoothing=0.0):
    """One example through the model's own forward, its mean loss turned back into a sum."""
    prompt, target = example
    encoder = model.config.is_encoder_decoder
    read = torch.tensor([prompt if encoder else prompt + target], device=model.device)
    labels = torch.tensor([target if encoder else [IGNORE] * len(prompt) + target]).to(
        read.device
    )
    output = model(input_ids=read, labels=labels)
    if smoothing == 0.0:
        return output.loss * len(target)
    logits = output.logits[0] if encoder else output.logits[0, len(prompt) - 1 : -1]
    return F.cross_entropy(
        logits, torch.tensor(target), label_smoothing=smoothing, reduction="sum"
    )


def gradients(model):
    found = {
        n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return found


def assert_close(ours, theirs, relative=2e-5):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        distance = (gradient - theirs[name]).norm() / theirs[name].norm().clamp(
            min=1e-3
        )
        assert distance < relative, f"{name}: {distance:.1e}"


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_packed_equals_each_example_alone(kind, smoothing, tiny, some_examples, packed):
    model, examples = tiny(kind), some_examples(18)
    expected = sum(stock_sum(model, example, smoothing) for example in examples)
    expected.backward()
    theirs = gradients(model)

    batch = packed(kind, rows_of(examples))
    for micro_batch_rows in (3, 8):
        total = torch.zeros(())
        for micro in batch.split(micro_batch_rows):
            loss = loss_sum(model, micro, smoothing=smoothing)
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0)
        assert_close(gradients(model), theirs)


def test_unpacked_rows_take_the_causal_path_and_agree(
    kind, tiny, some_examples, packed
):
    model, examples = tiny(kind), some_examples(6)
    batch = packed(kind, [[example] for example in examples])
    loss_sum(model, batch).backward()
    alone = gradients(model)
    # The same rows, said to hold two examples each, must go through the mask.
    forced = dataclasses.replace(batch, example_ids=((0, 0),) * 6)
    loss_sum(model, forced).backward()
    assert_close(gradients(model), alone, relative=1e-5)


def perturbed(batch, row, segment):
    """Other tokens in one segment, on both sides."""
    if isinstance(batch, EncoderDecoderBatch):
        source, target = batch.source_tokens.clone(), batch.target_tokens.clone()
        source[row][batch.source_segments[row] == segment] += 1
        target[row][batch.target_segments[row] == segment] += 1
        return dataclasses.replace(
            batch, source_tokens=source % 61, target_tokens=target % 61
        )
    tokens = batch.tokens.clone()
    tokens[row][batch.segments[row] == segment] += 1
    return dataclasses.replace(batch, tokens=tokens % 61)


def test_an_example_never_sees_its_neighbours(kind, tiny, some_examples, packed):
    model, row = tiny(kind), 3
    batch = packed(kind, rows_of(some_examples(18)))
    segments = getattr(batch, "segments", getattr(batch, "target_segments", None))
    with torch.no_grad():
        before = hidden_states(model, batch)
        for segment in (1, 2, 3, 4):
            after = hidden_states(model, perturbed(batch, row, segment))
            changed = (before != after).any(-1)
            assert changed[row][segments[row] == segment].all()
            changed[row][segments[row] == segment] = False
            changed[segments == 0] = False
            assert not changed.any()


def test_a_row_of_padding_gives_no_loss_and_no_nan(kind, tiny, some_examples, packed):
    model, examples = tiny(kind), some_examples(2)
    with_empty = packed(kind, [examples, []])
    loss_sum(model, with_empty).backward()
    ours = gradients(model)
    loss_sum(model, packed(kind, [examples])).backward()
    assert_close(ours, gradients(model), relative=1e-5)


def test_whatever_attention_a_model_was_loaded_with_the_packed_one_is_ours(
    kind, tiny, some_examples, packed
):
    batch = packed(kind, rows_of(some_examples(18)))
    model = tiny(kind)
    expected = loss_sum(model, batch)
    model.set_attn_implementation("eager")
    assert torch.equal(loss_sum(model, batch), expected)


def test_bfloat16_autocast_stays_near_float32(kind, tiny, some_examples, packed):
    model, batch = tiny(kind), packed(kind, rows_of(some_examples(18)))
    exact = loss_sum(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_sum(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_batch_of_the_other_kind_is_refused(tiny, some_examples, packed):
    rows = rows_of(some_examples(18))
    with pytest.raises(TypeError, match="needs an EncoderDecoderBatch"):
        loss_sum(tiny("t5"), packed("gpt2", rows))
    with pytest.raises(TypeError, match="needs a DecoderBatch"):
        loss_sum(tiny("gpt2"), packed("t5", rows))
