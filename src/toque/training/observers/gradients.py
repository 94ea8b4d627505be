"""Gradients and updates by layer group: does every part learn, and how fast.

Every so many updates a `gradients` event tells for each group of layers the norm of its gradient,
as it is before clipping and summed over ranks, and how long the update was beside the weights:
|after - before| / |before|. About 1e-3 is healthy for most; 1e-6 hardly moves, 1e-1 tears.

The weights are not copied. The ratio is taken from at most `MOST_WEIGHTS` of each parameter, evenly
spread over it, which is all of a small one; so nothing is read twice but those.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.distributed.sharing import own_part
from toque.training.observers.layer_groups import layer_groups
from toque.training.observers.system_sampler import Record
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.units import Progress

MOST_WEIGHTS: Final = 4096
"""Weights sampled of one parameter: their ratio is right to a few per cent."""


@dataclass(eq=False)
class Gradients(Callback):
    """Measures every `every_steps`th update of a run, whatever sessions it came in.

    Args:
        record: writes the event.
        every_steps: of the run: 100 measures updates 100, 200 and so on.
        model: what is trained.
        optimizer: of the loop; the learning rates of its groups are recorded.
        phases: of the loop.
        total: sums over ranks that hold parts of the weights; then every rank has an observer.
    """

    record: Record
    every_steps: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    phases: Phases
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    _due: bool = False
    _norms: list[Tensor] = field(default_factory=list)
    _moved: list[Tensor] = field(default_factory=list)
    _length: list[Tensor] = field(default_factory=list)

    def on_fit_start(self, start: RunStart) -> None:
        """Find the groups and watch the loop's phases."""
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._groups = layer_groups([name for name, _ in named])
        self._due = False
        self.phases.watchers.append(self._watch)

    def on_before_step(self, at: Progress) -> None:
        """Decide if the update that begins is one to measure."""
        self._due = (at.step + 1) % self.every_steps == 0
        self._norms, self._moved, self._length = [], [], []

    def on_step(self, info: StepInfo) -> None:
        """Write the event; on CUDA this waits for the device."""
        if not self._due or not self._norms:
            return
        norms, moved, length = (
            self._by_group(torch.stack(found).tolist())
            for found in (self._norms, self._moved, self._length)
        )
        groups = {
            group: {"grad_norm": norms[group], "update_ratio": _ratio(moved[group], length[group])}
            for group in self._groups
        }
        rules = _rules(self.optimizer)
        self.record("gradients", step=info.progress.step, groups=groups, optimizer_groups=rules)

    def on_fit_end(self, end: RunEnd) -> None:
        """Watch no more."""
        if self._watch in self.phases.watchers:
            self.phases.watchers.remove(self._watch)

    def _by_group(self, norms: Sequence[float]) -> dict[str, float]:
        """Each group's norm, from those of its parameters or of this rank's parts of them."""
        groups = self._groups.values()
        squares = self.total([math.fsum(norms[i] ** 2 for i in of) for of in groups])
        return dict(zip(self._groups, map(math.sqrt, squares), strict=True))

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        if self._due and phase == "clip":
            grads = [None if p.grad is None else own_part(p.grad) for p in self._parameters]
            self._norms = _lengths(grads, like=self._parameters)
        if self._due and phase == "update":
            return self._around_update()
        return UNWATCHED

    @contextmanager
    def _around_update(self) -> Iterator[None]:
        before = [_sample(p).clone() for p in self._parameters]
        yield
        after = [_sample(p) for p in self._parameters]
        changes = [new - old for new, old in zip(after, before, strict=True)]
        self._moved = _lengths(changes, like=self._parameters)
        self._length = _lengths(before, like=self._parameters)


def _sample(parameter: Tensor) -> Tensor:
    """[at most MOST_WEIGHTS] evenly spread weights, without a copy."""
    flat = own_part(parameter).reshape(-1)
    # Odd: widths are even, and of 1,024 columns a step of 1,024 would meet one alone.
    return flat[:: -(-flat.numel() // MOST_WEIGHTS) | 1]


def _lengths(tensors: Sequence[Tensor | None], *, like: Sequence[Tensor]) -> list[Tensor]:
    """[] Euclidean norm of each in float32, 0 for none; all on one device."""
    there = [tensor for tensor in tensors if tensor is not None]
    # One call for all of them on a GPU; it has no public name.
    found = iter(torch._foreach_norm(there) if there else ())  # noqa: SLF001
    zero = torch.zeros((), device=like[0].device)
    norms = (zero if tensor is None else next(found) for tensor in tensors)
    return [norm.to(zero.device, torch.float32) for norm in norms]


def _ratio(moved: float, length: float) -> float | None:
    return moved / length if length > 0 else None


def _rules(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Size, learning rate and decay of each parameter group."""
    return [
        {
            "parameters": sum(p.numel() for p in group["params"]),
            "learning_rate": float(group["lr"]),
            "weight_decay": float(group.get("weight_decay", 0.0)),
        }
        for group in optimizer.param_groups
    ]
