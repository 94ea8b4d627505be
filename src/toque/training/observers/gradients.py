"""Gradient norms by layer group, to see whether every part of the model learns.

A `gradients` event contains the norm of each group's gradient before clipping, over all ranks.
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
"""Names of a block's parameters: encoder.block.3. in T5, h.3. in GPT-2, layers.3. in Llama.
"""
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|head)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:shared|wte|wpe|embed|embed_in|embed_tokens|embeddings?|position_embeddings)\."
)
_ADAPTER: Final = re.compile(r"\.(?:lora_\w+|trainable_tokens_\w+)(?:\.|$)")
_MAX_GROUPS: Final = 12  # maximum number of groups per stack of blocks


@dataclass(eq=False)
class Gradients(Callback):
    """Callback that records the gradient norms of every `every_steps`th update."""

    record: Record | None
    every_steps: int
    model: nn.Module
    phases: Phases
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Function that sums over all ranks. If weights are sharded, every rank must call it.
    """
    _is_due: bool = False
    _norms: Tensor | None = None

    @classmethod
    def list_if_enabled(
        cls,
        every: Duration | None,
        model: nn.Module,
        phases: Phases,
        sharing: DataParallel,
        record: Record | None,
    ) -> list[Self]:
        """Build the callback for observe.gradients. The list is empty without this setting.

        If weights are sharded, all ranks need the callback: a rank without a record measures its
        shard.
        """
        if every is None:
            return []
        return [cls(record, int(every.amount), model, phases, sharing.sum_of_parts)]

    def on_fit_start(self, start: RunStart) -> None:
        """Group the parameters, and watch the loop's phases."""
        trainable = [
            (name, parameter)
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]
        self._parameters = [parameter for _, parameter in trainable]
        self._groups = layer_groups([name for name, _ in trainable])
        self._is_due = False
        self.phases.watchers.append(self._measure_before_clipping)

    def on_before_step(self, at: Progress) -> None:
        """Decide whether to measure the next update."""
        self._is_due = (at.step + 1) % self.every_steps == 0
        self._norms = None

    def on_step(self, info: StepInfo) -> None:
        """Write the event. On CUDA this waits for the device."""
        if self._norms is None:
            return
        norms = self._norms.tolist()
        squares = [
            math.fsum(norms[i] ** 2 for i in positions)
            for positions in self._groups.values()
        ]
        totals = self.total(squares)  # every rank calls it, even without a record
        if self.record is not None:
            groups = {
                group: {"grad_norm": math.sqrt(total)}
                for group, total in zip(self._groups, totals, strict=True)
            }
            self.record("gradients", step=info.progress.step, groups=groups)

    def on_fit_end(self, end: RunEnd) -> None:
        """Stop watching the phases."""
        if self._measure_before_clipping in self.phases.watchers:
            self.phases.watchers.remove(self._measure_before_clipping)

    def _measure_before_clipping(self, phase: Phase) -> AbstractContextManager[Any]:
        if self._is_due and phase == "clip":
            self._norms = _gradient_norms(self._parameters)
        return UNWATCHED


def _gradient_norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the norm of each parameter's gradient, 0 without a gradient, [parameters] float32."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    # torch has no public name for this function, which on a GPU needs one call for all norms.
    computed = iter(torch._foreach_norm(gradients) if gradients else ())  # noqa: SLF001
    zero = torch.zeros((), device=parameters[0].device)
    norms = [zero if p.grad is None else next(computed) for p in parameters]
    return torch.stack([norm.to(zero.device, torch.float32) for norm in norms])


def layer_groups(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the positions of each group's parameters in `names`.

    A tied head is part of the embedding. More than twelve blocks of a stack are divided into ranges
    of equal length.

    >>> layer_groups(["transformer.wte.weight", "transformer.h.0.ln_1.bias", "lm_head.weight"])
    {'embedding': [0], 'block 0': [1], 'head': [2]}
    >>> sorted(layer_groups([f"h.{i}.w" for i in range(24)]))[:2]
    ['blocks 0-1', 'blocks 10-11']
    """
    blocks = [_BLOCK.search(name) for name in names]
    depth_by_stack: dict[str | None, int] = {}
    for match in filter(None, blocks):
        stack, number = match.groups()
        depth_by_stack[stack] = max(depth_by_stack.get(stack, 0), int(number) + 1)

    groups: dict[str, list[int]] = {}
    for position, (name, block) in enumerate(zip(names, blocks, strict=True)):
        if block is not None:
            stack, number = block.groups()
            group = _name_block_range(stack, int(number), depth_by_stack[stack])
        elif _HEAD.search(name):
            group = "head"
        elif _EMBEDDING.search(name):
            group = "embedding"
        else:
            group = "other"  # mainly the last norm
        if _ADAPTER.search(name):
            group = f"adapter {group}"
        groups.setdefault(group, []).append(position)
    return groups


def _name_block_range(stack: str | None, number: int, depth: int) -> str:
    """Name the group of block `number` in a stack of `depth` blocks."""
    width = math.ceil(depth / _MAX_GROUPS)
    first = number // width * width
    last = min(first + width, depth) - 1
    group = f"blocks {first}-{last}" if last > first else f"block {first}"
    return f"{stack} {group}" if stack else group
