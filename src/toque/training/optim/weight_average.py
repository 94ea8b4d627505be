"""Weight averages over the updates (EMA, LAWA): evaluated and kept, never trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor, nn

from toque.config.schema_methods import AveragingConfig
from toque.training.distributed.sharing import divided_like, own_part
from toque.training.state_values import impossible_weights, refuse
from toque.units import Duration, Progress


@dataclass
class WeightAverage:
    """A running average of a model's trainable parameters.

    ema: a <- d a + (1 - d) w after every update, with d = min(decay, (1 + n) / (10 + n)) after n
    updates, so that the beginning is forgotten soon (Polyak & Juditsky 1992; the ramp is that of
    TensorFlow's ExponentialMovingAverage). last: the mean of the weights as they were at the
    last `last` multiples of `every` (Kaddour 2022, LAWA, arXiv 2209.14981).

    For last so many copies of the weights are held; "%" in `every` is a share of `whole`, the run.
    """

    kind: Literal["ema", "last"]
    decay: float = 0.999
    last: int = 5
    every: Duration = Duration(100, "steps")
    whole: Duration | None = None
    _held: dict[str, dict[str, Tensor]] = field(default_factory=dict, init=False)
    """ema: {"ema": weights}; last: {"000": oldest, ...}, by parameter name."""

    @classmethod
    def from_settings(cls, section: AveragingConfig, whole: Duration) -> Self:
        """The average that the settings ask for, over a run of length `whole`."""
        asked = {name: value for name, value in section if value is not None}
        return cls(**asked, whole=whole)

    @torch.no_grad()
    def update(self, model: nn.Module, before: Progress, after: Progress) -> None:
        """Take in the weights after the update that led from `before` to `after`."""
        if self.kind == "last":
            if self.every.crossed(before, after, self.whole):
                points = [weights for _, weights in sorted(self._held.items())]
                points.append({name: p.detach().clone() for name, p in _trained(model).items()})
                self._held = {f"{i:03d}": held for i, held in enumerate(points[-self.last :])}
            return
        trained = _trained(model)
        if not self._held:
            self._held["ema"] = {name: p.detach().clone() for name, p in trained.items()}
            return
        n = after.step
        keep = min(self.decay, (1.0 + n) / (10.0 + n))
        shadow = self._held["ema"]
        torch._foreach_lerp_(  # what torch.optim itself is made of
            [own_part(shadow[name]) for name in trained],
            [own_part(p) for p in trained.values()],
            1.0 - keep,
        )

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Inside, `model` holds the average; afterwards its own weights again, to the bit."""
        average = self.weights(model)
        trained = _trained(model)
        own = {name: p.detach().clone() for name, p in trained.items()}
        try:
            _copy(average, trained)
            yield
        finally:
            _copy(own, trained)

    def apply(self, model: nn.Module) -> None:
        """Put the average into `model` for good."""
        _copy(self.weights(model), _trained(model))

    @torch.no_grad()
    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The average by parameter name; the model's own weights while there is none."""
        own = {name: p.detach() for name, p in _trained(model).items()}
        points = list(self._held.values()) or [own]
        if len(points) == 1:
            return points[0]
        return {
            name: torch.stack([point[name].float() for point in points]).mean(0).to(tensor.dtype)
            for name, tensor in own.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint holds: `<point>/<parameter name>`."""
        return {
            f"{point}/{name}": tensor
            for point, weights in self._held.items()
            for name, tensor in weights.items()
        }

    @torch.no_grad()
    def load(self, model: nn.Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
        """Take back what `tensors` gave.

        Raises:
            CheckpointError: it belongs to another model; nothing is changed.
        """
        trained = _trained(model)
        held: dict[str, dict[str, Tensor]] = {}
        wrong: list[str] = []
        for key, tensor in tensors.items():
            point, _, name = key.partition("/")
            own = trained.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                wrong.append(f"{key} is no average of this model's")
            elif why := impossible_weights(tensor, own_part(own)):
                wrong.append(f"{key} {why}")
            else:
                kept = torch.empty_like(own).copy_(divided_like(own, tensor))
                held.setdefault(point, {})[name] = kept
        wrong += [
            f"{point} lacks {name}"
            for point, weights in held.items()
            for name in trained.keys() - weights.keys()
        ]
        refuse(wrong, where=where, what="the average of the weights")
        self._held = held


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(source[name])
