"""DPO: the loss and its gradient against autograd in plain torch, in float64."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tiny import EVERY_KIND, Example, examples, make, pack
from toque.batch import Batch
from toque.config.schema_methods import AdapterConfig, ObjectiveConfig
from toque.models.forward.example_losses import nats_by_example
from toque.models.lora.layers import attach
from toque.training.distributed.collectives import Ranks
from toque.training.objectives.dpo import PreferenceLoss
from toque.training.objectives.objective import count_pairs, preference

PAIRS = 6
SETTINGS = [
    {},
    {"beta": 0.4, "label_smoothing": 0.1},
    {"sft_weight": 0.7},
    {"length_normalised": True, "beta": 2.0, "sft_weight": 0.3},
]


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def answers() -> list[Example]:
    """Chosen and rejected answers in turn, each two with the same prompt."""
    prompts = [prompt for prompt, _ in examples(PAIRS, seed=1)]
    targets = [target for _, target in examples(2 * PAIRS, seed=2)]
    return [(prompts[i // 2], target) for i, target in enumerate(targets)]


def in_rows(pairs_per_row: int) -> list[list[Example]]:
    """The answers with so many pairs in each row."""
    width = 2 * pairs_per_row
    listed = answers()
    return [listed[i : i + width] for i in range(0, len(listed), width)]


def model_of(kind: str) -> nn.Module:
    return make(kind).double()


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def plain_nats(model: Any, prompt: list[int], target: list[int]) -> Tensor:
    """Minus the log-probability of one answer by transformers alone."""
    return token_nats(model, prompt, target).sum()


def token_nats(model: Any, prompt: list[int], target: list[int]) -> Tensor:
    """The same for each token of the answer."""
    prompt_ids, ids = torch.tensor([prompt]), torch.tensor([target])
    if model.config.is_encoder_decoder:
        logits = model(input_ids=prompt_ids, labels=ids).logits[0]
    else:
        both = torch.cat([prompt_ids, ids], 1)
        logits = model(input_ids=both).logits[0, len(prompt) - 1 : -1]
    return F.cross_entropy(logits, ids[0], reduction="none")


def plain_loss(
    model: Any, reference: Any, *, settings: ObjectiveConfig
) -> tuple[Tensor, list[float]]:
    """The summed loss of all pairs as in the papers, and the margins."""
    total, margins = torch.zeros(()), []
    listed = answers()
    for chosen, rejected in zip(listed[::2], listed[1::2], strict=True):
        rewards, nats = [], []
        for prompt, target in (chosen, rejected):
            nats.append(plain_nats(model, prompt, target))
            with torch.no_grad():
                before = plain_nats(reference, prompt, target)
            n = len(target) if settings.length_normalised else 1
            rewards.append(settings.beta * (before - nats[-1]) / n)
        margin = rewards[0] - rewards[1]
        e = settings.label_smoothing
        total = total - (1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)
        total = total + settings.sft_weight * nats[0] / len(chosen[1])
        margins.append(float(margin.detach()))
    return total, margins


def loss_of(reference: nn.Module, settings: ObjectiveConfig) -> Any:
    """The loss function with the reference's nats of `answers`, in float64."""
    with torch.no_grad():
        (nats,) = nats_by_example(reference, pack_all(reference))
    # The run folder keeps float32. Here its rounding would hide differences.
    return PreferenceLoss(settings, np.array(nats, np.float64))  # type: ignore[arg-type]


def pack_all(model: Any) -> Batch:
    kind = "t5" if model.config.is_encoder_decoder else "gpt2"
    return pack(kind, in_rows(PAIRS))


@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_gradient_is_that_of_the_papers_loss(
    kind: str, options: dict[str, Any]
) -> None:
    settings = ObjectiveConfig(kind="dpo", **options)
    model, reference = model_of(kind), make(kind, seed=5).double()
    loss_fn = loss_of(reference, settings)
    expected_loss, margins = plain_loss(model, reference, settings=settings)
    expected = gradients(model, expected_loss)

    for pairs_per_row in (1, 2, PAIRS):
        batch = pack(kind, in_rows(pairs_per_row))
        loss_fn.measurements.clear(torch.device("cpu"))
        loss = loss_fn(model, batch)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-9, atol=1e-9)
        found = gradients(model, loss)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)

        means = loss_fn.measurements.means(Ranks(), count=PAIRS)
        assert means["rewards/margins"].item() == pytest.approx(
            np.mean(margins), rel=1e-5
        )
        right = np.mean([margin > 0 for margin in margins])
        assert means["rewards/accuracies"].item() == pytest.approx(right)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_only_the_adapter_learns(kind: str) -> None:
    settings = ObjectiveConfig(kind="dpo")
    model, reference = model_of(kind), model_of(kind)
    attach(model, AdapterConfig(dropout=0.0), base="none", seed=3)  # type: ignore[arg-type]
    model.double()
    for name, parameter in model.named_parameters():
        if "lora" in name.lower():
            torch.nn.init.normal_(parameter, std=0.3)
    loss_fn = loss_of(reference, settings)
    expected_loss, _ = plain_loss(model, reference, settings=settings)
    expected = gradients(model, expected_loss)
    loss = loss_fn(model, pack(kind, in_rows(2)))
    found = gradients(model, loss)
    assert found
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10)


def test_start_model_has_margin_zero() -> None:
    model = make("gpt2")
    loss_fn = loss_of(model, ObjectiveConfig(kind="dpo"))
    loss = loss_fn(model, pack("gpt2", in_rows(3)))
    assert float(loss.detach()) == pytest.approx(PAIRS * np.log(2.0), rel=1e-6)


def test_row_without_examples_adds_nothing() -> None:
    model = model_of("gpt2")
    batch = pack("gpt2", in_rows(2)).unlabelled()
    objective = preference(ObjectiveConfig(kind="dpo"), np.zeros(12, np.float32))
    loss = objective.loss_fn(model, batch)
    assert float(loss.detach()) == 0.0
    assert count_pairs(batch) == 0
    assert all(not g.any() for g in gradients(model, loss).values())


def test_no_gradient_needs_no_second_matmul() -> None:
    """Evaluation returns the same value without computing gradients."""
    model, reference = model_of("gpt2"), make("gpt2", seed=5).double()
    loss_fn: Callable[..., Tensor] = loss_of(reference, ObjectiveConfig(kind="dpo"))
    batch = pack("gpt2", in_rows(2))
    with torch.no_grad():
        evaluated = loss_fn(model, batch)
    torch.testing.assert_close(evaluated, loss_fn(model, batch).detach())
