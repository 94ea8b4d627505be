"""Check that a model with keyed dropout uses no other random numbers.

Keyed dropout (`keyed_dropout.py`) does not use PyTorch's generators. If a forward advances a
generator, as LayerDrop does (Fan et al. 2019), the loss depends on how rows are grouped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from toque.errors import ConfigError
from toque.models.families import unwrapped
from toque.models.forward.blocks import is_compiled
from toque.models.forward.keyed_dropout import drop_rates, masks_of


@contextmanager
def refuse_unkeyed_draws(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Check a training forward of a model with keyed dropout. Other models are not checked.

    Raises:
        ConfigError: The forward used PyTorch's generator of the CPU or of `device`. The message
            names the innermost module that used it, unless the model is compiled.
    """
    core = unwrapped(model)
    if masks_of(core) is None:
        yield
        return
    watch = _GeneratorWatch(device)
    # Hooks would cause a recompilation, so the modules of a compiled model are not checked.
    modules = [] if is_compiled(core) else list(core.named_modules())
    handles: list[Any] = []
    for path, module in modules:
        handles.append(module.register_forward_pre_hook(watch.enter))
        handles.append(module.register_forward_hook(partial(watch.leave, path)))
    before = watch.states()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not _equal(watch.states(), before):
        raise ConfigError(
            f"{watch.module or 'The model'} uses PyTorch's random generator during "
            f"training{watch.settings}. Its random numbers depend on train.micro_batch_rows and on "
            "the number of ranks, which must not change a run. Set this dropout to 0 in the "
            "model's config.json, or accept the dependence with train.optimisations.dropout=false."
        )


class _GeneratorWatch:
    """Forward hooks that find the innermost module that advances a generator."""

    def __init__(self, device: torch.device) -> None:
        self.module = ""
        self.settings = ""
        self._device = device
        self._entered: list[list[Tensor]] = []

    def states(self) -> list[Tensor]:
        """Read the states of the generators that a forward may use."""
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def enter(self, *_: Any) -> None:
        """Record the states before a module's forward."""
        self._entered.append(self.states())

    def leave(self, path: str, module: nn.Module, *_: Any) -> None:
        """Record the module if it advanced a generator and none of its parts did."""
        before = self._entered.pop()
        # Inner modules leave first.
        if self.module or _equal(self.states(), before):
            return
        self.module = f"{path or 'The model'} ({type(module).__name__})"
        # `p` is the probability of a dropout layer, which is not a setting of config.json.
        rates = [
            f"{name}={rate:g}"
            for name, rate in drop_rates(module).items()
            if name != "p"
        ]
        if rates:
            self.settings = f" (it has {', '.join(rates)})"


def _equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
