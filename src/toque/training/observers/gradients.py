"""Gradients by layer group: does every part learn.

Every so many updates a `gradients` event has for each group of layers the norm of its gradient,
before clipping and summed over ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.distributed.data_parallel import DataParallel, local_part
from toque.training.observers.system_sampler import Record
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.units import Duration, Progress

_BLOCK: Final = re.compile(
    r"(?:^|\.)(?:(encoder|decoder)\.)?(?:block|blocks|h|layer|layers)\.([0-9]+)\."
)
"""T5's encoder.block.3., GPT-2's h.3., NeoX' and Llama's layers.3."""
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|head)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:shared|wte|wpe|embed|embed_in|embed_tokens|embeddings?|position_embeddings)\."
)
_ADAPTER: Final = re.compile(r"\.(?:lora_\w+|trainable_tokens_\w+)(?:\.|$)")
_MOST_RANGES: Final = 12  # most groups that a stack of blocks is divided into


@dataclass(eq=False)
class Gradients(Callback):
    """Measures every `every_steps`th update of a run, whatever sessions it came in."""

    record: Record | None
    every_steps: int
    model: nn.Module
    phases: Phases
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Sums over ranks that hold parts of the weights; then every rank has an observer."""
    _due: bool = False
    _norms: Tensor | None = None

    @classmethod
    def from_settings(
        cls,
        every: Duration | None,
        model: nn.Module,
        phases: Phases,
        sharing: DataParallel,
        record: Record | None,
    ) -> list[Self]:
        """The observer that `observe.gradients` asks for, if it does.

        Where ranks hold parts of the weights, all of them have it; a rank without a record measures
        its part for the others.
        """
        if every is None:
            return []
        return [cls(record, int(every.amount), model, phases, sharing.sum_of_parts)]

    def on_fit_start(self, start: RunStart) -> None:
        """Find the groups and watch the loop's phases."""
        named = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._groups = layer_groups([name for name, _ in named])
        self._due = False
        self.phases.watchers.append(self._watch)

    def on_before_step(self, at: Progress) -> None:
        """Decide if the update that begins is one to measure."""
        self._due, self._norms = (at.step + 1) % self.every_steps == 0, None

    def on_step(self, info: StepInfo) -> None:
        """Write the event; on CUDA this waits for the device."""
        if self._norms is None:
            return
        norms = self._norms.tolist()
        of_groups = self._groups.values()
        squares = self.total([math.fsum(norms[i] ** 2 for i in of) for of in of_groups])
        if self.record is not None:
            found = zip(self._groups, squares, strict=True)
            groups = {group: {"grad_norm": math.sqrt(square)} for group, square in found}
            self.record("gradients", step=info.progress.step, groups=groups)

    def on_fit_end(self, end: RunEnd) -> None:
        """Watch no more."""
        if self._watch in self.phases.watchers:
            self.phases.watchers.remove(self._watch)

    def _watch(self, phase: Phase) -> AbstractContextManager[Any]:
        if self._due and phase == "clip":
            self._norms = _norms_of([p.grad for p in self._parameters], like=self._parameters[0])
        return UNWATCHED


def _norms_of(gradients: Sequence[Tensor | None], *, like: Tensor) -> Tensor:
    """[len(gradients)] Euclidean norm of each in float32, 0 for none, on the device of `like`."""
    there = [local_part(gradient) for gradient in gradients if gradient is not None]
    # One call for all of them on a GPU; it has no public name.
    found = iter(torch._foreach_norm(there) if there else ())  # noqa: SLF001
    zero = torch.zeros((), device=like.device)
    norms = [zero if gradient is None else next(found) for gradient in gradients]
    return torch.stack([norm.to(zero.device, torch.float32) for norm in norms])


def layer_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Group -> positions in `names` of its parameters; a tied head counts as the embedding.

    A stack of more than twelve blocks is divided into ranges of equal length.

    >>> layer_groups(["transformer.wte.weight", "transformer.h.0.ln_1.bias", "lm_head.weight"])
    {'embedding': [0], 'block 0': [1], 'head': [2]}
    >>> sorted(layer_groups([f"h.{i}.w" for i in range(24)]))[:2]
    ['blocks 0-1', 'blocks 10-11']
    """
    blocks = [_BLOCK.search(name) for name in names]
    depth: dict[str | None, int] = {}
    for found in filter(None, blocks):
        depth[found[1]] = max(depth.get(found[1], 0), int(found[2]) + 1)
    groups: dict[str, list[int]] = {}
    for position, (name, block) in enumerate(zip(names, blocks, strict=True)):
        if block is not None:
            n_blocks = depth[block[1]]
            width = -(-n_blocks // _MOST_RANGES)
            first = int(block[2]) // width * width
            last = min(first + width, n_blocks) - 1
            place = f"blocks {first}-{last}" if last > first else f"block {first}"
            group = f"{block[1]} {place}" if block[1] else place
        elif _HEAD.search(name):
            group = "head"
        else:  # "other" is the last norm, above all
            group = "embedding" if _EMBEDDING.search(name) else "other"
        adapter = "adapter " if _ADAPTER.search(name) else ""
        groups.setdefault(adapter + group, []).append(position)
    return groups
