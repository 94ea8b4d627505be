"""Reference update, as transformers and torch compute it, beside the training loop's.

The first takes each example alone through the stock forward and `F.cross_entropy`; the second is
`Trainer.step` itself, with an optimizer that keeps the gradient instead of using it. Both divide
the sum of the losses once by the update's target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from toque.batch import IGNORE
from toque.data.loader.batch_stream import Step
from toque.models.families import family_of, unwrapped
from toque.models.forward import loss as objective
from toque.training.autotune.oom_fallback import OomFallback
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.store import CheckpointStore
from toque.training.guards.update_guard import UpdateGuard
from toque.training.runtime import Runtime
from toque.training.schedule import Schedule
from toque.training.trainer import Trainer
from toque.units import Cursor, Duration

Pair = tuple[Sequence[int], Sequence[int]]
"""Prompt and target of an example, as token ids."""


@dataclass(frozen=True)
class Measured:
    """What an update computed."""

    loss: float
    """Nats per target token."""
    gradient: dict[str, Tensor]
    """By parameter; on the model's device."""

    def plus(self, other: Measured) -> Measured:
        """The sum over two ranks."""
        names = self.gradient.keys() | other.gradient.keys()
        parts = {n: [m.gradient[n] for m in (self, other) if n in m.gradient] for n in names}
        return Measured(self.loss + other.loss, {n: sum(g[1:], g[0]) for n, g in parts.items()})


@dataclass(frozen=True)
class Difference:
    """How far an update is from the reference, each as a share of the reference's."""

    loss: float
    norm: float
    """Of the whole gradient's length."""
    element: float
    """The largest of any element, as a share of the largest element."""
    where: str
    """The parameter that holds that element."""

    def within(self, *, loss: float, gradient: float) -> bool:
        """Whether all of it is; what is not a number is not."""
        return self.loss <= loss and self.norm <= gradient and self.element <= gradient


def difference(found: Measured, reference: Measured) -> Difference:
    """How far `found` is from `reference`; infinite where a gradient is missing or added."""
    if found.gradient.keys() != reference.gradient.keys():
        odd = min(found.gradient.keys() ^ reference.gradient.keys())
        return Difference(math.inf, math.inf, math.inf, odd)
    largest = max(float(g.abs().max()) for g in reference.gradient.values()) or 1.0
    elements = {
        name: float((found.gradient[name] - expected).abs().max()) / largest
        for name, expected in reference.gradient.items()
    }
    # A NaN is the worst there is, and max() would pass over it.
    where = max(elements, key=lambda name: _or_infinite(elements[name]))
    norms = [math.sqrt(sum(float(g.double().pow(2).sum()) for g in m.gradient.values()))
             for m in (found, reference)]  # fmt: skip
    return Difference(
        loss=abs(found.loss - reference.loss) / abs(reference.loss),
        norm=abs(norms[0] - norms[1]) / (norms[1] or 1.0),
        element=_or_infinite(elements[where]),
        where=where,
    )


def _or_infinite(value: float) -> float:
    return math.inf if math.isnan(value) else value


def reference_update(model: nn.Module, pairs: Sequence[Pair], *, smoothing: float) -> Measured:
    """Every example alone through transformers' own forward, in the model's dtype.

    Args:
        model: Its dropout must be off; its gradients are cleared.
        pairs: The update's examples.
        smoothing: Label smoothing.
    """
    core: Any = unwrapped(model)
    encoder = family_of(core.config).is_encoder_decoder
    counts = [len(target) - (not encoder and not prompt) for prompt, target in pairs]
    total, n_targets = 0.0, sum(counts)
    model.zero_grad(set_to_none=True)
    for prompt, target in pairs:
        if encoder:
            labels = torch.tensor([list(target)], device=core.device)
            source = torch.tensor([list(prompt)], device=core.device)
            logits = core(input_ids=source, labels=labels).logits
        else:
            ids = torch.tensor([[*prompt, *target]], device=core.device)
            labels = torch.full_like(ids, IGNORE)
            # Position i predicts token i + 1.
            first = max(len(prompt) - 1, 0)
            labels[0, first:-1] = ids[0, first + 1 :]
            # Without a mask GPT-2 would warn of padding, which one example has none of.
            logits = core(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        loss = functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum",
            label_smoothing=smoothing,
        )  # fmt: skip
        torch.autograd.backward(loss / n_targets)
        total += loss.item()
    return Measured(total / n_targets, _taken(model))


def training_update(
    model: nn.Module, step: Step, *, rows_at_once: int, runtime: Runtime, smoothing: float
) -> Measured:
    """What `Trainer.step` computes for `step`, nothing of it applied.

    Args:
        model: Its dropout must be off.
        step: What the update sees; of several ranks, this rank's share.
        rows_at_once: Rows of a micro-batch.
        runtime: Device and precision.
        smoothing: Label smoothing.
    """
    keeper = _Keeper([p for p in model.parameters() if p.requires_grad])
    trainer = Trainer(
        model=model,
        optimizer=keeper,
        batches=_Single(step),
        loss_fn=partial(objective.loss_sum, smoothing=smoothing),
        lr_at=lambda _: 0.0,
        evaluator=dict,
        checkpoints=CheckpointStore(Path("unused")),
        callbacks=Callbacks([]),
        runtime=runtime,
        schedule=Schedule(Duration(1, "steps")),
        oom_fallback=OomFallback(rows_at_once),
        guard=UpdateGuard(runtime),
        max_grad_norm=None,
        seed=0,
    )
    info = trainer.step(step)
    kept = {
        name: keeper.kept[parameter]
        for name, parameter in model.named_parameters()
        if parameter in keeper.kept
    }
    return Measured(float(info.loss), kept)


def switch_dropout_off(model: nn.Module) -> None:
    """Zero every dropout of a transformers model: its draws depend on how rows are laid out."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def _taken(model: nn.Module) -> dict[str, Tensor]:
    taken = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return taken


class _Keeper(torch.optim.Optimizer):
    """Keeps the gradient it is given, and changes nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.kept: dict[nn.Parameter, Tensor] = {}

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take a copy."""
        del closure
        parameters = (p for group in self.param_groups for p in group["params"])
        self.kept = {p: p.grad.clone() for p in parameters if p.grad is not None}


@dataclass(frozen=True)
class _Single:
    """Batches that hold one update."""

    step: Step

    def at(self, cursor: Cursor) -> Step:
        """The update, wherever."""
        del cursor
        return self.step
