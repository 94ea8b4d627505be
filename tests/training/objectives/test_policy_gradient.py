"""Policy gradient: the loss and its gradient against autograd in plain torch, in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import EVERY_KIND, examples, make, pack
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.loss import loss_sum
from toque.models.lora.layers import attach
from toque.training.objectives.policy_gradient import (
    DivergenceLoss,
    advantages,
    with_weights,
)
from training.objectives.test_dpo import float64, gradients, plain_nats, token_nats

__all__ = ["float64"]  # the fixture of float64 applies here, too
TEXTS = 8
_REWARDS = np.array([[0.0, 1.0, 0.5, 2.0], [1.0, 1.0, 0.0, 1.0]])
# A batch has weights in float32.
WEIGHTS = advantages(_REWARDS).ravel().astype(np.float32).astype(np.float64)


def in_rows(per_row: int) -> list[list[Any]]:
    texts = examples(TEXTS, seed=3)
    return [texts[i : i + per_row] for i in range(0, TEXTS, per_row)]


def plain_loss(model: Any, reference: Any, kl: float) -> Tensor:
    """The weighted sum, and k3 of every token with a reference in evaluation mode."""
    total = torch.zeros(())
    for weight, (prompt, target) in zip(WEIGHTS, examples(TEXTS, seed=3), strict=True):
        total = total + float(weight) * plain_nats(model, prompt, target)
        if kl:
            log_p = -token_nats(model, prompt, target)
            with torch.no_grad():
                log_r = -token_nats(reference, prompt, target)
            ratio = log_r - log_p
            total = total + kl * (ratio.exp() - 1 - ratio).sum()
    return total


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_equals_autograd_packed_and_alone(kind: str, kl: float) -> None:
    model, reference = make(kind).double(), make(kind, seed=5).double()
    expected_loss = plain_loss(model, reference, kl)
    expected = gradients(model, expected_loss)
    loss_fn = DivergenceLoss(kl, reference) if kl else loss_sum
    for per_row in (1, 3, TEXTS):
        batch = with_weights(pack(kind, in_rows(per_row)), WEIGHTS)
        loss = loss_fn(model, batch)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-6, atol=1e-6)
        found = gradients(model, loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "t5", "llama"])
def test_equals_autograd_with_an_adapter(kind: str) -> None:
    model = make(kind)
    attach(model, AdapterConfig(dropout=0.0), base="none", seed=3)
    model.double()
    for name, parameter in model.named_parameters():
        if "lora" in name.lower():
            torch.nn.init.normal_(parameter, std=0.3)
    expected = gradients(model, plain_loss(model, None, 0.0))
    batch = with_weights(pack(kind, in_rows(3)), WEIGHTS)
    found = gradients(model, loss_sum(model, batch))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_parts_of_a_batch_add_up() -> None:
    model = make("llama").double()
    batch = with_weights(pack("llama", in_rows(2)), WEIGHTS)
    whole = loss_sum(model, batch)
    parts = sum(loss_sum(model, part) for part in batch.split(1))
    torch.testing.assert_close(whole, parts)
    unweighted = loss_sum(model, replace(batch, label_weights=None))
    assert abs(float((unweighted - whole).detach())) > 1.0


def test_equal_rewards_have_no_advantage() -> None:
    assert not advantages(np.full((2, 4), 0.7)).any()
