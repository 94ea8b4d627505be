"""Gradients and updates by layer group: does every part learn, and how fast.

Every so many updates a `gradients` event has for each group of layers the norm of its gradient,
before clipping and summed over ranks, and the length of the update beside the weights':
|after - before| / |before|. About 1e-3 is healthy for most; 1e-6 hardly moves, 1e-1 tears.

The weights are not copied. The ratio is taken from at most `MOST_WEIGHTS` of each parameter, evenly
spread over it, which is all of a small one; so nothing is read twice but those.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from toque.training.callbacks import Callback, RunEnd, RunStart, StepInfo
from toque.training.distributed.sharing import Sharing, own_part
from toque.training.observers.system_sampler import Record
from toque.training.phases import UNWATCHED, Phase, Phases
from toque.training.runtime import Runtime
from toque.units import Duration, Progress

MOST_WEIGHTS: Final = 4096
"""Weights sampled of one parameter: their ratio is right to a few per cent."""
_BLOCK: Final = re.compile(
    r"(?:^|\.)(?:(encoder|decoder)\.)?(?:block|blocks|h|layer|layers)\.([0-9]+)\."
)
"""T5's encoder.block.3., GPT-2's h.3., NeoX' and Llama's layers.3."""
_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|head)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:shared|wte|wpe|embed|embed_in|embed_tokens|embeddings?|position_embeddings)\."
)
_ADAPTER: Final = re.compile(r"\.(?:lora_\w+|trainable_tokens_\w+)(?:\.|$)")
_MOST_RANGES: Final = 12
"""Most groups that a stack of blocks is divided into."""


@dataclass(eq=False)
class Gradients(Callback):
    """Measures every `every_steps`th update of a run, whatever sessions it came in."""

    record: Record
    every_steps: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    phases: Phases
    total: Callable[[Sequence[float]], Sequence[float]] = tuple
    """Sums over ranks that hold parts of the weights; then every rank has an observer."""
    _due: bool = False
    _norms: list[Tensor] = field(default_factory=list)
    _moved: list[Tensor] = field(default_factory=list)
    _length: list[Tensor] = field(default_factory=list)

    @classmethod
    def from_settings(
        cls,
        every: Duration | None,
        record: Record | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        runtime: Runtime,
        sharing: Sharing,
    ) -> list[Self]:
        """The observer that `observe.gradients` asks for, if it does.

        Where ranks hold parts of the weights, all of them have it; a rank without a record measures
        its part for the others.
        """
        if every is None:
            return []
        total = sharing.sum_of_parts if sharing.is_sharded else tuple
        return [
            cls(record or _unrecorded, int(every.amount), model, optimizer, runtime.phases, total)
        ]

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
            group: {
                "grad_norm": norms[group],
                "update_ratio": moved[group] / length[group] if length[group] > 0 else None,
            }
            for group in self._groups
        }
        rules = [
            {
                "parameters": sum(p.numel() for p in group["params"]),
                "learning_rate": float(group["lr"]),
                "weight_decay": float(group.get("weight_decay", 0.0)),
            }
            for group in self.optimizer.param_groups
        ]
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


def _unrecorded(event: str, **fields: object) -> None: ...


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
